"""The command `goodput`: what a job's time was spent on, of the files in which its ranks have written their events."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from torchft_ckpt.core.text import printable
from torchft_ckpt.core.training.goodput import GOOGLES, JobGoodput, Line, account_for
from torchft_ckpt.core.training.ledger import Account
from torchft_ckpt.errors import ConfigError

_decoder = msgspec.json.Decoder(Line)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `goodput`; it sets `run`, which returns the exit status."""
    goodput = commands.add_parser(
        "goodput",
        help="print what a job's time was spent on",
        description="Prints which part of a job's time was productive, and on what the rest was spent: seconds by account, with"
        " the category of Google's ml-goodput beside each. The job may be running. Its ranks write FILES where"
        " TORCHFT_CKPT_EVENTS says.",
    )
    goodput.add_argument(
        "files", nargs="+", type=Path, metavar="FILES", help="files of events, of all groups; or directories of them"
    )
    goodput.add_argument("--json", action="store_true", help="print JSON: seconds by account, of each group")
    goodput.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    jobs = read_accounts(options.files)
    print(json.dumps([_as_json(job) for job in jobs], indent=2) if options.json else "\n\n".join(map(as_text, jobs)))
    return 0


def read_accounts(places: Iterable[Path]) -> list[JobGoodput]:
    """Return the accounts of the jobs whose events are in these files and directories.

    Raises:
        ConfigError: one cannot be read; there is no event in them.
    """
    jobs = account_for(line for place in places for path in _files_in(place) for line in _lines_of(path))
    if not jobs:
        raise ConfigError("there is no event in these files", "goodput")
    return jobs


def _files_in(place: Path) -> list[Path]:
    return sorted(place.rglob("*.jsonl")) if place.is_dir() else [place]


def _lines_of(path: Path) -> Iterator[Line]:
    num_left_out = 0
    try:
        with path.open("rb") as file:
            for text in file:
                try:
                    yield _decoder.decode(text)
                except msgspec.DecodeError:  # a rank was killed as it wrote, or its disk was full
                    num_left_out += text.strip() != b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "goodput") from error
    if num_left_out:
        print(f"{printable(str(path))}: {num_left_out} lines are no events, and are left out", file=sys.stderr)


def as_text(job: JobGoodput) -> str:
    """Return a page about a job."""
    rows = [("account", "seconds", "share", "in ml-goodput")]
    rows += [
        (account.value, f"{seconds:.1f}", f"{_percent(seconds, job.wall_s)} %", GOOGLES[account])
        for account, seconds in job.total.items()
        if seconds
    ]
    lines = [
        f"job {job.job or 'default'}: goodput {100 * job.goodput:.1f} % of {job.wall_s:.1f} s, which"
        f" {len(job.groups)} replica groups had",
        *(f"  {name:<15}  {seconds:>10}  {share:>7}  {google}" for name, seconds, share, google in rows),
    ]
    for name, accounts in job.groups.items():
        wall_s = sum(accounts.values())
        lines.append(f"  {name}: {_percent(accounts[Account.PRODUCTIVE], wall_s)} % of {wall_s:.1f} s")
    return "\n".join(map(printable, lines))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0.0"


def _as_json(job: JobGoodput) -> dict[str, object]:
    google = dict.fromkeys(GOOGLES.values(), 0.0)
    for account, seconds in job.total.items():
        google[GOOGLES[account]] += seconds
    named = {group: {account.value: s for account, s in accounts.items()} for group, accounts in job.groups.items()}
    return {"job": job.job, "goodput": job.goodput, "wall_s": job.wall_s, "ml_goodput": google, "groups": named}
