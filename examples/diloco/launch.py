"""The order of things when `train_diloco.py` is started by hand: a job with DiLoCo and kills, one without either, table, picture.

Exit status 0 only if all groups of each job ended with the same bits.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from diloco.figures import Summary, summarize
from diloco.job import Job, JobFailedError, JobPlan, JobRecord, plan_kills
from diloco.links import Links, LinksUnavailableError, Loopback, Network
from diloco.options import Options

_EXAMPLES = Path(__file__).resolve().parent.parent
_SAME_TOKENS = 0.05
"""Losses are compared where the tokens differ by less; a group that is long in coming back makes the job longer."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(f"stopped by signal {number}; every group was ended")


def launch(options: Options, arguments: Sequence[str]) -> int:
    """Run everything; return the exit status.

    Args:
        options: of the whole.
        arguments: the command line that they came from, handed on to the groups.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    plans = [
        JobPlan(
            name="diloco",
            script=_EXAMPLES / "train_diloco.py",
            arguments=arguments,
            num_groups=options.groups,
            num_planned=options.num_planned,
            kills=plan_kills(num_kills=options.kills, num_groups=options.groups, seed=options.seed),
        )
    ]
    if options.ddp:
        plans.append(
            JobPlan(
                name="ddp",
                script=_EXAMPLES / "diloco" / "baseline.py",
                arguments=arguments,
                num_groups=options.groups,
                num_planned=options.num_planned,
            )
        )
    why_not = "" if options.throttle else "--no-throttle"
    if options.throttle:
        try:
            with Links(1, rate_mbit=options.rate):
                pass
        except LinksUnavailableError as error:
            why_not = str(error)
    where = f"not throttled, on loopback ({why_not})" if why_not else f"links of {options.rate:g} Mbit/s"
    say(f"{options.groups} replica groups, {where}; records and logs in {options.out}")
    records: list[JobRecord] = []
    try:
        for plan in plans:
            with _network(options, is_throttled=not why_not) as network:  # fresh links: their counters begin at 0
                with Job(plan, network, options.out.resolve(), say) as job:
                    records.append(job.run())
    except JobFailedError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    summaries = [summarize(record) for record in records]
    print(table(options, summaries))
    picture = options.out / "diloco.png"
    try:
        from diloco.plot import draw  # matplotlib takes a second to import: not before the groups are started
    except ImportError as error:
        print(f"no picture: {error}")
    else:
        labels = [
            f"Streaming DiLoCo, {options.fragments} fragments every {options.sync_every} steps",
            "data-parallel, every step",
        ]
        draw(records, labels, f"{options.groups} replica groups, {where}", picture)
        print(f"picture: {picture}")
    is_equal = all(summary.is_equal for summary in summaries)
    if any(len(record.finished()) < record.num_groups for record in records):
        print("FAILED: a group was away when its job ended, and has nothing to compare")
    else:
        print("OK: all groups of each job ended bit-equal" if is_equal else "FAILED: the groups differ")
    return 0 if is_equal else 1


@contextmanager
def _network(options: Options, *, is_throttled: bool) -> Iterator[Network]:
    if not is_throttled:
        yield Loopback()
        return
    with Links(options.groups, rate_mbit=options.rate) as links:
        yield links


def table(options: Options, summaries: Sequence[Summary]) -> str:
    """Lay the figures of the jobs out side by side."""
    per_step = [summary.sent_bytes * options.groups / summary.num_counted for summary in summaries]
    lines = [
        ["", *(summary.name for summary in summaries)],
        ["characters learned from", *(f"{s.num_counted * options.characters_a_step:,}" for s in summaries)],
        ["held-out loss, nats a character", *(f"{s.held_out_loss:.4f}" for s in summaries)],
        ["MB sent by a group", *(f"{s.sent_bytes / 1e6:.1f}" for s in summaries)],
        ["kB sent by a group in an inner step", *(f"{sent / 1e3:.1f}" for sent in per_step)],
        ["seconds of training", *(f"{s.took_s:.1f}" for s in summaries)],
        ["committed rounds", *(str(s.num_rounds) for s in summaries)],
        ["SIGKILLs", *(str(s.num_kills) for s in summaries)],
        ["groups ended bit-equal", *("yes" if s.is_equal else "NO" for s in summaries)],
    ]
    if len(summaries) == 2:
        first, other = summaries
        if abs(first.num_counted / other.num_counted - 1) < _SAME_TOKENS:
            lines[2].append(f"{first.held_out_loss / other.held_out_loss - 1:+.1%}")
        lines[4].append(f"1/{per_step[1] / per_step[0]:.1f}")
        lines[5].append(f"1/{other.took_s / first.took_s:.1f}")
    widths = [max(len(line[column]) for line in lines) for column in range(len(summaries) + 1)]
    rows = []
    for name, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, [*widths[1:], 8], strict=False)]
        rows.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(rows)
