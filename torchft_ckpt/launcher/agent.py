"""The process of one replica group: torchrun with the arguments of this command. Its own lines begin with `[g1]`, say.

torchrun ends its ranks when it gets SIGTERM, or when one of them fails. On Linux it gets SIGTERM when its launcher is killed, and
its ranks are killed with it. Exit status: 0; that of the first rank that failed, as a shell shows it; 128 and the signal's number
where a signal ended the group. Where all ranks ended with 0 after it, having left their job (`Manager.leave_on`), it is 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from typing import Any, TextIO

from torchft_ckpt.core.services.launching import shell_status

LAUNCHER = "TORCHFT_CKPT_LAUNCHER"
"""Variable with the launcher's process id."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def signal_at_parents_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends. Without effect but on Linux."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)


_START_BOUND = """\
import os, sys
sys.path.pop(0)
import ctypes
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Has the kernel end this process with its parent (PR_SET_PDEATHSIG, SIGKILL), and becomes the command that follows. It stands in
the new process: code between fork and exec can hang for ever in a process with threads, as torchrun is one."""


class _Marked:
    """A stream whose lines begin with the group, `[g1]`; those of its ranks do already, `[g1/r0]`.

    What cannot be written is lost: torchrun would end with a status of its own, and not with that of the rank that failed.
    """

    def __init__(self, stream: TextIO, group: str) -> None:
        self._stream = stream
        self._group = group
        self._is_new = True
        """What comes next begins a line."""

    def write(self, text: str) -> int:
        marked = "".join(
            line
            if line.startswith(f"[g{self._group}/") or (number == 0 and not self._is_new)
            else f"[g{self._group}] {line}"
            for number, line in enumerate(io.StringIO(text, newline="\n"))  # a rank's line may have form feeds, say
        )
        self._is_new = text.endswith("\n") if text else self._is_new
        with contextlib.suppress(OSError):  # nobody reads it any more, or its disk is full
            self._stream.write(marked)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    """Run torchrun with `sys.argv`."""
    signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != int(os.environ.pop(LAUNCHER, os.getppid())):
        sys.exit("the launcher is gone already")
    sys.stdout, sys.stderr = (
        _Marked(each or open(os.devnull, "w"), os.environ["REPLICA_GROUP_ID"])  # noqa: SIM115 - it is None if it is closed
        for each in (sys.stdout, sys.stderr)
    )
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    if _prctl is not None:
        bound = (sys.executable, "-S", "-c", _START_BOUND, str(os.getpid()))
        popen = SubprocessHandler._popen
        SubprocessHandler._popen = lambda self, args, env: popen(self, (*bound, *args), env)  # type: ignore[method-assign]

    closed: list[PContext] = []
    close = PContext.close

    def note_and_close(ranks: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        closed.append(ranks)
        close(ranks, death_sig, timeout)

    PContext.close = note_and_close  # type: ignore[assignment] # torchrun does not say how ranks ended after a signal
    try:
        run.main()
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        sys.exit(shell_status(failure.exitcode))
    except SignalException as error:
        statuses = [status for ranks in closed for status in _statuses(ranks)]
        sys.exit(0 if statuses and not any(statuses) else 128 + error.sigval)


def _statuses(ranks: Any) -> list[int | None]:
    """Return how the ranks ended that torchrun started; empty if this version of torch keeps it elsewhere."""
    return [handler.proc.poll() for handler in getattr(ranks, "subprocess_handlers", {}).values()]


if __name__ == "__main__":
    main()
