"""The picture: the loss over the bytes that a group sent, and over time, with the kills marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from diloco.figures import Point, at_time, curve, smoothed
from diloco.job import JobRecord

_INK = "#1f2430"
_MUTED = "#7a8194"
_KILL = "#d11149"
_COLOURS = ("#1a6fb5", "#f08a24")
_MEGABYTE = 1e6


def draw(records: Sequence[JobRecord], labels: Sequence[str], title: str, path: Path) -> None:
    """Write the picture as a PNG."""
    ink = dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _INK)
    style: Any = {"axes.edgecolor": _MUTED, "axes.spines.top": False, "axes.spines.right": False, **ink}
    with plt.rc_context(style):
        figure, (by_bytes, by_time) = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
        by_bytes.set_xscale("log")
        for record, label, colour in zip(records, labels, _COLOURS, strict=False):
            points = curve(record)
            losses = smoothed([point.loss for point in points], window=max(9, len(points) // 60))
            # Before the first bytes there is nothing on a logarithmic axis.
            started = next((n for n, point in enumerate(points) if point.sent_bytes > 0), 0)
            by_bytes.plot(
                [point.sent_bytes / _MEGABYTE for point in points[started:]],
                losses[started:],
                color=colour,
                label=label,
            )
            by_time.plot([point.at_s - points[0].at_s for point in points], losses, color=colour, label=label)
            _mark_kills(by_bytes, by_time, record, points, losses)
        for axes in (by_bytes, by_time):
            axes.grid(color="#e6e8ee", linewidth=0.8)
            axes.set_axisbelow(True)
        by_bytes.set_xlabel("megabytes that a group has sent")
        by_bytes.set_ylabel("training loss, nats a character (smoothed)")
        by_time.set_xlabel("seconds since the first step")
        by_time.set_xlim(left=0)
        handles, names = by_time.get_legend_handles_labels()  # the other has the same
        figure.legend(handles, names, frameon=False, loc="outside upper right", ncols=3)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _mark_kills(
    by_bytes: Axes, by_time: Axes, record: JobRecord, points: Sequence[Point], losses: Sequence[float]
) -> None:
    for number, kill in enumerate(record.kills):
        point = at_time(points, kill.at_s - record.started_s)
        if point is None:
            continue
        loss = losses[points.index(point)]
        for axes, x in ((by_bytes, point.sent_bytes / _MEGABYTE), (by_time, point.at_s - points[0].at_s)):
            axes.plot(x, loss, "X", markersize=10, color=_KILL, markeredgecolor="white")
        if number == 0:
            axes.lines[-1].set_label("SIGKILL")
