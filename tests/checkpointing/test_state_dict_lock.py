"""The lock between trainer and readers: writers first, timeouts that leave it usable, release that may be repeated."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.errors import CheckpointError, ConfigError, LockTimeoutError

AT_ONCE = timedelta(0)
SOON = timedelta(milliseconds=30)
LONG_S = 90.0


class Held:
    """A thread that holds one side of a lock until it is told to let go."""

    def __init__(self, side) -> None:
        self._side = side
        self.entered = threading.Event()
        self._leave = threading.Event()
        self.was_told = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._side():
            self.entered.set()
            self.was_told = self._leave.wait(LONG_S)

    def __enter__(self) -> Held:
        self._thread.start()
        assert self.entered.wait(LONG_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        self._leave.set()
        self._thread.join(LONG_S)
        assert self.was_told, "it held the lock until its own limit"


def is_free(lock: StateDictLock) -> bool:
    """Whether another thread can take both sides."""

    def take() -> bool:
        with lock.write(timedelta(seconds=60)):
            pass
        with lock.read(timedelta(seconds=60)):
            return True

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(take).result(LONG_S)


def test_readers_share_the_lock():
    lock = StateDictLock()
    with Held(lock.read), lock.read(AT_ONCE):
        pass


def test_a_reader_keeps_a_writer_out_and_the_timed_out_writer_leaves_the_lock_usable():
    lock = StateDictLock()
    with Held(lock.read):
        with pytest.raises(LockTimeoutError, match="no write access"), lock.write(SOON):
            pass
        with lock.read(AT_ONCE):
            pass
    assert is_free(lock)


def test_a_writer_keeps_readers_out_and_the_timed_out_reader_leaves_the_lock_usable():
    lock = StateDictLock()
    with Held(lock.write):
        with pytest.raises(LockTimeoutError, match="no read access"), lock.read(SOON):
            pass
    assert is_free(lock)


def test_many_timeouts_on_both_sides_leave_the_lock_usable():
    lock = StateDictLock()

    def attempt(number: int) -> None:
        try:
            with lock.write(AT_ONCE) if number % 3 == 0 else lock.read(timedelta(microseconds=number)):
                pass
        except LockTimeoutError:
            pass

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(attempt, range(2000)))
    assert is_free(lock)


def test_a_waiting_writer_goes_before_a_reader_that_comes_later():
    lock, order = StateDictLock(), []
    waits = threading.Event()

    def write() -> None:
        waits.set()
        with lock.write():
            order.append("writer")

    writer = threading.Thread(target=write)
    with Held(lock.read) as reader:
        writer.start()
        assert waits.wait(LONG_S)
        while True:  # the writer is waiting once a new reader is kept out
            with lock.try_read() as held:
                if not held:
                    break
        late = threading.Thread(target=lambda: _read_and_note(lock, order))
        late.start()
        reader.let_go()
        writer.join(LONG_S)
        late.join(LONG_S)
    assert order == ["writer", "reader"]


def _read_and_note(lock: StateDictLock, order: list[str]) -> None:
    with lock.read():
        order.append("reader")


def test_release_by_a_thread_that_does_not_hold_the_lock_does_nothing():
    lock = StateDictLock()
    lock.release_write()
    with Held(lock.write):
        lock.release_write()
        with lock.try_read() as held:
            assert not held
    assert is_free(lock)


def test_release_may_be_repeated():
    lock = StateDictLock()
    lock.acquire_write()
    lock.release_write()
    lock.release_write()
    assert is_free(lock)


def test_acquire_after_a_step_that_raised_finds_the_lock_its_own_and_one_release_frees_it():
    lock = StateDictLock()
    lock.acquire_write()  # pre hook; then the step raises, so that the post hook does not run
    lock.acquire_write(AT_ONCE)
    assert lock.held_for_write()
    lock.release_write()
    assert not lock.held_for_write()
    assert is_free(lock)


def test_a_write_block_inside_a_hook_leaves_the_lock_with_the_hook():
    lock = StateDictLock()
    lock.acquire_write()
    with lock.write(AT_ONCE):
        pass
    assert lock.held_for_write()
    lock.release_write()
    assert is_free(lock)


def test_the_writer_may_read():
    lock = StateDictLock()
    with lock.write(), lock.read(AT_ONCE):
        pass
    assert is_free(lock)


def test_a_write_block_that_raises_frees_the_lock():
    lock = StateDictLock()
    with pytest.raises(ZeroDivisionError), lock.write():
        raise ZeroDivisionError
    assert is_free(lock)


def test_a_writer_is_announced_while_it_holds_the_lock_each_time_that_it_may_go_on_to_write():
    """Also where it holds it already: a step that raised may have kept it, and something was handed out since."""
    lock, seen = StateDictLock(), []

    def note() -> None:
        seen.append(lock.held_for_write())

    lock.add_before_write(note)
    lock.acquire_write()
    lock.acquire_write()
    lock.release_write()
    lock.remove_before_write(note)
    with lock.write():
        pass
    assert seen == [True, True]


def test_an_announcement_that_raises_frees_the_lock():
    lock = StateDictLock()

    def fail() -> None:
        raise ZeroDivisionError

    lock.add_before_write(fail)
    with pytest.raises(ZeroDivisionError):
        lock.acquire_write()
    lock.remove_before_write(fail)
    assert is_free(lock)


def test_a_negative_timeout_is_refused():
    with pytest.raises(ConfigError, match="timeout"):
        StateDictLock(timedelta(seconds=-1))


def test_the_timeout_error_is_a_timeout_error_and_survives_pickling():
    error = pickle.loads(pickle.dumps(LockTimeoutError("no access", party="reader")))  # noqa: S301 - our own bytes
    assert (isinstance(error, TimeoutError), str(error), error.party) == (True, "no access", "reader")


def test_a_read_within_a_write_of_the_same_thread_is_let_through_and_takes_nothing():
    lock = StateDictLock(AT_ONCE)
    with lock.write():
        with lock.read():
            assert lock.held_for_write()
        assert lock.held_for_write()
    assert is_free(lock)


def test_a_write_within_a_read_of_the_same_thread_raises_at_once_and_leaves_the_lock_usable():
    lock = StateDictLock()
    with lock.read(), pytest.raises(CheckpointError, match="is reading and asks to write"):
        lock.acquire_write()
    assert is_free(lock)


@pytest.mark.parametrize(
    "use",
    [
        lambda lock: lock.acquire_write(),
        lambda lock: lock.release_write(),
        lambda lock: lock.read().__enter__(),
        lambda lock: lock.held_for_write(),
    ],
    ids=["write", "release", "read", "ask"],
)
def test_another_task_of_the_thread_is_not_taken_for_the_one_that_writes(use: Callable[[StateDictLock], object]):
    lock = StateDictLock()

    async def write(may_go: asyncio.Event) -> None:
        with lock.write():
            await may_go.wait()

    async def main() -> None:
        may_go = asyncio.Event()
        writer = asyncio.create_task(write(may_go))
        await asyncio.sleep(0)
        with pytest.raises(CheckpointError, match="another asyncio task of this thread holds the write side"):
            use(lock)
        may_go.set()
        await writer
        with lock.write():
            pass

    asyncio.run(main())
    assert is_free(lock)


def test_a_task_that_the_writing_one_has_started_is_part_of_it():
    lock = StateDictLock()

    async def step() -> bool:
        with lock.write():
            return lock.held_for_write()

    async def main() -> bool:
        with lock.write():
            return await asyncio.create_task(step())

    assert asyncio.run(main())
    assert is_free(lock)


def test_code_without_tasks_that_holds_the_lock_may_run_some():
    lock = StateDictLock()

    async def step() -> bool:
        return lock.held_for_write()

    with lock.write():
        assert asyncio.run(step())
    assert is_free(lock)


@pytest.mark.parametrize("side", ["read", "write"])
def test_a_thread_that_ended_with_the_write_side_is_named_at_once(side: str):
    lock = StateDictLock()
    writer = threading.Thread(target=lock.acquire_write, name="trainer-7")
    writer.start()
    writer.join(LONG_S)
    with pytest.raises(LockTimeoutError, match="thread 'trainer-7' ended while it held the write side"):
        with getattr(lock, side)():
            pass
