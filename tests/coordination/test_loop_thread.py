"""The end of an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from torchft_ckpt.coordination.loop_thread import LoopThread


def test_threads_that_end_a_loop_at_once_wait_for_each_other_and_one_last_thing_is_done() -> None:
    thread = LoopThread("test")
    is_in, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    async def slow() -> None:
        is_in.set()
        await asyncio.get_running_loop().run_in_executor(None, may_end.wait)
        done.append("slow")

    async def late() -> None:
        done.append("late")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(thread.finish, slow)
        assert is_in.wait(120)
        second = pool.submit(thread.finish, late)
        may_end.set()
        assert [first.result(60), second.result(60)] == [None, None]
    assert done == ["slow"]


def test_an_end_within_an_end_as_a_signal_handler_makes_it_is_the_end() -> None:
    thread = LoopThread("test")
    run, is_within = thread.run, []

    def interrupted(coroutine):  # type: ignore[no-untyped-def]
        if is_within:
            return run(coroutine)
        is_within.append(True)
        future = asyncio.run_coroutine_threadsafe(coroutine, thread.loop)
        thread.finish(lambda: asyncio.sleep(0))
        return future.result(60)

    thread.run = interrupted  # type: ignore[method-assign]
    thread.finish(lambda: asyncio.sleep(3600))
    assert thread.loop.is_closed()
