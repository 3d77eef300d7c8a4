"""Hands work to a few threads, by turns among the clients that it is done for: a shell of `core/services/fairness.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from torchft_ckpt.core.services.fairness import FairQueue

T = TypeVar("T")


class FairThreads:
    """Runs turns of work; each ends by itself, within a fraction of a second. By the server's event loop only.

    Args:
        executor: has the threads.
    """

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self._executor = executor
        self._queue: FairQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = FairQueue(
            num_threads, max(num_threads // 2, 1)
        )

    def run(self, client: str, work: Callable[..., T], *args: Any, is_long: bool = False) -> asyncio.Future[T]:
        """Have a turn done for a client; its result or error is the future's.

        A turn whose future is cancelled before it began is left out. One that has begun goes on to its end all the same.

        Args:
            work, args: called on a thread.
            is_long: whether it sends nothing and takes all of its turn.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(client, (outcome, partial(work, *args)), is_long=is_long)
        self._begin()
        return outcome

    def _begin(self) -> None:
        while (begun := self._queue.begin()) is not None:
            client, (outcome, work), is_long = begun
            if outcome.done():
                self._queue.end(client, is_long=is_long)
                continue
            try:
                done = self._executor.submit(work)
            except RuntimeError as error:  # the server has been stopped
                self._queue.end(client, is_long=is_long)
                outcome.set_exception(error)
                continue
            done.add_done_callback(partial(self._wake, outcome.get_loop(), outcome, client, is_long))

    def _wake(
        self,
        loop: asyncio.AbstractEventLoop,
        outcome: asyncio.Future[Any],
        client: str,
        is_long: bool,
        done: Future[Any],
    ) -> None:
        """By the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._ended, outcome, client, is_long, done)

    def _ended(self, outcome: asyncio.Future[Any], client: str, is_long: bool, done: Future[Any]) -> None:
        self._queue.end(client, is_long=is_long)
        if done.cancelled():
            outcome.cancel()
        elif not outcome.done():
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
            else:
                outcome.set_exception(error)
        self._begin()
