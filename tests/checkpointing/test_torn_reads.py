"""Whoever writes into a state that is in use finishes, or the error says that the state is torn: in its flag, and in its words.

One test for each way in which a read can die half-way. What a Manager makes of it is in `tests/manager/test_heal_in_place.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.resharding import LONG, LyingSource, Reply, make_transport
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

from torchft_ckpt import Checkpointer, PeerReader, load_checkpoint
from torchft_ckpt import checkpointer as checkpointer_module
from torchft_ckpt.checkpointing.durable.reading import loading
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.resharding import plan
from torchft_ckpt.checkpointing.state import target
from torchft_ckpt.errors import (
    CheckpointDamagedError,
    CheckpointError,
    SourceLostError,
    StateDictLoadError,
    StateMismatchError,
    StorageError,
    torn_where_it_raises,
)

STEP = 7
NUM = 8


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((1000,), value) for number in range(NUM)}


def num_written(state: dict[str, Any]) -> int:
    return sum(bool(tensor.any()) for tensor in state.values() if isinstance(tensor, torch.Tensor))


def says_torn(error: BaseException) -> bool:
    """In its flag and in its words alike; and once."""
    assert isinstance(error, CheckpointError)
    assert error.state_overwritten == ("torn" in str(error))
    assert str(error).count("is torn") <= 1
    return error.state_overwritten


class Cut:
    """Ends the connection at each request for parts after the first few."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, reply: Reply) -> None:
        if reply.kind == "parts":
            self._left -= 1
            if self._left < 0:
                reply.cut()
                return
        reply.send()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a source that serves a state in parts of 2 kB."""
    monkeypatch.setattr(plan, "PART_BYTES", 2048)
    source = make_transport()
    source.send_checkpoint([], STEP, {**state_of(1.0), "lr": 0.5}, LONG)
    yield source.metadata()
    source.shutdown()


# ------------------------------------------------------------------------------------------------------ from peers


def load_by_dcp(
    url: str, state: dict[str, Any], planner: DefaultLoadPlanner | None = None
) -> tuple[str, BaseException]:
    """Load; return what the user sees, and the error within it."""
    reader = PeerReader([url], step=STEP, root="", timeout=LONG, stall_timeout=LONG)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    ((error, _),) = caught.value.failures.values()
    return str(caught.value), error


def test_a_load_by_dcp_whose_source_dies_half_way_says_torn_in_dcps_own_words(url: str) -> None:
    state = state_of(0.0)
    with LyingSource(url, Cut(after=1)) as dying:
        seen, error = load_by_dcp(dying.url, state)
    assert 0 < num_written(state) < NUM
    assert isinstance(error, SourceLostError) and says_torn(error)
    assert "the state that was here is torn" in seen


def test_a_load_by_dcp_whose_source_dies_before_a_part_came_has_torn_nothing(url: str) -> None:
    state = state_of(0.0)
    with LyingSource(url, Cut(after=0)) as dying:
        _, error = load_by_dcp(dying.url, state)
    assert num_written(state) == 0 and not says_torn(error)


def test_a_load_by_dcp_whose_planner_raises_at_the_end_says_torn(url: str) -> None:
    class Raises(DefaultLoadPlanner):
        def load_bytes(self, *_: object) -> None:
            raise ValueError("no room for a learning rate")

    seen, error = load_by_dcp(url, {**state_of(0.0), "lr": 0.0}, Raises())
    assert says_torn(error) and "reading step 7 failed: ValueError: no room for a learning rate" in seen


def test_a_re_sharded_receive_into_tensors_that_are_copied_to_at_the_end_says_torn(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: nothing is received into them, but two of eight are written when the third copy fails."""
    copies = iter(range(NUM))

    def copy_two(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if next(copies) == 2:
            raise RuntimeError("the device is lost")
        tensor.copy_(value)

    monkeypatch.setattr(target, "copy_to", copy_two)
    monkeypatch.setattr(target, "is_plain_memory", lambda tensor: False)
    local, receiver = state_of(0.0), make_transport()
    try:
        with pytest.raises(CheckpointError, match="the device is lost") as caught:
            receiver.fetch_sharded([[url]], 0, 1, STEP, LONG, local_state={**local, "lr": 0.0}, in_place=True)
    finally:
        receiver.shutdown()
    assert num_written(local) == 2 and says_torn(caught.value)


# ------------------------------------------------------------------------------------------------ from a checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save({"big": torch.ones(300_000) * step, "small": torch.ones(3)}, step=step).result(60)
    checkpointer.shutdown()
    return tmp_path


def of_step(directory: Path, step: int) -> Path:
    (found,) = directory.glob(f"step-{step:012d}.*")
    return found


def damage(directory: Path, step: int) -> None:
    (file,) = of_step(directory, step).glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[300_000 * 4 // 2] ^= 1
    file.write_bytes(data)


def zeros() -> dict[str, Any]:
    return {"big": torch.zeros(300_000), "small": torch.zeros(3)}


def test_a_load_of_a_damaged_checkpoint_says_torn(directory: Path) -> None:
    damage(directory, 2)
    state = zeros()
    with pytest.raises(CheckpointDamagedError) as caught:
        load_checkpoint(of_step(directory, 2), state)
    assert says_torn(caught.value) == bool(num_written(state)) is True


def test_a_reader_that_fails_in_a_way_that_nobody_thought_of_says_torn(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = zeros()

    def copy_small(held: object, *rest: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("torchft_ckpt.checkpointing.durable.reading.reader.copy_box", copy_small)
    with pytest.raises(CheckpointError, match="TypeError: a bug") as caught:
        load_checkpoint(of_step(directory, 2), state)
    assert says_torn(caught.value)


def test_a_tensor_that_cannot_be_copied_to_when_all_is_read_leaves_a_torn_state(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(target, "copy_to", fail)
    monkeypatch.setattr(target, "is_plain_memory", lambda tensor: False)
    with pytest.raises(CheckpointError, match="the device is lost") as caught:
        load_checkpoint(of_step(directory, 2), zeros())
    assert says_torn(caught.value)


class Picky:
    """An object of the user's that cannot load what it saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"small": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("one layer too many")


@pytest.mark.parametrize("by", ["load_checkpoint", "Checkpointer"])
def test_a_load_state_dict_of_the_users_that_raises_leaves_a_torn_state(tmp_path: Path, by: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"big": torch.ones(10), "picky": Picky()}, step=1).result(60)
    state = {"big": torch.zeros(10), "picky": Picky()}
    with pytest.raises(
        StateDictLoadError, match="load_state_dict of 'picky' raised KeyError: 'one layer too many'"
    ) as caught:
        if by == "Checkpointer":
            checkpointer.load(state)
        else:
            load_checkpoint(of_step(tmp_path, 1), state)
    checkpointer.shutdown()
    assert says_torn(caught.value) and bool(state["big"].all())


def test_what_a_damaged_newer_checkpoint_overwrote_is_torn_where_no_older_one_fits(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(directory, 2)
    state, load = zeros(), loading.load_into

    def load_into(reader: CheckpointReader, *args: Any, **options: Any) -> None:
        if reader.checkpoint.name.step == 1:
            raise StateMismatchError("it does not fit; nothing was changed", "here")
        load(reader, *args, **options)

    monkeypatch.setattr(checkpointer_module, "load_into", load_into)
    checkpointer = Checkpointer(directory)
    with pytest.raises(StateMismatchError) as caught:
        checkpointer.load(state)
    assert num_written(state) and says_torn(caught.value)
    with pytest.raises(StateMismatchError) as caught:
        checkpointer.load(zeros(), step=1)
    assert not says_torn(caught.value), "nothing was overwritten yet"
    checkpointer.shutdown()


# ------------------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize("has_written", [True, False])
@pytest.mark.parametrize("kind", [SourceLostError, StorageError, StateMismatchError, ValueError])
def test_what_is_raised_says_torn_exactly_where_something_was_written(kind: type[Exception], has_written: bool) -> None:
    with pytest.raises(Exception, match="why") as caught:
        with torn_where_it_raises("outer", "who", lambda: has_written):
            with torn_where_it_raises("inner", "who", lambda: has_written):
                raise kind("why")
    assert isinstance(caught.value, CheckpointError if has_written or kind is not ValueError else kind)
    if isinstance(caught.value, CheckpointError):
        assert says_torn(caught.value) is has_written
