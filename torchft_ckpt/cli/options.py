"""Options that several commands take: the token, given there or in a file; the files of TLS; numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchft_ckpt import config
from torchft_ckpt.errors import ConfigError
from torchft_ckpt.tls import Tls, resolve_tls

_T = TypeVar("_T")


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add `--token` and `--token-file`; either is in `options.token`, which is None if none of them was given."""
    options = parser.add_mutually_exclusive_group()
    options.add_argument(
        "--token",
        help="shared secret of the job; every user of this machine sees it in `ps`, so rather set TORCHFT_CKPT_TOKEN, or"
        " TORCHFT_CKPT_TOKEN_FILE to a file that holds it",
    )
    options.add_argument(
        "--token-file",
        dest="token",
        type=_parsed(lambda path: config.read_secret(path, "--token-file")),
        metavar="FILE",
        help="file that holds the shared secret",
    )


def add_tls(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add `--tls-cert`, `--tls-key` and `--tls-ca`, the last under further names, too; see `tls_of`."""
    options = parser.add_argument_group("TLS")
    options.add_argument("--tls-cert", metavar="FILE", help="certificate to show, PEM (default: TORCHFT_CKPT_TLS_CERT)")
    options.add_argument("--tls-key", metavar="FILE", help="its private key, PEM (default: TORCHFT_CKPT_TLS_KEY)")
    text = "certificates of the authorities that the other side's is of, PEM (default: TORCHFT_CKPT_TLS_CA)"
    options.add_argument("--tls-ca", *more, metavar="FILE", help=text)


def tls_of(options: argparse.Namespace) -> Tls | None:
    """Return what the options and the environment say; None: plain HTTP is spoken.

    Raises:
        ConfigError: a file cannot be used.
    """
    return resolve_tls(options.tls_cert, options.tls_key, options.tls_ca)


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add what a command takes that writes one file."""
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")


def _parsed(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return what parses an argument as `parse` does, and says what it says of one that cannot be used."""

    def parse_argument(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            what = "" if isinstance(error, ConfigError) else f"{text}: "  # that names it
            raise argparse.ArgumentTypeError(f"{what}{error}") from error

    return parse_argument


count = _parsed(config.parse_count)
"""Returns an argument that is a whole number, 0 or more."""
seconds = _parsed(config.parse_seconds)
"""Returns an argument that is a number of seconds, more than 0."""
