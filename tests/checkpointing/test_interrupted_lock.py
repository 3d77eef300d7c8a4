"""An interrupt at any point of the lock: afterwards it is free, or belongs to who can give it back, and others get in.

The interrupt is raised before each single opcode in turn, of the lock and of what makes its context managers, so also at points
to which CPython brings none.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue

import pytest
import torch
from support.interrupts import interrupted_at

from torchft_ckpt import Checkpointer
from torchft_ckpt.checkpointing import StateDictLock, lock
from torchft_ckpt.errors import CheckpointError, LockTimeoutError

LONG = timedelta(seconds=90)
TRACED = {inspect.getsourcefile(lock), inspect.getsourcefile(contextlib)}


def at_every_opcode(prepare: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """Yield each number of an opcode of what `prepare` returns, once it was interrupted there."""
    opcode = 0
    while interrupted_at(opcode, prepare(), files=TRACED):
        yield opcode
        opcode += 1


def is_free_for_others(tried: StateDictLock) -> bool:
    """Whether other threads get in: a reader, a writer, and two readers at once."""
    entered: list[str] = []

    def enter() -> None:
        with tried.write(LONG):
            entered.append("writer")
        with tried.read(LONG), tried.try_read() as is_held:
            entered.append(f"reader {is_held}")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(LONG.total_seconds())
    return entered == ["writer", "reader True"]


def acquire_and_release(tried: StateDictLock) -> None:
    tried.acquire_write(LONG)
    tried.release_write()


def read(tried: StateDictLock) -> None:
    with tried.read(LONG):
        pass


def try_to_read(tried: StateDictLock) -> None:
    with tried.try_read():
        pass


def write(tried: StateDictLock) -> None:
    with tried.write(LONG):
        pass


def write_and_read_within(tried: StateDictLock) -> None:
    with tried.write(LONG), tried.write(LONG), tried.read(LONG):
        pass


@pytest.mark.parametrize("use", [acquire_and_release, read, try_to_read, write, write_and_read_within])
def test_an_interrupt_at_any_opcode_leaves_the_lock_free_or_with_a_thread_that_can_give_it_back(use):
    locks: list[StateDictLock] = []

    def prepare() -> Callable[[], object]:
        locks.append(StateDictLock())
        return lambda: use(locks[-1])

    num_opcodes = num_kept = 0
    for opcode in at_every_opcode(prepare):
        tried = locks[-1]
        num_opcodes += 1
        num_kept += tried.held_for_write()
        tried.release_write()
        assert is_free_for_others(tried), f"opcode {opcode} of {use.__name__}"
    assert num_opcodes > 100
    assert num_kept == 0 or use is acquire_and_release  # which has no block that ends


@pytest.mark.parametrize("use", [acquire_and_release, write])
def test_an_interrupted_writer_that_readers_keep_out_does_not_keep_others_out(use):
    """With a reader in the lock: the interrupted one is in the queue, and new readers wait for it."""
    locks: list[StateDictLock] = []
    reads = contextlib.ExitStack()

    def prepare() -> Callable[[], object]:
        reads.close()
        tried = StateDictLock()
        locks.append(tried)
        reader = threading.Thread(target=lambda: reads.enter_context(tried.read(LONG)))
        reader.start()
        reader.join()

        def try_once() -> None:
            with contextlib.suppress(LockTimeoutError):
                tried.acquire_write(timedelta(0)) if use is acquire_and_release else write_soon(tried)

        return try_once

    num_opcodes = 0
    for opcode in at_every_opcode(prepare):
        num_opcodes += 1
        with locks[-1].try_read() as is_held:
            assert is_held, f"opcode {opcode} of {use.__name__}"
    assert num_opcodes > 100


def write_soon(tried: StateDictLock) -> None:
    with tried.write(timedelta(0)):
        pass


@pytest.mark.parametrize("use", [acquire_and_release, read, write])
def test_who_waits_gets_in_although_the_one_before_was_interrupted_as_it_left(use):
    """The one who is told that the lock is free may not be told, as that is interrupted: he looks by himself."""
    tried = StateDictLock()
    for opcode in range(0, 2000, 97):
        entered = threading.Event()

        def enter(entered: threading.Event = entered) -> None:
            with tried.write(LONG):
                entered.set()

        waits = threading.Thread(target=enter)
        with tried.write():
            waits.start()
        interrupted_at(opcode, lambda: use(tried), files=TRACED)
        tried.release_write()
        assert entered.wait(LONG.total_seconds())
        waits.join()


def test_only_who_gives_a_side_back_wakes_those_that_wait():
    tried, bell = StateDictLock(), SimpleQueue()
    tried._bells[bell] = None
    for use in (acquire_and_release, read, try_to_read, write):
        use(tried)
        assert [bell.get(), bell.empty()] == [None, True], use.__name__
    with tried.write():
        reader = threading.Thread(target=try_to_read, args=(tried,))
        reader.start()
        reader.join()
        assert bell.empty(), "it had nothing to give back"


def test_a_save_from_a_signal_handler_while_its_thread_waits_to_write_does_not_break_the_wait(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    tried, saves = checkpointer.state_dict_lock, []
    turn = lock._Turn(None)
    tried._writers[threading.current_thread()] = turn  # as in the middle of `write`, when the handler runs
    saves.append(checkpointer.save({"w": torch.ones(3)}, step=1))
    tried._let_go(threading.current_thread(), turn)
    assert isinstance(saves[0].exception(20), CheckpointError), "nobody knows here when the step is over"
    with tried.write(), tried.read():
        assert not tried.held_for_step()
    assert checkpointer.save({"w": torch.ones(3)}, step=1).result(60).step == 1
    checkpointer.shutdown()


def test_a_signal_handler_that_asks_while_its_thread_waits_to_write_is_told_at_once():
    tried = StateDictLock()
    turn = lock._Turn(None)
    tried._writers[threading.current_thread()] = turn  # as in the middle of `acquire_write`, when the handler runs
    for side in (tried.read, tried.write):
        with pytest.raises(lock.CheckpointError, match="a signal handler asks for the lock"), side():
            pass
    tried._let_go(threading.current_thread(), turn)
    assert is_free_for_others(tried)
