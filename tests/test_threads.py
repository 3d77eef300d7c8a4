"""The threads of the library: work that is spread over a few of them, pools, and what they do at the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import wait
from typing import Any

import pytest

from torchft_ckpt.threads import Thread, Threads, end_at_exit, parallel_map


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
    barrier = threading.Barrier(4, timeout=30)
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
        barrier = threading.Barrier(2, timeout=30)

        def both(number: int) -> None:
            barrier.wait()
            fail(number)

        parallel_map(both, range(2), 2)


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
    assert blocked.result(20) is None


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
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stderr == ""
