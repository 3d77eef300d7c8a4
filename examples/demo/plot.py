"""The picture of a run: loss, committed steps and the lives of the groups over time, with the kills marked."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from demo.report import Report
from demo.timeline import Life, Timeline, loss_curve

_INK = "#1f2430"
_MUTED = "#7a8194"
_KILL = "#d11149"
_GROUP_COLOURS = ("#1a6fb5", "#f08a24", "#2a9d5c", "#8e5bb5", "#c2a21a", "#3bb3c2", "#a6583c", "#6b7280")
_STARTING = "#d7dae2"
_JOINING = "#9aa1b5"


def draw(timeline: Timeline, report: Report, path: Path, *, shows_step_times: bool = False) -> None:
    """Write the picture as a PNG; `shows_step_times`: how long steps took, instead of how many were committed."""
    ink = dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _INK)
    style: Any = {"axes.edgecolor": _MUTED, "axes.spines.top": False, "axes.spines.right": False, **ink}
    with plt.rc_context(style):
        figure, (upper, lower, lives) = plt.subplots(
            3, 1, figsize=(12, 9), sharex=True, layout="constrained", height_ratios=[4, 3, 0.55 * timeline.num_groups]
        )
        if shows_step_times:
            _draw_step_times(upper, timeline)
            _draw_losses(lower, timeline, report)
        else:
            _draw_losses(upper, timeline, report)
            _draw_steps(lower, timeline)
        _draw_lives(lives, timeline)
        for axes in (upper, lower, lives):
            axes.grid(axis="both" if axes is not lives else "x", color="#e6e8ee", linewidth=0.8)
            axes.set_axisbelow(True)
            for kill in timeline.kills:
                axes.axvline(
                    kill.at_s - timeline.started_s, color=_KILL, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7
                )
        lives.set_xlabel("seconds")
        lives.set_xlim(left=0)
        title = f"{_say_step_times(timeline, report)}\n{_title(report)}" if shows_step_times else _title(report)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _title(report: Report) -> str:
    end = report.verdict.reason[:1].upper() + report.verdict.reason[1:]
    return f"{end}   (seed {report.seed})"


def _say_step_times(timeline: Timeline, report: Report) -> str:
    longest_s = max((kill.rejoin_gap_s or 0.0 for kill in report.kills), default=0.0)
    usual = f"The survivors commit a step every {report.typical_step_s or 0.0:.2f} s"
    return (
        f"{usual}, and within {longest_s:.2f} s while killed groups come back."
        f"\nThe state of such a group takes {_transfer_s(timeline) or 0.0:.1f} s to arrive."
    )


def _transfer_s(timeline: Timeline) -> float | None:
    """How long receiving the state took a killed group, usually; None: none was received."""
    transfers = [max(life.received_s) for life in timeline.lives if life.number > 0 and life.received_s]
    return median(transfers) if transfers else None


def _draw_losses(axes: Axes, timeline: Timeline, report: Report) -> None:
    for group in range(timeline.num_groups):
        curve = loss_curve(timeline.lives_of(group))
        axes.scatter(
            [at_s - timeline.started_s for at_s, _, _ in curve],
            [loss for _, _, loss in curve],
            s=4,
            color=_colour(group),
            alpha=0.5,
            linewidths=0,
        )
    points = sorted(point for group in range(timeline.num_groups) for point in loss_curve(timeline.lives_of(group)))
    smooth = _smoothed([loss for _, _, loss in points], window=90)
    axes.plot([at_s - timeline.started_s for at_s, _, _ in points], smooth, color=_INK, linewidth=1.8)
    axes.axhline(report.uniform_loss, color=_MUTED, linewidth=0.9, linestyle=":")
    axes.text(
        1.0,
        report.uniform_loss,
        "guessing blindly ",
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        color=_MUTED,
    )
    axes.set_ylabel("loss, nats per character")
    axes.set_ylim(bottom=max(0.0, min(smooth, default=0.0) - 0.6), top=report.uniform_loss * 1.08)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=5, color=_colour(group), label=f"group_{group}")
        for group in range(timeline.num_groups)
    ]
    handles.append(Line2D([], [], color=_INK, linewidth=1.8, label="all groups, smoothed"))
    handles.append(Line2D([], [], color=_KILL, linewidth=0.9, linestyle=(0, (4, 3)), label="SIGKILL"))
    axes.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(1.0, 0.87),
        frameon=True,
        edgecolor="none",
        framealpha=0.9,
        ncols=2,
    )


def _draw_steps(axes: Axes, timeline: Timeline) -> None:
    """Groups move together and their lines lie on each other: the first is the widest, later ones thinner on top."""
    widths = [1.5 + 2.2 * (timeline.num_groups - 1 - group) for group in range(timeline.num_groups)]
    for life in timeline.lives:
        committed = [step for step in life.steps if step.committed and step.contributed]
        axes.plot(
            [step.at_s - timeline.started_s for step in committed],
            [step.step for step in committed],
            color=_colour(life.group),
            linewidth=widths[life.group],
            zorder=2 + life.group / timeline.num_groups,
            solid_capstyle="butt",
        )
    for kill in timeline.kills:
        at_s = kill.at_s - timeline.started_s
        axes.plot([at_s], [kill.step], marker="X", markersize=9, color=_KILL, markeredgecolor="white", zorder=5)
        axes.annotate(
            f"group_{kill.group}",
            (at_s, kill.step),
            xytext=(-8, 7),
            textcoords="offset points",
            ha="right",
            color=_KILL,
            fontsize=9,
        )
    axes.set_ylabel("committed steps")
    axes.set_ylim(bottom=0)


def _draw_step_times(axes: Axes, timeline: Timeline) -> None:
    """How long each step took each group that contributes, and how long it takes to receive the state."""
    for life in timeline.lives:
        steps = [step for step in life.steps if life.contributed_s is not None and step.at_s >= life.contributed_s]
        times = [step.at_s - timeline.started_s for step in steps]
        taken = [step.at_s - step.started_s for step in steps]
        axes.plot(times, taken, color=_colour(life.group), linewidth=1.4, marker=".", markersize=5)
        discarded = [index for index, step in enumerate(steps) if not step.committed]
        axes.scatter(
            [times[index] for index in discarded],
            [taken[index] for index in discarded],
            s=70,
            facecolors="none",
            edgecolors=_KILL,
            zorder=4,
        )
        if life.number > 0 and life.imported_s is not None and life.contributed_s is not None:
            start_s, end_s = life.imported_s - timeline.started_s, life.contributed_s - timeline.started_s
            axes.axvspan(start_s, end_s, color=_colour(life.group), alpha=0.13, linewidth=0)
            axes.annotate(
                f"group_{life.group}\nfollows",
                ((start_s + end_s) / 2, 0.05),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                color=_colour(life.group),
                fontsize=9,
            )
    transfer_s = _transfer_s(timeline)
    if transfer_s is not None:
        axes.axhline(transfer_s, color=_MUTED, linewidth=0.9, linestyle=":")
        axes.text(
            1.0,
            transfer_s,
            "a step that waits for the state ",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            color=_MUTED,
        )
    axes.set_ylabel("how long a step took, seconds")
    axes.set_ylim(bottom=0, top=1.25 * axes.get_ylim()[1])
    handles = [
        Line2D([], [], marker=".", color=_colour(group), label=f"group_{group}") for group in range(timeline.num_groups)
    ]
    ring = Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markeredgecolor=_KILL)
    ring.set_label("discarded step")
    kill = Line2D([], [], color=_KILL, linewidth=0.9, linestyle=(0, (4, 3)), label="SIGKILL")
    axes.legend(
        handles=[*handles, kill, ring], loc="upper left", frameon=True, edgecolor="none", framealpha=0.9, ncols=5
    )


def _draw_lives(axes: Axes, timeline: Timeline) -> None:
    for life in timeline.lives:
        for start_s, end_s, colour in _phases(life):
            axes.barh(
                life.group, end_s - start_s, left=start_s - timeline.started_s, height=0.56, color=colour, linewidth=0
            )
    for kill in timeline.kills:
        axes.plot(
            [kill.at_s - timeline.started_s],
            [kill.group],
            marker="X",
            markersize=9,
            color=_KILL,
            markeredgecolor="white",
        )
    axes.set_yticks(range(timeline.num_groups), [f"group_{group}" for group in range(timeline.num_groups)])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.legend(
        handles=[
            Patch(color=_colour(0), label="training"),
            Patch(color=_STARTING, label="starting torch"),
            Patch(color=_JOINING, label="joining: quorum and recovery"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.32),
        ncols=4,
        frameon=False,
    )


def _phases(life: Life) -> list[tuple[float, float, str]]:
    """The (start, end, colour) of what a life did, in order."""
    end_s = life.ended_s if life.ended_s is not None else life.last_event_s
    imported_s = life.imported_s if life.imported_s is not None else end_s
    contributed_s = life.contributed_s if life.contributed_s is not None else end_s
    marks = [
        (life.spawned_s, imported_s, _STARTING),
        (imported_s, contributed_s, _JOINING),
        (contributed_s, end_s, _colour(life.group)),
    ]
    return [mark for mark in marks if mark[1] > mark[0]]


def _colour(group: int) -> str:
    return _GROUP_COLOURS[group % len(_GROUP_COLOURS)]


def _smoothed(values: list[float], *, window: int) -> list[float]:
    """The mean of each value with its neighbours, `window` of them where there are so many."""
    sums = list(itertools.accumulate(values, initial=0.0))
    means = []
    for index in range(len(values)):
        low, high = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means
