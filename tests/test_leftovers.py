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

    def starts_another() -> None:
        begun.wait(60)
        threading.Thread(target=may_end.wait, args=(60,)).start()
        may_end.set()

    assert left_by(threading.Thread(target=starts_another).start) == ""
    thread.join(60)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs Linux's /proc")
def test_a_process_that_goes_on_and_a_changed_setting_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    with monkeypatch.context() as patched:
        patched.setattr(leftovers, "PATIENCE_S", 0.0)
        said = left_by(lambda: processes.append(subprocess.Popen(["sleep", "60"])))
    assert f"\nprocess {processes[0].pid}" in said
    assert left_by(processes[0].kill) == ""
    processes[0].wait()
    place = os.getcwd()
    said = left_by(lambda: (monkeypatch.setenv("SO_CALLED", "1"), monkeypatch.chdir(tmp_path)))
    assert "variable SO_CALLED: '1'" in said and f"working directory: {place!r}" in said
