"""The command line of a benchmark of several figures: measures them in turn, prints the table, writes the raw numbers.

It decides nothing about how a figure is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

from bench.run import Run
from bench.stats import Verdict
from bench.table import HEADINGS, Row, Section, render, to_json

R = TypeVar("R", bound=Run)


def parse_names(text: str, known: Collection[str]) -> list[str]:
    """Read `NAME[,NAME...]`.

    Raises:
        argparse.ArgumentTypeError: a name is none of the known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no figure; there are {', '.join(known)}"
        )
    return names


def run_figures(
    prog: str,
    description: str,
    figures: Mapping[str, Callable[[R], Section]],
    *,
    make_run: Callable[..., R],
    errors: tuple[type[Exception], ...],
    more: Mapping[str, Mapping[str, Callable[[R], Section]]] | None = None,
    reference: str = HEADINGS[2],
) -> None:
    """Parse the command line, measure, print. Exit status 1 where something could not be measured; a missed bar is no error.

    Args:
        prog, description: of the command.
        figures: by name, in order.
        make_run: makes what a figure is told, from the fields of `Run`.
        errors: that mean that a figure could not be measured; the others are measured then.
        more: sets of figures that are measured only where they are asked for: by `--only`, or by the option of the set's name.
        reference: what is compared with.
    """
    sets = dict(more or {})
    usual, figures = [*figures], {**figures, **{name: sets[key][name] for key in sets for name in sets[key]}}
    arguments = _parse(prog, description, figures, sets)
    chosen = arguments.only or [name for key in sets if getattr(arguments, key) for name in sets[key]] or usual
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    started = time.monotonic()

    def say(text: str) -> None:
        if arguments.verbose:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    sections: list[Section] = []
    has_failed = False
    with tempfile.TemporaryDirectory(prefix=f"{prog}-") as temporary:
        for name in chosen:
            print(f"[{time.monotonic() - started:6.1f} s] {name} ...", file=sys.stderr, flush=True)
            log_dir = (arguments.logs or Path(temporary)) / name
            log_dir.mkdir(parents=True, exist_ok=True)
            run = make_run(
                quick=arguments.quick, repeat=arguments.repeat, seed=arguments.seed, log_dir=log_dir, say=say
            )
            try:
                sections.append(figures[name](run))
            except errors as error:
                has_failed = True
                sections.append(_could_not(name, error))
    print(f"seed {arguments.seed}, {os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}")
    print(render(sections, reference))
    print(f"took {time.monotonic() - started:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(sections), indent=1) + "\n")
    sys.exit(1 if has_failed else 0)


def _parse(
    prog: str, description: str, figures: Collection[str], sets: Mapping[str, Collection[str]]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    names = functools.partial(parse_names, known=figures)
    parser.add_argument("--quick", action="store_true", help="a short form with fewer repetitions")
    parser.add_argument("--only", type=names, metavar="NAME[,NAME]", help=f"only these of {', '.join(figures)}")
    for key, names_of_set in sets.items():
        parser.add_argument(f"--{key}", action="store_true", help=f"only {', '.join(names_of_set)}")
    parser.add_argument("--repeat", type=_positive, metavar="N", help="repetitions of every figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw figures to FILE")
    parser.add_argument("--seed", type=int, default=20, help="of values and moments (default: 20)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the processes' logs in DIR")
    parser.add_argument("--verbose", action="store_true", help="print every single measurement as it comes")
    return parser.parse_args()


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(f"stopped by signal {number}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected a number from 1 on")
    return number


def _could_not(name: str, error: Exception) -> Section:
    print(f"{name} could not be measured: {error}", file=sys.stderr, flush=True)
    row = Row(figure="  could not be measured", ours="", verdict=Verdict.NOT_RUN)
    return Section(name=name, title=name, rows=[row], notes=[str(error).splitlines()[0]])
