"""The launcher's standard streams: lines of several groups, each written whole by the thread that has read it."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class OutputStream:
    """A standard stream of this process. A line waits while nobody reads, as that of any program in a pipe does. Any thread.

    Args:
        name: for the log.
        descriptor: of the stream.
        at_readers_end: called once, on a thread that writes, when nobody can read the stream any more.
    """

    def __init__(self, name: str, descriptor: int, at_readers_end: Callable[[], object]) -> None:
        self._name = name
        self._descriptor = descriptor
        self._at_readers_end = at_readers_end
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        """Write a line with its end. After an error, which is said once, it and all that follow go nowhere."""
        with self._lock:
            rest = memoryview(line)
            try:
                while rest:
                    try:
                        rest = rest[os.write(self._descriptor, rest) :]
                    except BlockingIOError:  # whoever gave us the stream has made it so
                        select.select([], [self._descriptor], [])
            except OSError as error:
                self._lead_nowhere()
                if isinstance(error, BrokenPipeError):
                    self._at_readers_end()
                else:
                    _log.error("%s cannot be written any more: %s; the job goes on", self._name, error)

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)
