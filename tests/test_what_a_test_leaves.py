"""A test that leaves something to the next one fails, and says what; what is on its way to its end is waited for."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import leftovers


def left_by(act: Callable[[], object]) -> str:
    """Return what is said of a test that does so; an empty string if nothing is."""
    test = leftovers.none_left("a test")
    next(test)
    act()
    try:
        assert next(test, None) is None
    except pytest.fail.Exception as error:
        return str(error)
    return ""


class EndsWhenItIsWaitedFor(threading.Thread):
    def __init__(self, at_its_end: Callable[[], object] = bool) -> None:
        super().__init__()
        self._may_end, self._at_its_end = threading.Event(), at_its_end

    def run(self) -> None:
        self._may_end.wait(60)
        self._at_its_end()

    def join(self, timeout: float | None = None) -> None:
        self._may_end.set()
        super().join(timeout)


def test_a_thread_that_goes_on_is_named_with_its_place_and_one_that_ends_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def stays() -> None:
        begun.set()
        may_end.wait(60)

    thread = threading.Thread(target=stays, name="pg-stays")
    with monkeypatch.context() as patched:
        patched.setattr(leftovers, "PATIENCE_S", 0.0)
        said = left_by(lambda: (thread.start(), begun.wait(60)))
    assert "a test has left to the next one:\nthread pg-stays\n" in said and "in stays" in said

    may_end.set()
    another = EndsWhenItIsWaitedFor()
    assert left_by(EndsWhenItIsWaitedFor(another.start).start) == ""
    assert not another.is_alive()
    thread.join(60)


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the system tells no children")
def test_a_process_that_goes_on_and_a_changed_setting_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    with monkeypatch.context() as patched:
        patched.setattr(leftovers, "PATIENCE_S", 0.0)
        said = left_by(start)
    assert f"\nprocess {processes[0].pid}" in said
    assert left_by(lambda: start().kill()) == "", "nobody has asked how it ended"
    processes[0].kill()
    for process in processes:
        process.wait()
    place = os.getcwd()
    said = left_by(lambda: (monkeypatch.setenv("SO_CALLED", "1"), monkeypatch.chdir(tmp_path)))
    assert "variable SO_CALLED: '1'" in said and f"working directory: {place!r}" in said
