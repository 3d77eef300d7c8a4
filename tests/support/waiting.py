"""Waiting for what another thread or process is about to do, where nothing tells that it has; or for a line of the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], bool],
    what: str = "what was waited for",
    timeout_s: float = 120.0,
    *,
    look_every_s: float = 0.002,
) -> None:
    """Return once the condition holds; the test fails, and says `what` did not happen, where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(look_every_s)


class Heard(logging.Handler):
    """Waits for a line of the log."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line, self.there = line, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.line in record.getMessage():
            self.there.set()
