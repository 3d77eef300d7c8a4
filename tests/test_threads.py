"""The threads of the library: work that is spread over a few of them, pools, and what they do at the end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import subprocess
import sys
import threading
from concurrent.futures import wait
from queue import SimpleQueue
from typing import Any

import pytest
from support.interrupts import Interrupted, interrupted_at

from torchft_ckpt import threads as our_threads
from torchft_ckpt.threads import Condition, Event, Thread, Threads, end_at_exit, is_done, parallel_map


@pytest.mark.parametrize("num_threads", [1, 3, 50])
@pytest.mark.parametrize("num_items", [0, 1, 2, 20])
def test_all_is_done_once_and_in_order(num_threads: int, num_items: int) -> None:
    called: list[int] = []

    def square(number: int) -> int:
        called.append(number)
        return number * number

    assert parallel_map(square, range(num_items), num_threads) == [number * number for number in range(num_items)]
    assert sorted(called) == list(range(num_items))


def test_it_is_done_at_once() -> None:
    barrier = threading.Barrier(4, timeout=60)
    places = parallel_map(lambda _: barrier.wait(), range(4), 4)
    assert sorted(places) == [0, 1, 2, 3], "each has waited for all the others"


def test_where_no_thread_can_be_had_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert parallel_map(str, range(5), 4) == ["0", "1", "2", "3", "4"]


def test_the_first_error_is_raised_and_no_more_is_begun() -> None:
    called: list[int] = []

    def fail(number: int) -> None:
        called.append(number)
        raise ValueError(str(number))

    with pytest.raises(ValueError, match="0"):
        parallel_map(fail, range(1000), 1)
    assert called == [0]


def test_an_interrupt_is_not_taken_for_an_error_of_the_work() -> None:
    def fail(number: int) -> None:
        raise KeyboardInterrupt if number else ValueError

    with pytest.raises(KeyboardInterrupt):
        barrier = threading.Barrier(2, timeout=60)

        def both(number: int) -> None:
            barrier.wait()
            fail(number)

        parallel_map(both, range(2), 2)


@pytest.mark.parametrize("at", ["as it starts a thread", "as it waits for them"])
def test_who_is_interrupted_outside_of_the_work_leaves_none_that_runs(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What read a checkpoint wrote on into tensors that the script used again."""
    main, may_end = threading.current_thread(), threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if threading.current_thread() is not main:
            assert may_end.wait(120)
        ended.append(number)

    start, join, num_joined = Thread.start, our_threads._join, 0

    def started(thread: Thread) -> None:
        start(thread)
        if at == "as it starts a thread":
            raise KeyboardInterrupt

    def joined(running: list[threading.Thread], timeout_s: float | None) -> None:
        nonlocal num_joined
        num_joined += 1
        if at == "as it waits for them" and num_joined == 1:
            raise KeyboardInterrupt
        may_end.set()
        join(running, timeout_s)

    monkeypatch.setattr(Thread, "start", started)
    monkeypatch.setattr(our_threads, "_join", joined)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(100), 2)
    is_over, num_begun = sorted(begun) == sorted(ended), len(begun)
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "torchft_ckpt":
            thread.join(30)
    assert (is_over, num_begun) == (True, len(begun))


@pytest.mark.slow
def test_what_the_garbage_collector_drops_meanwhile_may_start_a_thread_to_end_itself() -> None:
    """A process group that is dropped does so, wherever the collector happens to run."""
    started = []

    class Dropped:
        def end(self) -> None: ...

        def __del__(self) -> None:
            thread = Thread(lambda: None, "ends")
            thread.start()
            started.append(thread)

    def drop_many() -> None:
        for _ in range(2000):
            dropped: Any = Dropped()
            dropped.itself = dropped
            end_at_exit(dropped.end)

    worker = threading.Thread(target=drop_many, daemon=True)
    worker.start()
    worker.join(30)
    assert not worker.is_alive()
    assert started


def test_a_pool_that_is_shut_down_does_what_was_submitted_and_takes_no_more() -> None:
    pool = Threads("pool", 2)
    futures = [pool.submit(pow, 2, exponent) for exponent in range(5)]
    pool.shutdown()
    assert [future.result() for future in futures] == [1, 2, 4, 8, 16]
    with pytest.raises(RuntimeError, match="pool was shut down"):
        pool.submit(int)


def test_what_a_pool_has_not_begun_is_cancelled_and_who_waits_for_it_is_told() -> None:
    pool = Threads("pool")
    begun, end = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        end.wait(20)

    blocked, waits = pool.submit(block), pool.submit(int)
    begun.wait(20)
    pool.shutdown(wait=False, cancel_futures=True)
    assert wait([waits], 20).done == {waits}
    assert waits.cancelled()
    end.set()
    assert blocked.result(60) is None


@pytest.mark.processes
def test_a_thread_that_hangs_and_was_let_go_holds_up_no_exit() -> None:
    """With the thread on its list, the process waits 10 s for it, and says then that it has not ended."""
    program = """
import logging, os
from torchft_ckpt.threads import Thread
logging.basicConfig()
thread = Thread(os.read, "hangs", (os.pipe()[0], 1))
thread.start()
thread.let_go()
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True, timeout=200)
    assert done.stderr == ""


def waits_for_a_future(work: Threads, gate: Event) -> None:
    is_done(work.submit(gate.wait, 20), 0.0)


def waits_for_an_event(work: Threads, gate: Event) -> None:
    work.submit(gate.wait, 20)
    gate.wait(0.0)
    gate.set()


takes_interrupts = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="where Python 3.10 takes interrupts is not known"
)


@takes_interrupts
@pytest.mark.parametrize("use", [waits_for_a_future, waits_for_an_event])
def test_who_is_interrupted_as_it_waits_leaves_the_threads_at_work(use: Any) -> None:
    """At each point at which CPython takes an interrupt, of this library's code and of Python's own."""
    files = {our_threads.__file__, threading.__file__, concurrent.futures._base.__file__}
    point, is_interrupted = 0, True
    while is_interrupted:
        work, gate = Threads("worker"), Event()
        work.submit(int).result(60)  # its thread runs: to start one is Python's own
        is_interrupted = interrupted_at(point, functools.partial(use, work, gate), files=files, only_taken=True)
        gate.set()
        assert work.submit(int).result(60) == 0
        work.shutdown()
        point += 1
    assert point > 10


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_pool_has_no_thread_too_many_after_its_start_was_interrupted_and_all_end(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when the thread runs already, before who has started it knows."""

    def start(thread: Thread) -> None:
        monkeypatch.undo()
        thread.start()
        raise Interrupted

    work = Threads("interrupted", num_threads)
    monkeypatch.setattr(Thread, "start", start)
    with pytest.raises(Interrupted):
        work.submit(int)
    assert work.submit(int).result(60) == 0
    working = {*work._threads.values()}
    assert len(working) <= num_threads
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("interrupted_")]
    for thread in {*threads} - working:
        thread.join(60)
        assert not thread.is_alive(), "it takes jobs of a pool that has its threads without it"
    work.shutdown(timeout_s=20)
    assert not any(thread.is_alive() for thread in threads)


@takes_interrupts
def test_a_pool_works_and_ends_at_whatever_point_its_start_was_interrupted() -> None:
    """Of this library's code, and of Python's own."""
    point, is_interrupted = 0, True
    while is_interrupted:
        work, done = Threads("started"), SimpleQueue[int]()

        def start(work: Threads = work) -> None:
            with contextlib.suppress(RuntimeError):  # Python's own lock, of which it takes the interrupt's place
                work.submit(int)

        files = {our_threads.__file__, threading.__file__}
        is_interrupted = interrupted_at(point, start, files=files, only_taken=True)
        for number in range(5):
            work.submit(done.put, number)
        work.shutdown(timeout_s=20)
        assert [done.get(timeout=60) for _ in range(5)] == [*range(5)] and done.empty()
        point += 1
    assert point > 20


def test_a_signal_handler_waits_for_the_future_that_its_thread_is_about_to_wait_for() -> None:
    """The thread has the future's lock already, and the handler has it once more: who fulfils it gets in nevertheless."""
    work, gate = Threads("worker"), Event()
    future = work.submit(gate.wait, 20)
    with future._condition:
        gate.set()
        assert is_done(future, 60)
        assert future.result(60)
        assert future._condition._is_owned()  # type: ignore[attr-defined]
    assert not future._condition._is_owned()  # type: ignore[attr-defined]
    work.shutdown()


@takes_interrupts
def test_who_is_interrupted_as_it_waits_has_the_lock_until_its_block_ends() -> None:
    point, is_interrupted = 0, True
    while is_interrupted:
        condition = Condition()

        def wait_shortly(condition: Condition = condition) -> None:
            with condition:
                try:
                    condition.wait(0.0)
                finally:
                    assert condition._is_owned()

        is_interrupted = interrupted_at(point, wait_shortly, files={our_threads.__file__}, only_taken=True)
        assert not condition._is_owned()
        point += 1
    assert point > 3


def test_what_a_thread_has_not_begun_at_the_end_is_cancelled_or_done() -> None:
    for cancels in (False, True):
        work, may_end = Threads("worker"), threading.Event()
        first, second = work.submit(may_end.wait, 20), work.submit(int)
        while not first.running():
            pass
        work.shutdown(wait=False, cancel_futures=cancels)
        may_end.set()
        assert (first.result(60), is_done(second, 60), second.cancelled()) == (True, True, cancels)
        with pytest.raises(RuntimeError, match="takes no work"):
            work.submit(int)
