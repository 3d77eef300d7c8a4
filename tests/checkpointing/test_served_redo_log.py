"""What the log of a source does with gradients on an accelerator, for which memory of another device stands in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.redo import Source, version
from support.waiting import wait_until

from torchft_ckpt.checkpointing.serving.redo import MAX_STAGED_AT_ONCE, ServedRedoLog
from torchft_ckpt.checkpointing.state.redo_entry import OptimizerStep, RedoEntry
from torchft_ckpt.checkpointing.state.versions import StateVersions
from torchft_ckpt.core.transfer.redo_log import Gone


class SlowCopy:
    """A snapshot whose copy to the host takes until it is told to end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_ended = threading.Event()

    def stage(self) -> None:
        assert self.may_end.wait(20)
        self.has_ended.set()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> ServedRedoLog:
    made = ServedRedoLog(block_bytes=4096, budget_bytes=1 << 20)
    copies: list[SlowCopy] = []

    def snapshot_of(_: Any) -> SlowCopy:
        copies.append(SlowCopy())
        return copies[-1]

    monkeypatch.setattr(made, "snapshot_of", snapshot_of)
    made.copies = copies  # type: ignore[attr-defined]
    made.begin(version(0), 1, 0.0)
    return made


def append(log: ServedRedoLog, step: int) -> None:
    gradient = torch.empty(8, device="meta")
    steps = [OptimizerStep(optimizer=0, settings=[[]], attributes={}, gradients=[gradient])]
    entry = RedoEntry(after=version(step - 1), version=version(step), batches_committed=step, steps=steps)
    log.append(entry, StateVersions([gradient]))


def test_a_log_whose_gradients_come_faster_than_they_can_be_copied_ends(log: Any) -> None:
    for step in range(1, MAX_STAGED_AT_ONCE + 1):
        append(log, step)
    assert log.is_kept
    append(log, MAX_STAGED_AT_ONCE + 1)
    assert not log.is_kept
    answer = log.ask("learner", "client", version(0), 1.0)
    assert isinstance(answer, Gone)
    assert "faster than they can be copied to the host" in answer.reason
    for copy in log.copies:
        copy.may_end.set()


def test_gradients_that_are_on_the_host_make_room_for_the_next(log: Any) -> None:
    for step in range(1, 3 * MAX_STAGED_AT_ONCE):
        append(log, step)
        log.copies[-1].may_end.set()
        wait_until(lambda: not log._num_staging, "the copy ends", 20.0)
    assert log.is_kept


def test_on_the_host_nothing_is_copied() -> None:
    log = ServedRedoLog(block_bytes=4096, budget_bytes=1 << 20)
    source = Source(torch.optim.SGD([torch.nn.Parameter(torch.ones(64))]))
    source.recorder._sink = log
    source.begin()
    for _ in range(2 * MAX_STAGED_AT_ONCE):
        source.train()
    assert (log.is_kept, log._num_staging) == (True, 0)
