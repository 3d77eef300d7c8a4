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
    """A figure of a benchmark, and how much more the new revision may take."""

    title: str
    module: str
    options: Sequence[str]
    section: str
    raw: Sequence[str]
    """Keys of the section's raw figures, to a list of seconds."""
    bar: float


FIGURES = {
    "recovery": Figure(
        title="1 GiB into a live model, new processes",
        module="bench.transport_main",
        options=("--only", "first"),
        section="first",
        raw=("ours_s",),
        bar=1.03,
    ),
    "step": Figure(
        title="a step of three groups, nothing failing",
        module="bench.main",
        options=("--quick", "--only", "overhead"),
        section="overhead",
        raw=("step_s", "ours"),
        bar=1.03,
    ),
    "swarm": Figure(
        title="eight joiners from one source on links of 200 Mbit/s",
        module="bench.transport_main",
        options=("--quick", "--only", "swarm"),
        section="swarm",
        raw=("ours_all_s",),
        bar=1.1,
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
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", figure.module, *figure.options, "--json", str(out)]
        if figure.module == "bench.transport_main":
            command += ["--repeat", "1"]
        path = os.pathsep.join([str(tree), str(tree / "scripts")])
        done = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if done.returncode != 0:
            sys.stderr.write(done.stderr[-4000:])
            done.check_returncode()
        values = json.loads(out.read_text())[figure.section]["raw"]
    for key in figure.raw:
        values = values[key]
    value = median(values)
    if value is None:
        raise SystemExit(f"{figure.title}: nothing was measured here; see `--help` of {figure.module}")
    return value


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
