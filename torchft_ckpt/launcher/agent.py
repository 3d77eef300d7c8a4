"""The process of one replica group: torchrun with the arguments of this command. On Linux it ends when its launcher is killed.

torchrun ends its ranks when it gets SIGTERM, or when one of them fails. Exit status: 0; that of the first rank that failed, as a
shell shows it; 128 and the signal's number where a signal ended the group. Where all ranks ended with 0 after it, having left
their job (`Manager.leave_on`), it is 0.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from torchft_ckpt.core.services.launching import shell_status
from torchft_ckpt.launcher.orphans import signal_at_parents_death

LAUNCHER = "TORCHFT_CKPT_LAUNCHER"
"""Variable with the launcher's process id."""


def main() -> None:
    """Run torchrun with `sys.argv`."""
    signal_at_parents_death(signal.SIGTERM)
    if os.getppid() != int(os.environ.pop(LAUNCHER, os.getppid())):
        sys.exit("the launcher is gone already")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

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
