"""Waiting for what another thread is about to do, where nothing tells that it has."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return once it holds; a test fails where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.005)
