"""Starts, hears and ends the benchmark's own processes. It ends only processes that it started, and all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
Event = dict[str, Any]


class ChildEndedError(RuntimeError):
    """A process of the benchmark ended while it was waited for."""


class Child:
    """One process, running `python -m MODULE OPTIONS`, and the events that it has reported so far."""

    def __init__(self, module: str, options: dict[str, Any], name: str, log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.pid = self._process.pid
        self._events: list[Event] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name=f"events of {name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def events(self, kind: str | None = None) -> list[Event]:
        """Return what was reported so far, all of it or one kind."""
        with self._changed:
            return [event for event in self._events if kind is None or event["event"] == kind]

    def ended(self) -> bool:
        """Whether it has closed its output: it is dead or dying."""
        with self._changed:
            return self._ended

    def require_alive(self, what: str) -> None:
        """Raise `ChildEndedError` if it has ended."""
        if self.ended():
            raise ChildEndedError(f"{self.name} ended while {what}:\n{self.log_tail()}")

    def tell(self, **command: Any) -> None:
        """Send a command; a child that is gone does not hear it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return

    def wait_for(self, kind: str, timeout_s: float, count: int = 1) -> Event:
        """Wait for the `count`-th event of a kind.

        Raises:
            ChildEndedError: the process ended first; the message has the end of its log.
            TimeoutError: it did not come in time.
        """

        def find() -> Event | None:
            found = [event for event in self._events if event["event"] == kind]
            return found[count - 1] if len(found) >= count else None

        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                event = find()
                if event is not None:
                    return event
                if self._ended:
                    raise ChildEndedError(f"{self.name} ended while its '{kind}' was waited for:\n{self.log_tail()}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{self.name} reported no '{kind}' in {timeout_s:.0f} s:\n{self.log_tail()}")
                self._changed.wait(left)

    def log_tail(self, lines: int = 12) -> str:
        """Return the end of what it wrote to standard error."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in text[-lines:])

    def kill(self, how: signal.Signals = signal.SIGKILL) -> float:
        """Send SIGKILL, or another signal; return when, on the common clock."""
        at = time.monotonic()
        self._process.send_signal(how)
        return at

    def end(self) -> None:
        """Kill it if it lives, and reap it. May be called twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._thread.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def cpu_s(self) -> float:
        """Return the processor seconds that it has used so far (Linux), 0 where that cannot be read."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        ticks_a_second = 100
        return (int(fields[11]) + int(fields[12])) / ticks_a_second


class Children:
    """All processes of one scenario; leaving the `with` block ends them."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._children:
            child.end()

    def start(self, module: str, options: dict[str, Any], name: str) -> Child:
        """Start one process; its standard error goes to a file of its name."""
        child = Child(module, options, name, self._log_dir / f"{len(self._children):02d}-{name}.log")
        self._children.append(child)
        return child


def wait_until(condition: Callable[[], T | None], timeout_s: float, what: str, tick_s: float = 0.02) -> T:
    """Look again and again until there is something to return; raises TimeoutError naming what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value is not None:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(tick_s)
