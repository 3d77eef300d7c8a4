"""What follows from a job's records: curves and totals. Pure: it knows no clock and no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean

from diloco.job import JobRecord
from diloco.records import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One step of any group: seconds since the job began, bytes that a group had sent (the mean), loss of its batch."""

    at_s: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A job in figures. `took_s` is from the first step of any group to the last one's end."""

    name: str
    took_s: float
    num_counted: int
    num_rounds: int
    num_kills: int
    sent_bytes: float
    held_out_loss: float
    is_equal: bool


def sent_by_a_group(record: JobRecord, counters: Sequence[int]) -> float:
    """Return the mean of the bytes that the groups have sent, from each one's counter."""
    return mean(counter - record.sent_before for counter in counters) / record.num_sharing


def curve(record: JobRecord) -> list[Point]:
    """Return all steps of all groups that could contribute, in the order of time."""
    counters = [record.sent_before] * record.num_groups
    points = []
    for group, step in record.steps():
        counters[group] = step.sent_bytes
        if record.num_sharing > 1:
            counters = [step.sent_bytes] * record.num_groups
        if step.contributed:
            sent = sent_by_a_group(record, counters)
            points.append(Point(at_s=step.at_s - record.started_s, sent_bytes=sent, loss=step.loss))
    return points


def at_time(points: Sequence[Point], at_s: float) -> Point | None:
    """Return the last point up to a moment, in seconds since the job began."""
    return next((point for point in reversed(points) if point.at_s <= at_s), None)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value with its neighbours, `window` of them where there are so many."""
    sums = list(accumulate(values, initial=0.0))
    means = []
    for index in range(len(values)):
        low, high = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means


def summarize(record: JobRecord) -> Summary:
    """Work out the figures of a job that has ended."""
    ended = record.finished()
    first_s = min(records[0].at_s - records[0].took_s for records in record.records if isinstance(records[0], Step))
    return Summary(
        name=record.name,
        took_s=max(final.at_s for final in ended) - first_s,
        num_counted=max(final.num_counted for final in ended),
        num_rounds=max(final.round for final in ended),
        num_kills=len(record.kills),
        sent_bytes=sent_by_a_group(record, [final.sent_bytes for final in ended]),
        held_out_loss=mean(final.held_out_loss for final in ended),
        is_equal=len(ended) == record.num_groups and len({final.digest for final in ended}) == 1,
    )
