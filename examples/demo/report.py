"""The end of a run in figures: a table for people, a JSON file for machines. The same figures in both."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from demo.corpus import VOCABULARY_SIZE
from demo.timeline import (
    KillFigures,
    Ledger,
    Timeline,
    Verdict,
    final_loss,
    judge,
    keep_ledger,
    loss_curve,
    measure_kills,
    typical_step_s,
)
from torchft_ckpt.cli.goodput import as_text
from torchft_ckpt.core.training.goodput import JobGoodput


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run; durations in seconds, losses in nats per character. The JSON file holds exactly this."""

    seed: int
    num_groups: int
    num_steps: int
    duration_s: float
    typical_step_s: float | None
    first_loss: float | None
    last_loss: float | None
    uniform_loss: float
    kills: list[KillFigures]
    verdict: Verdict
    ledger: Ledger
    without_kills: Ended | None
    goodput: float
    accounts: dict[str, dict[str, float]]
    sample: str
    picture: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the run without a kill has ended."""

    digest: str
    ledger: Ledger


def compare(report: Report) -> str | None:
    """Return in what the run with kills differs from the one without; None: in no bit."""
    other, own = report.without_kills, report.ledger
    if other is None:
        return None if own.is_whole else str(own)
    found = {
        "the state": (*report.verdict.digests.values(), other.digest),
        "the losses": (own.losses, other.ledger.losses),
        "the samples": (own.samples, other.ledger.samples),
    }
    differs = [what for what, some in found.items() if len({*some}) > 1]
    differs += [str(one) for one in (own, other.ledger) if not one.is_whole]
    return ", ".join(differs) or None


def build_report(
    timeline: Timeline,
    *,
    seed: int,
    num_planned_kills: int,
    num_in_step: int,
    duration_s: float,
    picture: Path,
    without_kills: Timeline | None,
    goodput: JobGoodput,
) -> Report:
    """Work out every figure of a finished run, of so many samples a step, and of how it ends without kills."""
    verdict = judge(timeline, num_planned_kills=num_planned_kills)
    curves = [curve for group in range(timeline.num_groups) if (curve := loss_curve(timeline.lives_of(group)))]
    samples = [life.finished.sample for life in timeline.lives if life.finished is not None and life.finished.sample]
    return Report(
        seed=seed,
        num_groups=timeline.num_groups,
        num_steps=max((life.last_step for life in timeline.lives), default=0),
        duration_s=duration_s,
        typical_step_s=typical_step_s(timeline),
        first_loss=min(curve[0] for curve in curves)[2] if curves else None,
        last_loss=final_loss(timeline),
        uniform_loss=math.log(VOCABULARY_SIZE),
        kills=measure_kills(timeline),
        verdict=verdict,
        ledger=keep_ledger(timeline, num_in_step=num_in_step),
        without_kills=None if without_kills is None else _ended(without_kills, num_in_step),
        goodput=goodput.goodput,
        accounts={
            group: {account.value: seconds for account, seconds in accounts.items()}
            for group, accounts in goodput.groups.items()
        },
        sample=samples[0] if samples else "",
        picture=str(picture),
    )


def _ended(timeline: Timeline, num_in_step: int) -> Ended:
    verdict = judge(timeline, num_planned_kills=0)
    digest = " ".join(sorted({*verdict.digests.values()}))
    return Ended(digest=digest, ledger=keep_ledger(timeline, num_in_step=num_in_step))


def write_json(report: Report, path: Path) -> None:
    """Write the report as one JSON object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_report(report: Report, goodput: JobGoodput, console: Console) -> None:
    """Print the table of the kills, the run in a few lines, what time was spent on, and the verdict."""
    if report.kills:
        console.print(_table_of_kills(report.kills))
        console.print(
            "discarded: steps that each survivor threw away until the next kill. longest gap: between two commits of\n"
            "a survivor, before and after the killed group was ready to return. start: torch, model, data.\n"
            "rejoin: from Manager(...) to the first commit that holds the group's own gradients.",
            style="dim",
            highlight=False,
        )
    typical = f"{report.typical_step_s * 1000:.0f} ms" if report.typical_step_s is not None else "unknown"
    console.print(
        f"{report.num_steps} steps in {report.duration_s:.0f} s, a step typically {typical}; "
        f"loss from {_number(report.first_loss, 2)} to {_number(report.last_loss, 2)} nats per character "
        f"(guessing blindly: {report.uniform_loss:.2f})",
        highlight=False,
    )
    if report.sample:
        console.print("What the model writes after 'def ':", highlight=False)
        console.print(
            "\n".join("    " + line for line in report.sample.splitlines()), style="dim", markup=False, highlight=False
        )
    console.print(as_text(goodput), markup=False, highlight=False)
    console.print(f"picture: {report.picture}", highlight=False, soft_wrap=True)
    for group, digest in sorted(report.verdict.digests.items()):
        console.print(f"group_{group}  {digest}", highlight=False)
    if report.without_kills is not None:
        console.print(f"no kills {report.without_kills.digest}", highlight=False)
        runs = (("with kills", report.ledger), ("no kills  ", report.without_kills.ledger))
        for name, ledger in runs:
            console.print(
                f"{name}  losses {ledger.losses}, {ledger} ({ledger.samples})", highlight=False, soft_wrap=True
            )
    else:
        console.print(
            f"ledger   losses {report.ledger.losses}, {report.ledger} ({report.ledger.samples})", highlight=False
        )
    differs = compare(report)
    is_ok = report.verdict.is_bit_equal and differs is None
    same = " and as without a kill" if report.without_kills is not None else ""
    reason = report.verdict.reason + (same if differs is None else f"; these differ, or are not whole: {differs}")
    console.print(
        f"{'OK' if is_ok else 'FAILED'}: {reason} (seed {report.seed})",
        style="bold green" if is_ok else "bold red",
        highlight=False,
        soft_wrap=True,
    )


def _table_of_kills(kills: list[KillFigures]) -> Table:
    table = Table(title="What each SIGKILL cost", title_justify="left")
    for heading in (
        "kill",
        "group",
        "at step",
        "discarded by\nsurvivors",
        "longest gap\nat kill",
        "longest gap\nat return",
    ):
        table.add_column(heading, justify="right")
    for heading in ("start", "rejoin", "back at\nstep"):
        table.add_column(heading, justify="right")
    for number, kill in enumerate(kills, start=1):
        table.add_row(
            str(number),
            f"group_{kill.group}",
            str(kill.step),
            " ".join(f"{count}" for _, count in sorted(kill.discarded.items())),
            _milliseconds(kill.gap_s),
            _milliseconds(kill.rejoin_gap_s),
            f"{_number(kill.start_s, 1)} s",
            _milliseconds(kill.rejoin_s),
            str(kill.rejoined_step) if kill.rejoined_step is not None else "never",
        )
    return table


def _milliseconds(duration_s: float | None) -> str:
    return "?" if duration_s is None else f"{duration_s * 1000:.0f} ms"


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"
