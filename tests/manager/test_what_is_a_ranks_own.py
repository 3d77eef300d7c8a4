"""What a rank saved of its own comes back to it, or a warning says that it does not, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.replicas import Replica, lighthouse_of, shutdown, together

from torchft_ckpt import Checkpointer
from torchft_ckpt.core.durable.restore_source import RestoreSource

LONG_S = 60.0


def names_of(said: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in said.records if record.levelname == "WARNING" and text in record.message]


def run(names: Sequence[str | None], directory: Path, *, saves: bool) -> list[object]:
    """Start groups of these names, together; have them train for a step and save, or return what each gets back."""
    server = lighthouse_of(len(names))
    with ThreadPoolExecutor(len(names)) as pool:
        replicas = list(pool.map(lambda name: Replica(server, name, min_replica_size=len(names)), names))
    checkpointers = {id(replica): Checkpointer(directory, manager=replica.manager) for replica in replicas}

    def act(replica: Replica) -> object:
        checkpointer = checkpointers[id(replica)]
        if not saves:
            restored = checkpointer.restore(timeout=timedelta(seconds=30))
            assert restored.source is RestoreSource.STORAGE
            return restored.rank_state
        for _ in range(2):
            assert replica.step()
            own = {"of": replica.manager.replica_id().rpartition(":")[0]}
            checkpointer.save(rank_state=own).result(LONG_S)
        return own

    try:
        return together(replicas, act)
    finally:
        for checkpointer in checkpointers.values():
            checkpointer.shutdown()
        shutdown(*replicas)
        server.shutdown()


@pytest.mark.slow
def test_groups_with_the_names_of_before_get_their_own_back_in_any_order_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run(["a", "b"], tmp_path, saves=True)
        assert run(["b", "a"], tmp_path, saves=False) == [{"of": "b"}, {"of": "a"}]
    assert not names_of(caplog, "own")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected", "num_warned", "why"),
    [
        (["a", "b"], ["a", "b", "c"], [{"of": "a"}, {"of": "b"}, None], 1, "of 'c' is none of those who saved it"),
        (["a", "b"], ["x", "y"], [None, None], 2, "1 of each of a, b"),
        (["a", "b", "c"], ["a", "b"], [{"of": "a"}, {"of": "b"}], 2, "3 groups saved it (a, b, c), and 2 start"),
    ],
    ids=["one more", "other names", "one less"],
)
def test_each_restore_that_leaves_something_behind_warns(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    before: list[str],
    after: list[str],
    expected: list[object],
    num_warned: int,
    why: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        run(before, tmp_path, saves=True)
        assert not names_of(caplog, "of their own")
        assert run(after, tmp_path, saves=False) == expected
    said = names_of(caplog, "of their own at step 2")
    assert len(said) == num_warned and all(why in message for message in said)


@pytest.mark.slow
def test_groups_without_a_name_are_told_once_at_the_save_and_at_each_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run([None, None], tmp_path, saves=True)
        assert len(said := names_of(caplog, "will not be restored")) == 2, "each of the groups, once"
        assert all("replica_id" in message for message in said)
        assert run([None, None], tmp_path, saves=False) == [None, None]
    said = names_of(caplog, "of their own at step 2")
    assert len(said) == 2 and all("give each Manager a replica_id" in message for message in said)


@pytest.mark.parametrize("has_own", [True, False])
def test_groups_of_more_ranks_warn_if_there_was_something_to_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    saving = Checkpointer(tmp_path, save_random_state=False)
    saving.save({"w": torch.ones(2)}, step=4, rank_state={"place": 7} if has_own else None).result(LONG_S)
    assert saving.load({"w": torch.zeros(2)}).rank_state == ({"place": 7} if has_own else None)
    saving.shutdown()
    loading = Checkpointer(tmp_path)
    monkeypatch.setattr(loading, "_place", (0, 4))
    with caplog.at_level(logging.WARNING):
        assert loading.load({"w": torch.zeros(2)}).rank_state is None
    loading.shutdown()
    assert len(names_of(caplog, "of their own at step 4")) == has_own
