"""Does independent pieces of work on a few threads, this one among them.

Not with an executor: executors end before the handlers of `atexit` run, in which the last save is closed, and their threads are
waited for when the interpreter ends, also those that wait for a storage that does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], num_threads: int) -> list[_R]:
    """Return what `work` returns for each item, in their order.

    Where it raises, no more is begun, and the error of the first such item is raised once all that was begun has ended. Where no
    more threads can be had, those that there are do all of it.

    Args:
        work: for any thread.
        items: what to do.
        num_threads: at once, at most.
    """
    done: dict[int, _R] = {}
    errors: dict[int, BaseException] = {}
    places = iter(range(len(items)))  # each is taken once, whoever asks

    def take() -> None:
        for place in places:
            try:
                done[place] = work(items[place])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[place] = error
            if errors:
                return

    threads: list[threading.Thread] = []
    try:
        for _ in range(min(num_threads, len(items)) - 1):
            thread = threading.Thread(target=take, name="durable-read", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass  # there are no more
    take()
    for thread in threads:
        thread.join()
    if errors:
        interrupt = (error for error in errors.values() if not isinstance(error, Exception))
        raise next(interrupt, errors[min(errors)])
    return [done[place] for place in range(len(items))]
