"""The options of all commands for the token: given there, or in a file."""

from __future__ import annotations

import argparse

from torchft_ckpt import config
from torchft_ckpt.errors import ConfigError


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add `--token` and `--token-file`; either is in `options.token`, which is None where none of them was given."""
    options = parser.add_mutually_exclusive_group()
    options.add_argument(
        "--token",
        help="shared secret of the job; every user of this machine sees it in `ps`, so rather set TORCHFT_CKPT_TOKEN, or"
        " TORCHFT_CKPT_TOKEN_FILE to a file that holds it",
    )
    options.add_argument(
        "--token-file", dest="token", type=_read, metavar="FILE", help="file that holds the shared secret"
    )


def _read(path: str) -> str:
    try:
        return config.read_secret(path, "--token-file")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
