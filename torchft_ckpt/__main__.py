"""The command line: `python -m torchft_ckpt COMMAND`. Only the commands that read a state or run a job import torch.

run               run a lighthouse and the replica groups of a job on this machine
replay            make steps of a job of StepLoader once more, in one group
lighthouse        run a lighthouse until SIGTERM or Ctrl-C
status            print what a lighthouse knows
drain             have a replica group leave its job
allow-step-loss   let a job whose newest state is lost go on from an older one
inspect           print what a live peer serves
pull              save the state of a live peer to a file
checkpoints       list, verify or export durable checkpoints
goodput           print what a job's time was spent on
certificates      make certificates for TLS
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from torchft_ckpt import __version__
from torchft_ckpt.cli import certificates, checkpoints, goodput, lighthouse, peer, replay, run
from torchft_ckpt.core.text import printable
from torchft_ckpt.errors import ConfigError, TorchftCkptError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for an error of ours, 2 for arguments that cannot be used, 130 for Ctrl-C.

    That of `run` is what its groups make of it.
    """
    options = _parser().parse_args(arguments)
    level = logging.DEBUG if options.verbose else options.log_level
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    try:
        status = int(options.run(options))
        if sys.stdout is not None:  # as it is where it was closed
            sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"torchft_ckpt: {printable(str(error))}", file=sys.stderr)
        return 2
    except TorchftCkptError as error:
        print(f"torchft_ckpt: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output (`head`, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchft_ckpt",
        description="Fault-tolerant live recovery for PyTorch training: what runs beside the training processes.",
    )
    parser.add_argument("--version", action="version", version=f"torchft_ckpt {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more")
    parser.set_defaults(log_level=logging.INFO)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run.add_commands(commands)
    replay.add_commands(commands)
    lighthouse.add_commands(commands)
    peer.add_commands(commands)
    checkpoints.add_commands(commands)
    goodput.add_commands(commands)
    certificates.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
