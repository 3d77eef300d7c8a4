"""A job's accounts, of what its ranks have written (`Line`): what counts in the end, what was lost, and who was down.

    goodput = productive / (the time that each group had, summed)

A group's time is that of the training thread of its first rank, from the first line of its first life to the last line of its
last one, or to the job's last line if it was lost and did not come back. Each life's accounts are what its own lines say, and:

    a step counts here, and a later quorum made it again, or one before it    lost
    from the last line of a life that was lost to the loss, as others saw it  discarded: the step in flight
    from a loss to the first line of the group's next life                    down
    what no line speaks of                                                    unaccounted

Which quorum is later its number says. These begin anew if all groups and the lighthouse do: then no two lives overlap. Clocks of
machines may differ by less than a group takes to start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from torchft_ckpt.core.coordination.messages import group_name
from torchft_ckpt.core.training.ledger import Account

BEGAN, ENDED = "Began", "Ended"
"""The first line of a rank's life, and the last one."""
FINISHED, LEFT, SHUT_DOWN = "finished", "left", "shut down"
"""How a life ended that has said so. Nobody waits for one of the first two."""

_OF_GOOGLE = {
    "(goodput)": {Account.PRODUCTIVE},
    "TRAINING_PREP": {Account.STARTING},
    "PROGRAM_STARTUP": {Account.CONNECTING, Account.OUTSIDE},
    "DATA_LOADING_SYNC": {Account.BETWEEN},
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": {Account.SAVING},
    "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME": {Account.LOADING},
    "WASTED_PROGRESS_FROM_DISRUPTION": {Account.LOST, Account.DISCARDED},
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": {Account.BELOW_MINIMUM, Account.LIGHTHOUSE_AWAY, Account.DOWN},
    "OTHER": {Account.QUORUM, Account.HELD, Account.COMPARING, Account.SPARE, Account.UNACCOUNTED},
}
GOOGLES: Mapping[Account, str] = {account: name for name, accounts in _OF_GOOGLE.items() for account in accounts}
"""The category of Google's ml-goodput-measurement (`BadputType`) that comes closest."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a line that a rank has written; what else is in it says nothing of time."""

    event: str
    time: float
    """Seconds since 1970, by the rank's own clock."""
    replica_id: str
    rank: int = 0
    job: str = ""
    step: int = 0
    quorum_id: int = 0
    spent: dict[str, float] = {}
    """Seconds by account, since the last line that has some."""
    peer: str = ""
    how: str = ""


@dataclass(slots=True)
class _Life:
    """One life of a group, as its first rank has written of it."""

    replica_id: str
    rank: int
    began: float
    last: float = float("-inf")
    """So far its lines say what the time was spent on."""
    how: str = ""
    era: int = 0
    seconds: dict[Account, float] = field(default_factory=lambda: dict.fromkeys(Account, 0.0))
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """Of each step that counts: its quorum, its number, and the productive seconds until then."""

    def take(self, line: Line) -> None:
        self.began = min(self.began, line.time)
        if line.spent or line.event == ENDED:  # other lines do not say what came before them
            self.last = max(self.last, line.time)
        self.how = line.how if line.event == ENDED else self.how
        for name, seconds in line.spent.items():
            self.seconds[_BY_NAME.get(name, Account.UNACCOUNTED)] += seconds
        if line.event == "StepCommitted":
            self.steps.append((line.quorum_id, line.step, line.spent.get(Account.PRODUCTIVE.value, 0.0)))


_BY_NAME = {account.value: account for account in Account}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGoodput:
    """A job's accounts, in seconds, by its groups."""

    job: str
    groups: Mapping[str, dict[Account, float]]

    @property
    def total(self) -> dict[Account, float]:
        """The accounts of all groups together."""
        return {account: sum(one[account] for one in self.groups.values()) for account in Account}

    @property
    def wall_s(self) -> float:
        """The time that the groups had."""
        return sum(self.total.values())

    @property
    def goodput(self) -> float:
        """Which part of it was productive."""
        return self.total[Account.PRODUCTIVE] / self.wall_s if self.wall_s else 0.0


def account_for(lines: Iterable[Line]) -> list[JobGoodput]:
    """Return the accounts of the jobs of which these are lines, in any order, by the jobs' names. Keeps no line."""
    jobs: dict[str, _Job] = defaultdict(_Job)
    for line in lines:
        jobs[line.job].take(line)
    return [JobGoodput(job=name, groups=job.groups()) for name, job in sorted(jobs.items())]


@dataclass(slots=True)
class _Job:
    """What was read of a job."""

    lives: dict[str, _Life] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    """When a life was seen to be lost the last time: it may have connected anew before."""
    end: float = float("-inf")

    def take(self, line: Line) -> None:
        self.end = max(self.end, line.time)
        if line.peer and line.event == "PeerLost":
            self.losses[line.peer] = max(line.time, self.losses.get(line.peer, line.time))
        life = self.lives.get(line.replica_id)
        if life is None or line.rank < life.rank:
            life = self.lives[line.replica_id] = _Life(line.replica_id, line.rank, line.time)
        if line.rank == life.rank:
            life.take(line)

    def groups(self) -> dict[str, dict[Account, float]]:
        lives = sorted(self.lives.values(), key=lambda life: life.began)
        by_group: dict[str, list[_Life]] = defaultdict(list)
        for life in lives:
            life.last = max(life.last, life.began)
            by_group[group_name(life.replica_id)].append(life)
        _find_lost(lives)
        return {group: _of_group(by_group[group], self.losses, self.end) for group in sorted(by_group)}


def _find_lost(lives: Sequence[_Life]) -> None:
    """Take from what is productive what a later quorum made again; `lives` as they began."""
    era, until = 0, float("-inf")
    for life in lives:
        era += life.began > until > float("-inf")
        life.era, until = era, max(until, life.last)
    steps = [(life.era, *step, life) for life in lives for step in life.steps]
    steps.sort(key=lambda one: one[:3], reverse=True)
    later, lowest, lowest_here = (-1, -1), float("inf"), float("inf")
    for era, quorum_id, number, seconds, life in steps:
        if (era, quorum_id) != later:  # the steps so far are of later quorums than this one
            later, lowest = (era, quorum_id), lowest_here
        lowest_here = min(lowest_here, number)
        if number >= lowest:
            life.seconds[Account.PRODUCTIVE] -= seconds
            life.seconds[Account.LOST] += seconds


def _of_group(lives: Sequence[_Life], losses: Mapping[str, float], end: float) -> dict[Account, float]:
    found, wall_s = dict.fromkeys(Account, 0.0), 0.0
    for life, later in zip(lives, [*lives[1:], None], strict=True):
        until_next = end if later is None else later.began
        lost_at = until = life.last
        is_lost = not life.how and (later is not None or life.replica_id in losses)
        if is_lost:
            lost_at = max(lost_at, min(losses.get(life.replica_id, lost_at), until_next))
            life.seconds[Account.DISCARDED] += lost_at - life.last
        if is_lost or (life.how == SHUT_DOWN and later is not None):
            until = max(until_next, lost_at)
            life.seconds[Account.DOWN] += until - lost_at
        wall_s += until - life.began
        for account, seconds in life.seconds.items():
            found[account] += seconds
    found[Account.UNACCOUNTED] += max(wall_s - sum(found.values()), 0.0)
    return found
