"""The process of one replica group: torchrun with the arguments of this command. On Linux it ends when its launcher is killed.

torchrun ends its ranks when it gets SIGTERM, or when one of them fails. Exit status: 0; that of the first rank that failed, as a
shell shows it; 128 and the signal's number where a signal ended the group.
"""

from __future__ import annotations

import os
import signal
import sys

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
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main()
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        sys.exit(shell_status(failure.exitcode))
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
