"""Runs the figures of the outer loop, prints the table, writes the raw numbers. It decides nothing about how one is measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from diloco.job import JobFailedError
from diloco.links import LinksUnavailableError

from bench import diloco_bytes, diloco_inner, diloco_loss, diloco_sync
from bench.diloco_run import Run
from bench.processes import ChildEndedError
from bench.stats import Verdict
from bench.table import Row, Section, render, to_json

FIGURES: dict[str, Callable[[Run], Section]] = {
    diloco_bytes.NAME: diloco_bytes.measure,
    diloco_inner.NAME: diloco_inner.measure,
    diloco_sync.NAME: diloco_sync.measure,
    diloco_loss.NAME: diloco_loss.measure,
}


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(f"stopped by signal {number}")


def parse_names(text: str) -> list[str]:
    """Read `NAME[,NAME...]`.

    Raises:
        argparse.ArgumentTypeError: a name is none of the figures.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in FIGURES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no figure; there are {', '.join(FIGURES)}"
        )
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected a number from 1 on")
    return number


def _could_not(name: str, error: Exception) -> Section:
    print(f"{name} could not be measured: {error}", file=sys.stderr, flush=True)
    row = Row(figure="  could not be measured", ours="", verdict=Verdict.NOT_RUN)
    return Section(name=name, title=name, rows=[row], notes=[str(error).splitlines()[0]])


def main() -> None:
    """Parse the command line, run, print. Exit status 1 where something could not be measured; a missed bar is no error."""
    parser = argparse.ArgumentParser(
        prog="bench_diloco",
        description="Measure the outer loop (DiLoCo) beside data-parallel training. The figures bytes and sync need root, for "
        "network namespaces.",
    )
    parser.add_argument("--quick", action="store_true", help="a short form with fewer repetitions")
    parser.add_argument("--only", type=parse_names, metavar="NAME[,NAME]", help=f"only these of {', '.join(FIGURES)}")
    parser.add_argument("--repeat", type=_positive, metavar="N", help="repetitions of every figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw figures to FILE")
    parser.add_argument("--seed", type=int, default=20, help="of weights, batches and moments (default: 20)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs in DIR")
    parser.add_argument("--verbose", action="store_true", help="print every single measurement as it comes")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    started = time.monotonic()

    def say(text: str) -> None:
        if arguments.verbose:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    sections: list[Section] = []
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="bench_diloco-") as temporary:
        for name in arguments.only or FIGURES:
            print(f"[{time.monotonic() - started:6.1f} s] {name} ...", file=sys.stderr, flush=True)
            log_dir = (arguments.logs or Path(temporary)) / name
            log_dir.mkdir(parents=True, exist_ok=True)
            run = Run(quick=arguments.quick, repeat=arguments.repeat, seed=arguments.seed, log_dir=log_dir, say=say)
            try:
                sections.append(FIGURES[name](run))
            except (ChildEndedError, JobFailedError, LinksUnavailableError, TimeoutError) as error:
                has_failed = True
                sections.append(_could_not(name, error))
    print(f"seed {arguments.seed}, {os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}")
    print(render(sections))
    print(f"took {time.monotonic() - started:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(sections), indent=1) + "\n")
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
