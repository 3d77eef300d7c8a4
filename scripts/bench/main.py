"""Runs the benchmarks, prints the table and writes the raw figures. It decides nothing about how anything is measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from bench import (
    check_equal,
    join_cliff,
    join_learner,
    kill_gap,
    lighthouse_failover,
    lighthouse_scale,
    overhead,
    rejoin,
    sides,
)
from bench.processes import ChildEndedError
from bench.stats import Verdict
from bench.table import Row, Section, render, to_json

BENCHMARKS = {
    "kill_gap": kill_gap.run,
    "rejoin": rejoin.run,
    "join_cliff": join_cliff.run,
    "join_steps": join_learner.run_steps,
    "join_time": join_learner.run_time,
    "join_cold": join_learner.run_cold,
    "join_idle": join_learner.run_idle,
    "join_spare": join_learner.run_spare,
    "overhead": overhead.run,
    "check_equal": check_equal.run,
    "lighthouse": lighthouse_scale.run,
    "lighthouse_failover": lighthouse_failover.run,
}


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(f"stopped by signal {number}")


def main() -> None:
    """Parse the command line, run, print. Exit status 1 where something could not be measured; a missed bar is no error."""
    parser = argparse.ArgumentParser(
        prog="bench_recovery",
        description="Measure recovery, overhead, checks and the lighthouse, beside torchft 0.2.0.",
    )
    parser.add_argument("--quick", action="store_true", help="a short form, about two minutes, with fewer repetitions")
    parser.add_argument("--only", action="append", choices=sorted(BENCHMARKS), help="run this one (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw figures to FILE")
    parser.add_argument("--seed", type=int, default=20, help="of weights, input and moments of kills (default: 20)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs in DIR")
    parser.add_argument("--verbose", action="store_true", help="print every single measurement as it comes")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    started = time.monotonic()

    def say(text: str) -> None:
        if arguments.verbose:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    if not sides.is_installed(sides.REFERENCE):
        print("torchft is not installed here: its columns are marked 'not run'.", file=sys.stderr)
    sections: list[Section] = []
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="bench_recovery-") as temporary:
        logs = arguments.logs or Path(temporary)
        for name in arguments.only or BENCHMARKS:
            print(f"[{time.monotonic() - started:6.1f} s] {name} ...", file=sys.stderr, flush=True)
            directory = logs / name
            directory.mkdir(parents=True)
            try:
                section = BENCHMARKS[name](quick=arguments.quick, seed=arguments.seed, log_dir=directory, say=say)
            except (ChildEndedError, TimeoutError) as error:
                has_failed = True
                print(f"{name} could not be measured: {error}", file=sys.stderr, flush=True)
                row = Row(figure="  could not be measured", ours="", verdict=Verdict.NOT_RUN)
                section = Section(name=name, title=name, rows=[row], notes=[str(error).splitlines()[0]])
            sections.append(section)
    print(f"seed {arguments.seed}, {os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}")
    print(render(sections))
    print(f"took {time.monotonic() - started:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(sections), indent=1) + "\n")
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
