"""The worker's end of the pipe to the benchmark: events go out as JSON lines, commands come in as JSON lines.

A worker whose parent is gone ends itself. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class Reporter:
    """Writes events to what was standard output; whatever a library prints goes to standard error instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event with the time now; any thread."""
        line = json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n"
        with self._lock:
            self._out.write(line)
            self._out.flush()

    @contextmanager
    def telling_death(self) -> Iterator[None]:
        """Report what is raised, and end the process at once: threads of what has failed may wait for others for long."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.emit("died", error=f"{type(error).__name__}: {error}"[:300])
            os._exit(1)


class Commands:
    """Reads commands from standard input on a thread; the end of the input ends the process."""

    def __init__(self) -> None:
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(json.loads(line))
        os._exit(0)

    def next(self) -> dict[str, Any]:
        """Wait for the next command."""
        return self._queue.get()

    def next_now(self) -> dict[str, Any] | None:
        """Return the next command if there is one already."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None


def serve(worker: object, reporter: Reporter, **hello: Any) -> NoReturn:
    """Say hello, then do what each command says and answer it, until the parent is gone.

    Args:
        worker: its methods are the commands; their keyword arguments and answers are plain values.
        reporter: where answers go.
        hello: the first answer.
    """
    commands = Commands()
    reporter.emit("answer", **hello)
    while True:
        command = commands.next()
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        reporter.emit("answer", **answer)
