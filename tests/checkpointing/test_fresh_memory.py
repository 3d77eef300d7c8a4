"""Memory to receive into: touching it changes nothing that is in it, it is private, and the last tensor gives it back."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from torchft_ckpt.checkpointing.state import memory
from torchft_ckpt.checkpointing.state.memory import Toucher, fresh_memory

MIB = 1024 * 1024
linux = pytest.mark.skipif(
    sys.platform != "linux" or memory._madvise() is None, reason="needs Linux 5.14, which touches memory for us"
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["as it is", "of a system that cannot touch"])
def system(request, monkeypatch):
    if request.param != "as it is":
        monkeypatch.setattr(memory, "_madvise", lambda: None)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_it_has_the_length_that_was_asked_for_and_can_be_written(system, num_bytes):
    buffer = fresh_memory(num_bytes)
    Toucher().touch(buffer.data)
    buffer[:] = 7
    assert buffer.nbytes == num_bytes and bytes(buffer) == b"\7" * num_bytes


def test_touching_changes_nothing_that_is_there(system):
    buffer = fresh_memory(9 * MIB + 5)
    buffer[:] = 3
    for low, high in ((0, 9 * MIB + 5), (1, 2), (4 * MIB - 1, 6 * MIB + 1), (5, 9 * MIB)):
        Toucher().touch(buffer.data[low:high])
    assert bytes(buffer) == b"\3" * len(buffer)


@pytest.mark.slow
@linux
def test_memory_is_backed_once_it_is_touched_not_before_and_goes_with_the_last_tensor():
    before = resident_bytes()
    buffer = fresh_memory(64 * MIB)
    assert resident_bytes() - before < 8 * MIB
    Toucher().touch(buffer.data[: 32 * MIB])
    assert 24 * MIB < resident_bytes() - before < 40 * MIB
    buffer[:] = 1
    row = torch.frombuffer(buffer, dtype=torch.float32).view(2, -1)[1]
    del buffer
    gc.collect()
    assert resident_bytes() - before > 56 * MIB and row.view(torch.uint8).eq(1).all()
    del row
    gc.collect()
    assert resident_bytes() - before < 8 * MIB


@linux
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_write_to_it():
    """It is private: what a forked data loader does to a tensor is its own affair."""
    buffer = fresh_memory(4 * MIB)
    buffer[:] = 1
    pid = os.fork()
    if not pid:
        buffer[:] = 2
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(buffer) == b"\1" * (4 * MIB)


def test_where_no_more_mappings_are_to_be_had_it_is_ordinary_memory(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    memory._madvise()
    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    buffer = fresh_memory(4 * MIB)
    Toucher().touch(buffer.data)
    buffer[:] = 1
    assert buffer.nbytes == 4 * MIB
