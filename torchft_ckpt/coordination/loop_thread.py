"""An asyncio loop in a thread of its own. Its owner has to end it, which cancels the tasks that still run there."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from torchft_ckpt.threads import Thread, end_at_exit

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoopThread:
    """A running event loop.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._owner = os.getpid()
        self._finishing = threading.RLock()
        """Held by the thread that finishes; reentrant, as a signal handler may finish too."""
        self._thread = Thread(self._run, name)
        self._thread.start()
        end_at_exit(self.stop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it. Call from any other thread; an interrupted call cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Call a function on the loop, in order of the calls. False: the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        """Call a function on the loop after a while; it must not block. Any thread."""
        self.call_soon(self.loop.call_later, delay_s, function)

    def finish(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one last coroutine function on the loop, then end it; may be called twice, from several threads at once.

        Does nothing in a forked child, where the thread is not.
        """
        if os.getpid() != self._owner:
            return
        with self._finishing:
            if self.loop.is_closed():
                return
            coroutine = last()
            try:
                self.run(coroutine)
            except CancelledError:  # a signal handler finished it in the middle of this
                logger.debug("%s has ended meanwhile", self._thread.name)
            except RuntimeError as error:
                if not self.loop.is_closed():
                    raise
                coroutine.close()  # the loop ended between the check and the call
                logger.debug("%s had ended already: %s", self._thread.name, error)
            self.stop()

    def stop(self) -> None:
        """End the loop and its thread; may be called twice."""
        self.call_soon(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
