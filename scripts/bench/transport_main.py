"""Runs the transport's figures, prints the table and writes the raw numbers. It decides nothing about how one is measured."""

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

from bench import (
    sides,
    transport_failover,
    transport_first,
    transport_footprint,
    transport_held,
    transport_small,
    transport_sources,
    transport_swarm,
    transport_torn,
    transport_wire,
)
from bench.processes import ChildEndedError
from bench.stats import Verdict
from bench.table import Row, Section, render, to_json
from bench.transport_peer import CommandFailedError
from bench.transport_run import Run

FIGURES: dict[str, Callable[[Run], Section]] = {
    "first": transport_first.measure,
    "repeated": transport_wire.measure,
    "small": transport_small.measure,
    "held": transport_held.measure,
    "torn": transport_torn.measure,
    "memory": transport_footprint.measure,
    "three_sources": transport_sources.measure,
    "swarm": transport_swarm.measure,
    "failover": transport_failover.measure,
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
        prog="bench_transport",
        description="Measure the checkpoint transport, beside torchft 0.2.0 and raw sockets. The figures over limited links "
        "(three_sources, swarm, failover) need root, for network namespaces.",
    )
    parser.add_argument("--quick", action="store_true", help="a short form with fewer repetitions")
    parser.add_argument("--only", type=parse_names, metavar="NAME[,NAME]", help=f"only these of {', '.join(FIGURES)}")
    parser.add_argument("--repeat", type=_positive, metavar="N", help="repetitions of every figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw figures to FILE")
    parser.add_argument("--seed", type=int, default=20, help="of the values that are carried (default: 20)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs in DIR")
    parser.add_argument("--verbose", action="store_true", help="print every single measurement as it comes")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    started = time.monotonic()

    def say(text: str) -> None:
        if arguments.verbose:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    if not sides.is_installed(sides.REFERENCE):
        print("torchft is not installed here: its columns are marked 'not run'.", file=sys.stderr)
    sections: list[Section] = []
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="bench_transport-") as temporary:
        for name in arguments.only or FIGURES:
            print(f"[{time.monotonic() - started:6.1f} s] {name} ...", file=sys.stderr, flush=True)
            log_dir = (arguments.logs or Path(temporary)) / name
            log_dir.mkdir(parents=True, exist_ok=True)
            run = Run(quick=arguments.quick, repeat=arguments.repeat, seed=arguments.seed, log_dir=log_dir, say=say)
            try:
                sections.append(FIGURES[name](run))
            except (ChildEndedError, CommandFailedError, ConnectionError, TimeoutError) as error:
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
