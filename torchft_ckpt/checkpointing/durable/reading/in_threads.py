"""Does independent pieces of work on a few threads, and on the caller's where no others can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], num_threads: int) -> list[_R]:
    """Return what `work` returns for each item, in their order; raises what the first of them raised, then not all are begun.

    While the interpreter ends, executors give no threads: the last save is closed and filled all the same.

    Args:
        work: may be called twice for an item.
        items: what to do.
        num_threads: at once, at most.
    """
    if len(items) < 2 or num_threads < 2:
        return [work(item) for item in items]
    futures: list[Future[_R]] = []
    with ThreadPoolExecutor(min(num_threads, len(items)), "durable-read") as pool:
        try:
            for item in items:
                futures.append(pool.submit(work, item))
        except RuntimeError:
            pass  # the rest is done below
        try:
            done = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done + [work(item) for item in items[len(futures) :]]
