"""Several things at once, each on a thread, as several processes would do them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def at_once(*acts: Callable[[], T], limit_s: float = 120.0) -> list[T]:
    """Return what they return, in their order. If one fails, the others are waited for no longer than the limit.

    A rank whose partner has failed waits for that one for ever, which is its contract: nothing here joins its thread.
    """
    futures = [Future[T]() for _ in acts]

    def run(future: Future[T], act: Callable[[], T]) -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in zip(futures, acts, strict=True)]
    for thread in threads:
        thread.start()
    done, waiting = wait(futures, limit_s)
    if waiting:
        for future in done:
            future.result()  # why the others still wait
        raise TimeoutError(f"{len(waiting)} of {len(acts)} are not done after {limit_s} s")
    for thread in threads:
        thread.join()
    return [future.result() for future in futures]
