"""A rank whose state others save, and who is none of its writers, calls `save` as they do: its loop goes on as theirs."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.savers import no_threads_left

from torchft_ckpt import Checkpointer, Tier, checkpoints_in
from torchft_ckpt.checkpointing.durable.saving.saver import SaveMode
from torchft_ckpt.core.coordination.messages import StateVersion
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError
from torchft_ckpt.manager.saving import Onlooking, SaveIdentity
from torchft_ckpt.manager.volatile import capture_for_save

LONG_S = 60.0


class Rank:
    """A rank of a group, by what its Manager says that it is in a save."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.checkpointer = Checkpointer(directory, **options)
        self.step, self.looks_on, self.place = 0, True, (0, 1)
        manager = mock.MagicMock()
        manager.view.side_effect = lambda: mock.MagicMock(**{"held.step": self.step})
        self.writers, self.lost = ["a", "b"], [1]
        self.has_asked = threading.Event()
        manager.hooks.lost_contributors.side_effect = lambda *_, asks: (self.lost, self.has_asked.set())[0]
        manager.hooks.contributor_names.side_effect = lambda *_: self.writers
        self.events: list[bool] = []
        stubs: dict[str, Any] = {
            "_manager": manager,
            "_identity": self._identity,
            "_state_of": self._state_of,
            "_is_in_step": lambda: False,
            "_note_saved": lambda _, saved: self.events.append(saved.is_closed),
        }
        vars(self.checkpointer).update(stubs)

    def _identity(self, _: object) -> SaveIdentity | Onlooking:
        if self.looks_on:
            return Onlooking(self.step, "q1", StateVersion(step=self.step, quorum_id=1, epoch="e"))
        return SaveIdentity(self.step, "q1", *self.place, 0, 1, f"group_{self.place[0]}")

    def _state_of(self, _: object) -> Any:
        assert not self.looks_on, "nothing is captured to look on"
        return capture_for_save({"weight": torch.arange(1000.0)}, [])

    def save(self, step: int, *, looks_on: bool, place: tuple[int, int] = (0, 1), tier: Tier = Tier.STORAGE) -> Any:
        self.step, self.looks_on, self.place = step, looks_on, place
        return self.checkpointer.save(tier=tier)


def begun(directory: Path, step: int) -> None:
    """Somebody writes a checkpoint of that step, and does not come to its end."""
    folder = directory / f"step-{step:012d}.q1"
    folder.mkdir()
    (folder / "begun").touch()


def test_its_future_is_done_when_the_writers_have_closed_the_checkpoint_and_it_has_removed_nothing(
    tmp_path: Path,
) -> None:
    writer, onlooker = Rank(tmp_path), Rank(tmp_path, keep_last=1)
    assert writer.save(1, looks_on=False).result(LONG_S).is_closed
    begun(tmp_path, 2)
    future = onlooker.save(2, looks_on=True)
    assert not future.done()
    before = writer.save(2, looks_on=False).result(LONG_S)
    saved = future.result(LONG_S)
    assert (saved.name, saved.is_closed, saved.written_bytes) == (before.name, True, 0)
    assert onlooker.save(2, looks_on=True) is future
    for rank in (writer, onlooker):
        rank.checkpointer.shutdown()
    assert sorted(checkpoints_in(tmp_path)) == [1, 2]
    assert onlooker.events == [True]


def test_it_never_holds_its_next_save_up(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for step in (1, 2):
        begun(tmp_path, step)
    futures = [rank.save(1, looks_on=True), rank.save(2, looks_on=True), rank.save(3, looks_on=False)]
    assert [future.result(LONG_S).is_closed for future in futures] == [False, False, True]
    rank.checkpointer.shutdown()
    assert checkpoints_in(tmp_path) == [3]
    assert rank.events == [True]


def test_who_is_counted_on_after_all_as_the_writers_are_gone_writes_the_step_at_which_it_looked_on(
    tmp_path: Path,
) -> None:
    rank = Rank(tmp_path)
    begun(tmp_path, 1)
    looked, wrote = rank.save(1, looks_on=True), rank.save(1, looks_on=False)
    assert wrote is not looked and wrote.result(LONG_S).is_closed and not looked.result(LONG_S).is_closed
    assert rank.save(1, looks_on=True) is wrote
    rank.checkpointer.shutdown()


def test_who_looks_on_goes_on_when_all_who_write_have_died(tmp_path: Path) -> None:
    """Else the only one that still holds the state, a spare perhaps, would stand still for as long as a save may take."""
    rank = Rank(tmp_path)
    begun(tmp_path, 1)
    future = rank.save(1, looks_on=True)
    assert rank.has_asked.wait(LONG_S) and not future.done(), "one of them lives"
    rank.lost = [0, 1]
    assert not future.result(LONG_S).is_closed and not rank.events
    rank.checkpointer.shutdown()


def test_what_does_not_become_whole_in_time_fails_by_name(tmp_path: Path) -> None:
    rank = Rank(tmp_path, timeout=timedelta(seconds=0.2))
    begun(tmp_path, 1)
    error = rank.save(1, looks_on=True).exception(LONG_S)
    assert isinstance(error, CheckpointDamagedError)
    assert "step-000000000001.q1 did not become whole within 0.2 s: its writers have not closed it" in str(error)
    rank.checkpointer.shutdown()


@pytest.mark.parametrize("tier", [Tier.STORAGE, Tier.LOCAL])
def test_where_each_group_writes_a_copy_of_its_own_nothing_is_waited_for(tmp_path: Path, tier: Tier) -> None:
    """It has none, and does not see those of the others."""
    mode = SaveMode.EVERY_GROUP if tier is Tier.STORAGE else SaveMode.SHARED
    rank = Rank(tmp_path / "all", mode=mode, local_location=tmp_path / "host")
    saved = rank.save(1, looks_on=True, tier=tier).result(LONG_S)
    assert (saved.is_closed, saved.written_bytes) == (False, 0)
    rank.checkpointer.shutdown()
    assert not [*tmp_path.rglob("step-*")] and not rank.events


def test_shutdown_gives_up_what_is_not_whole_and_leaves_no_thread(tmp_path: Path) -> None:
    with no_threads_left():
        rank = Rank(tmp_path)
        begun(tmp_path, 1)
        future = rank.save(1, looks_on=True)
        rank.checkpointer.shutdown(wait=False)
        assert type(future.exception(0)) is CheckpointError and "waited for no more" in str(future.exception(0))
