"""The processes that tests start: when one fails, its report says how each of them ended, and shows what each said last.

`start` and `run` are `subprocess.Popen` and `subprocess.run` that take note of what they start; `note` does it for others.
`tests/conftest.py` adds what `last_lines` returns to the report of a test that failed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_LINES = 30
MAX_LENGTH = 500


@dataclass(frozen=True)
class _Noted:
    test: str
    name: str
    process: Any
    said: Callable[[], str]

    def is_of(self, test: str) -> bool:
        """Whether it was started by this test, or by a fixture of the test's file."""
        by, _, when = self.test.rpartition(" ")
        return by == test or (when == "(setup)" and by.partition("::")[0] == test.partition("::")[0])

    def report(self) -> str:
        code = self.process.poll() if hasattr(self.process, "poll") else self.process.returncode
        how = "lives" if code is None else f"ended with {code}"
        lines = [line[:MAX_LENGTH] for line in self.said().splitlines()[-NUM_LINES:]]
        return "\n".join([f"--- {self.name} (pid {getattr(self.process, 'pid', '?')}) {how}", *lines])


_noted: list[_Noted] = []


def note(name: str, process: Any, said: Path | Callable[[], str]) -> None:
    """Remember a process (of `subprocess` or the nursery) by a name, and where its output is: a file or a function."""

    def read(path: Path) -> str:
        return path.read_text(errors="replace") if path.exists() else ""

    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    _noted.append(_Noted(test, name, process, (lambda: read(said)) if isinstance(said, Path) else said))


def last_lines(test: str) -> str:
    """Return how each process that a test started ended, and the last lines of its output; an empty string for none."""
    return "\n".join(noted.report() for noted in _noted if noted.is_of(test))


def forget(test: str) -> None:
    """A test is over. What fixtures started may be of use to the next one."""
    _noted[:] = [noted for noted in _noted if noted.test != f"{test} (call)"]


def start(command: list[str], name: str = "", **options: Any) -> subprocess.Popen[Any]:
    """Start a process as `subprocess.Popen` does. Output and errors that nobody asked for are kept for the report."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as somebody may ask what is in it
    process = subprocess.Popen(command, **{"stdout": file, "stderr": file, **options})

    def said() -> str:
        file.seek(0)
        return file.read().decode(errors="replace")

    note(name or " ".join(command)[:100], process, said)
    return process


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a process as `subprocess.run` does, which has to capture text."""
    done = subprocess.run(command, check=False, **options)
    note(" ".join(command)[:100], done, lambda: "\n".join(filter(None, [done.stdout, done.stderr])))
    return done


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False
