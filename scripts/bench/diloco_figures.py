"""Turns what the outer loop's benchmark has recorded into figures. Numbers in, numbers out; it measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.stats import median


class Kind(Enum):
    """What an inner step does beside training."""

    PLAIN = "plain"
    """Nothing."""
    PREPARE = "prepare"
    """It begins a transfer."""
    BESIDE = "beside"
    """It runs while a transfer does."""
    SYNC = "sync"
    """It ends a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """One inner step: seconds, the rounds committed after it, and the bytes that the group had sent then."""

    took_s: float
    round: int
    sent_bytes: int


def kind_of(position: int, period: int, delay: int) -> Kind:
    """Return what an inner step of a round does.

    Args:
        position: which of the round's, from 1 to `period`.
        period: inner steps of a round.
        delay: inner steps from the beginning of a transfer to its end.
    """
    if position == period:
        return Kind.SYNC
    if position == period - delay:
        return Kind.PREPARE
    return Kind.BESIDE if position > period - delay else Kind.PLAIN


def by_kind(steps: Sequence[InnerStep], period: int, delay: int, skip_rounds: int) -> dict[Kind, list[float]]:
    """Return the durations of a group's inner steps by what they do, in seconds.

    Rounds of another length than the schedule's (a failed one, the first of a group that joined) are left out.

    Args:
        steps: in order; a round ends with the step in which `round` grows.
        period, delay: the schedule.
        skip_rounds: that are no figure yet.
    """
    durations: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for number, steps_of_round in enumerate(_rounds(steps)):
        if number >= skip_rounds and len(steps_of_round) == period:
            for position, step in enumerate(steps_of_round, start=1):
                durations[kind_of(position, period, delay)].append(step.took_s)
    return durations


def _rounds(steps: Sequence[InnerStep]) -> Iterable[list[InnerStep]]:
    """Yield the steps of each round that ended, in order."""
    begun: list[InnerStep] = []
    before = 0
    for step in steps:
        begun.append(step)
        if step.round > before:
            yield begun
            begun, before = [], step.round


def bytes_a_step(steps: Sequence[InnerStep], *, first_round: int, last_round: int, steps_a_round: int) -> float | None:
    """Return the bytes that a group sent for each inner step, from the end of one round to the end of another.

    None where it was not there for both.

    Args:
        steps: in order.
        first_round, last_round: numbers of committed rounds; whole turns of the fragments lie between them.
        steps_a_round: inner steps of a round.
    """
    sent = {
        step.round: step.sent_bytes for step in reversed(steps)
    }  # of each round its first step: where it was committed
    if first_round not in sent or last_round not in sent:
        return None
    return (sent[last_round] - sent[first_round]) / ((last_round - first_round) * steps_a_round)


def over_plain(durations: Mapping[Kind, Sequence[float]], kind: Kind) -> float | None:
    """Return the median of one kind of step over the median of those that do nothing else."""
    usual, plain = median(durations[kind]), median(durations[Kind.PLAIN])
    return usual / plain if usual is not None and plain else None


def excess(value: float, reference: float) -> float:
    """Return how much a value lies above a reference, as a part of it; negative where below."""
    return value / reference - 1


def joined(parts: Iterable[Mapping[Kind, Sequence[float]]]) -> dict[Kind, list[float]]:
    """Put several groups' durations together."""
    together: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for part in parts:
        for kind, values in part.items():
            together[kind] += values
    return together


def percent(value: float | None) -> str:
    """Write a part as percent with its sign, or 'not run' for None."""
    return "not run" if value is None else f"{value:+.1%}"
