"""This file decides which group is killed when. It does not know processes, the clock or the library.

The plan follows from the seed alone. A planned kill waits for its moment (`decide_kill`): it strikes only while
enough other groups contribute, since a job that loses every copy of its newest state at once has nothing to recover
from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedKill:
    """Kill `group` at any moment of a step: `delay_steps` (0 to 1) of a step's time after it has committed `step`."""

    step: int
    group: int
    delay_steps: float


def plan_kills(*, seed: int, num_kills: int, num_groups: int, num_steps: int) -> tuple[PlannedKill, ...]:
    """Return the kills in the order of their steps.

    The steps are random, one in each of `num_kills` equal stretches of the run from a tenth to nine tenths; the
    groups are random, and every group is killed once before one is killed twice as often as another.

    Raises:
        ValueError: there are too few steps or groups for that.
    """
    if num_groups < 2:
        raise ValueError(f"{num_groups} group: somebody must survive a kill, so at least 2 are needed")
    first, last = num_steps // 10, num_steps - num_steps // 10
    if num_kills < 0 or last - first < num_kills:
        raise ValueError(f"{num_kills} kills do not fit into {num_steps} steps")
    random_source = random.Random(seed)
    victims: list[int] = []
    while len(victims) < num_kills:
        victims += random_source.sample(range(num_groups), num_groups)
    edges = [first + (last - first) * index // max(num_kills, 1) for index in range(num_kills + 1)]
    return tuple(
        PlannedKill(step=random_source.randrange(low, high), group=group, delay_steps=random_source.random())
        for low, high, group in zip(edges[:-1], edges[1:], victims[:num_kills], strict=True)
    )


def decide_kill(
    plan: Sequence[PlannedKill], *, num_done: int, contributing: Mapping[int, int], num_groups: int
) -> PlannedKill | None:
    """Return the next kill of the plan if it may strike now.

    Args:
        plan: all kills.
        num_done: how many of them have been carried out.
        contributing: the last committed step of each group whose gradients were in it.
        num_groups: of the whole job.
    """
    if num_done >= len(plan):
        return None
    kill = plan[num_done]
    num_survivors = len(contributing) - (kill.group in contributing)
    if contributing.get(kill.group, -1) < kill.step or num_survivors < min(2, num_groups - 1):
        return None
    return kill


def decide_stop_step(
    *, num_steps: int, contributing: Mapping[int, int], num_groups: int, notice_steps: int
) -> int | None:
    """Return the step after which all groups end, once every group contributes and the end is near, else None.

    It lies at least `notice_steps` ahead of every group, so that all hear of it before they get there.
    """
    if len(contributing) < num_groups:
        return None
    newest = max(contributing.values())
    if newest < num_steps - 2 * notice_steps:
        return None
    return max(num_steps, newest + notice_steps)
