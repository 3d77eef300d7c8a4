"""Measures two revisions of this library in turns, in one run, each by its own benchmark: what a change costs.

Each turn is a run of a benchmark of one revision, with new processes; which revision begins changes from pair to pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.stats import judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, render, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure that a revision measures of itself, and how much more the new one may take."""

    title: str
    command: Sequence[str]
    """Arguments of Python, in the revision's folder; `OUT` is a folder for what it writes, `OUT/figures.json` the figures."""
    keys: Sequence[str]
    """The way to the figure there: seconds, or a list of them; through a list of records, that key of each."""
    bar: float


_TRANSPORT = ("-m", "bench.transport_main", "--repeat", "1", "--json", "OUT/figures.json")
_SHARDED = ("-m", "bench.transport_main", "--quick", "--repeat", "3", "--json", "OUT/figures.json", "--only")
FIGURES = {
    "recovery": Figure(
        title="1 GiB into a live model, new processes",
        command=(*_TRANSPORT, "--only", "first"),
        keys=("first", "raw", "ours_s"),
        bar=1.03,
    ),
    "step": Figure(
        title="a step of the demo, as most are",
        command=[
            "examples/demo",
            "--kills",
            "1",
            "--steps",
            "100",
            "--seed",
            "20",
            "--out",
            "OUT",
            "--json",
            "OUT/figures.json",
        ],
        keys=("typical_step_s",),
        bar=1.03,
    ),
    "swarm": Figure(
        title="eight joiners from one source on links of 200 Mbit/s",
        command=(*_TRANSPORT, "--quick", "--only", "swarm"),
        keys=("swarm", "raw", "ours_all_s"),
        bar=1.1,
    ),
    "boxes": Figure(
        title="a group of two onto the same layout, by boxes",
        command=(*_SHARDED, "sharded_same"),
        keys=("sharded_same", "raw", "the same by boxes", "wall_s"),
        bar=1.03,
    ),
    "rows": Figure(
        title="re-sharding 2 to 4 along dimension 0",
        command=(*_SHARDED, "sharded_dim0"),
        keys=("sharded_dim0", "raw", "2 to 4 along dimension 0", "wall_s"),
        bar=1.03,
    ),
    "columns": Figure(
        title="re-sharding 2 to 4 along dimension 1",
        command=(*_SHARDED, "sharded_dim1"),
        keys=("sharded_dim1", "raw", "2 to 4 along dimension 1", "wall_s"),
        bar=1.03,
    ),
}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check a revision out into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-revision-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)


def measure_once(tree: Path, figure: Figure) -> float:
    """Return the median of one run of a figure by a revision's own benchmark, in seconds.

    Raises:
        subprocess.CalledProcessError: it could not be measured.
    """
    with tempfile.TemporaryDirectory(prefix="bench-revision-") as folder:
        command = [sys.executable, *(word.replace("OUT", folder) for word in figure.command)]
        path = os.pathsep.join([str(tree), str(tree / "scripts")])
        done = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode != 0:
            sys.stderr.write(done.stderr[-4000:])
            done.check_returncode()
        value = json.loads((Path(folder) / "figures.json").read_text())
    for key in figure.keys:
        value = [item[key] for item in value] if isinstance(value, list) else value[key]
    seconds_taken = median(value) if isinstance(value, list) else value
    if seconds_taken is None:
        raise SystemExit(f"{figure.title}: nothing was measured here; network namespaces need root")
    return float(seconds_taken)


def main() -> None:
    """Measure what the command line asks for, and print each figure of both revisions with its bar."""
    parser = argparse.ArgumentParser(prog="bench_revisions", description=__doc__)
    parser.add_argument("base", help="the revision before a change")
    parser.add_argument("new", nargs="?", default="HEAD", help="the revision with it (default: HEAD)")
    parser.add_argument("--only", choices=[*FIGURES], action="append", help="only this figure; may be given again")
    parser.add_argument("--pairs", type=int, default=15, help="how often to measure each (default: 15)")
    arguments = parser.parse_args()
    sections: list[Section] = []
    with ExitStack() as stack:
        trees = [stack.enter_context(checked_out(revision)) for revision in (arguments.base, arguments.new)]
        for name in arguments.only or FIGURES:
            figure = FIGURES[name]
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(arguments.pairs):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    times[side].append(measure_once(trees[side], figure))
                print(f"{name} {number + 1}: {times[0][-1]:.4f} s, {times[1][-1]:.4f} s", file=sys.stderr, flush=True)
            sections.append(_section(name, figure, times))
    print(render(sections, f"at {arguments.base}"))


def _section(name: str, figure: Figure, times: tuple[list[float], list[float]]) -> Section:
    ratios = sorted(pair_ratios(times[1], times[0]))
    cost = median(ratios)
    row = Row(
        figure=f"  {name}",
        ours=f"{seconds(median(times[1]))} ({ratio(cost)})",
        reference=seconds(median(times[0])),
        bar=f"<= {figure.bar}x",
        verdict=judge_at_most(cost, figure.bar),
    )
    note = f"median of {len(ratios)} pairs in turn, ratios {ratios[0]:.3f} to {ratios[-1]:.3f}"
    return Section(name=name, title=figure.title, rows=[row], notes=[note])


if __name__ == "__main__":
    main()
