"""Options that several commands take: the token, given there or in a file; numbers."""

from __future__ import annotations

import argparse
import math
from datetime import timedelta

from torchft_ckpt import config
from torchft_ckpt.errors import ConfigError


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add `--token` and `--token-file`; either is in `options.token`, which is None if none of them was given."""
    options = parser.add_mutually_exclusive_group()
    options.add_argument(
        "--token",
        help="shared secret of the job; every user of this machine sees it in `ps`, so rather set TORCHFT_CKPT_TOKEN, or"
        " TORCHFT_CKPT_TOKEN_FILE to a file that holds it",
    )
    options.add_argument(
        "--token-file", dest="token", type=_secret_in, metavar="FILE", help="file that holds the shared secret"
    )


def _secret_in(path: str) -> str:
    try:
        return config.read_secret(path, "--token-file")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """Return an argument that is a whole number, 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def seconds(text: str) -> timedelta:
    """Return an argument that is a number of seconds, more than 0."""
    number = float(text)
    if not (math.isfinite(number) and 0 < number < 1e9):
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")
    return timedelta(seconds=number)
