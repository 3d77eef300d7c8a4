"""A process that has imported torch, and forks itself for each rank that a test starts: importing takes a rank some seconds.

What is forked is a process of its own: it runs a script from the beginning, with its own arguments, environment and output,
and can be killed. It ends as any process does: threads are waited for, and what was registered with `atexit` is done. But its
interpreter does not take apart what it has imported, as that takes a third of a second of CPU. The nursery only reaps it and says
how it ended. It has no threads and no sockets but the one to the test, which its children close.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAME = "nursery"
"""Of the thread that hears from it."""


class Forked:
    """A process that the nursery forked; as much of `subprocess.Popen` as tests use. `stdout` is a text stream.

    Its parent is the nursery. It begins in this process's directory. `ends_whole`: its interpreter is taken apart at its end.
    """

    def __init__(
        self,
        script: Path,
        arguments: list[str],
        environment: dict[str, str],
        stderr: int,
        *,
        ends_whole: bool = False,
    ) -> None:
        readable, writable = os.pipe()
        try:
            self.pid, self._ended = _nursery().fork(
                script, arguments, environment, writable, stderr, ends_whole=ends_whole
            )
        finally:
            os.close(writable)
        self.stdout = os.fdopen(readable, "r")
        self.returncode: int | None = None
        self.args = [str(script), *arguments]

    def poll(self) -> int | None:
        """Return how it ended, None while it lives."""
        if self.returncode is None and not self._ended.empty():
            self.returncode = self._ended.get()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, once it has."""
        if self.returncode is None:
            try:
                self.returncode = self._ended.get(timeout=timeout)
            except queue.Empty:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkedIntoFile(Forked):
    """One whose output and errors go to one open file."""

    def __init__(self, script: Path, arguments: list[str], environment: dict[str, str], output: int) -> None:
        self.pid, self._ended = _nursery().fork(script, arguments, environment, output, output)
        self.returncode = None
        self.args = [str(script), *arguments]


def popen(command: list[str], **options: Any) -> Any:
    """Stand in for `subprocess.Popen` in a launcher that runs within a test: fork whatever is a Python script of its own.

    It has to write all of its output to one file. Its parent is another process than this.
    """
    if command[0] != sys.executable or not command[1].endswith(".py"):
        return subprocess.Popen(command, **options)
    from support.processes import note  # not above: the nursery's own process has no such package

    log = options["stdout"]
    assert options["stderr"] is log
    process = ForkedIntoFile(Path(command[1]), command[2:], options["env"], log.fileno())
    note(Path(log.name).name, process, Path(log.name))
    return process


FORKING = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
"""Stands in for the module `subprocess` in such a launcher."""


class Nursery:
    """Starts the nursery, and hears from it on a thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended: dict[int, queue.SimpleQueue[int]] = {}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        threading.Thread(target=self._hear, name=NAME, daemon=True).start()
        atexit.register(self._end)

    def fork(
        self,
        script: Path,
        arguments: list[str],
        environment: dict[str, str],
        stdout: int,
        stderr: int,
        *,
        ends_whole: bool = False,
    ) -> tuple[int, queue.SimpleQueue[int]]:
        """Return the pid of a new process, and where its exit status will be."""
        request = {
            "script": str(script),
            "arguments": arguments,
            "environment": environment,
            "directory": os.getcwd(),
            "ends_whole": ends_whole,
        }
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stdout, stderr])
            # The first one waits until torch is imported. To give up would leave the next one with this one's pid.
            pid = self._pids.get(timeout=300)
            return pid, self._ended.setdefault(pid, queue.SimpleQueue())

    def _hear(self) -> None:
        while message := self._socket.recv(1024):
            said: dict[str, Any] = json.loads(message)
            if "forked" in said:
                self._ended[said["forked"]] = queue.SimpleQueue()
                self._pids.put(said["forked"])
            else:
                self._ended[said["ended"]].put(said["status"])

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread that hears
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid


_known: list[Nursery] = []


def _nursery() -> Nursery:
    if not _known:
        _known.append(Nursery())
    return _known[0]


def pids() -> list[int]:
    """Return that of this process's nursery; nothing if it has none yet."""
    return [known.pid for known in _known]


# The nursery itself


def _import_what_ranks_import() -> None:
    import torchft_ckpt

    for name in torchft_ckpt.__all__:
        getattr(torchft_ckpt, name)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns the request in the child, and None where there will be no more."""
    readable, wakeup = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    import select

    while True:
        ready, _, _ = select.select([connection, readable], [], [])
        if readable in ready:
            os.read(readable, 4096)
            while (reaped := _reap()) is not None:
                connection.send(json.dumps({"ended": reaped[0], "status": reaped[1]}).encode())
        if connection not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not message:
            return None
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            os.close(readable)
            os.close(wakeup)
            for number, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return dict(json.loads(message))
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps({"forked": pid}).encode())


def _reap() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


_statuses: list[int] = []
"""Of a child whose script has ended."""


def _end_at_once() -> None:
    """End a child, after all else that was registered with `atexit`."""
    if _statuses:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_statuses[0])


def _run(script: str) -> None:
    """Run a child's script, and note its status."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        _statuses.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except Exception:
        _statuses.append(1)
        raise
    _statuses.append(0)


def main() -> None:
    atexit.register(_end_at_once)  # the first one is called last
    gc.disable()  # there is no garbage yet: to look for it takes a fifth of the time
    _import_what_ranks_import()
    # At its end an interpreter looks for cycles in all that it holds. What was imported here is nobody's garbage, and to look at
    # it copies its memory: a second for each child.
    gc.collect()
    gc.freeze()
    gc.enable()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[1:1] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    if request["ends_whole"]:
        atexit.unregister(_end_at_once)
    _run(request["script"])


if __name__ == "__main__":
    main()
