"""What happened in a run, and the figures that follow from it. Pure: it knows no clock and no process.

All times are seconds of CLOCK_MONOTONIC; figures are durations.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from demo import events


class Phase(enum.Enum):
    """What a group is doing, as far as its events tell."""

    STARTING = "starting torch"
    JOINING = "joining"
    TRAINING = "training"
    FINISHED = "finished"
    DOWN = "down"


@dataclass(kw_only=True, slots=True)
class Life:
    """One life of a replica group, from the start of its process to its end."""

    group: int
    number: int
    spawned_s: float
    pid: int | None = None
    imported_s: float | None = None
    connected_s: float | None = None
    received_s: list[float] = field(default_factory=list)
    computed: list[events.Computed] = field(default_factory=list)
    steps: list[events.StepEnded] = field(default_factory=list)
    finished: events.Finished | None = None
    ended_s: float | None = None
    last_event_s: float = 0.0

    def record(self, event: events.Event) -> None:
        """Take in the next event of this life."""
        self.last_event_s = event.at_s
        match event:
            case events.Started():
                self.spawned_s, self.pid = event.at_s, event.pid
            case events.Imported():
                self.imported_s = event.at_s
            case events.Connected():
                self.connected_s = event.at_s
            case events.StateReceived():
                self.received_s.append(event.took_s)
            case events.Computed():
                self.computed.append(event)
            case events.StepEnded():
                self.steps.append(event)
            case events.Finished():
                self.finished = event

    @property
    def phase(self) -> Phase:
        """What this life is doing now."""
        if self.ended_s is not None:
            return Phase.FINISHED if self.finished is not None else Phase.DOWN
        if self.finished is not None:
            return Phase.FINISHED
        if self.imported_s is None:
            return Phase.STARTING
        return Phase.TRAINING if self.contributed_s is not None else Phase.JOINING

    @property
    def contributed_s(self) -> float | None:
        """When it first committed a step that held its own gradients; None while it has not."""
        return next((step.at_s for step in self.steps if step.committed and step.contributed), None)

    @property
    def last_step(self) -> int:
        """The last step that it committed, 0 before the first."""
        return self.steps[-1].step if self.steps else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One SIGKILL that was sent."""

    at_s: float
    group: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KillFigures:
    """What one kill cost; None where the run ended before it could be seen.

    `discarded` has each survivor's discarded steps until the next kill. `gap_s` is the longest time between two
    commits of a survivor up to the next kill, without those that end after the group's return began; `rejoin_gap_s`
    is the longest from then on. `start_s` is starting torch, model and data; `rejoin_s` from the line
    `Manager(...)` to the first commit that holds the group's own gradients.
    """

    group: int
    step: int
    at_s: float
    discarded: dict[int, int]
    gap_s: float | None
    rejoin_gap_s: float | None
    start_s: float | None
    rejoin_s: float | None
    rejoined_step: int | None


@dataclass(kw_only=True, slots=True)
class Timeline:
    """Everything that happened in a run, as it goes on."""

    num_groups: int
    started_s: float
    lives: list[Life] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def life_of(self, group: int) -> Life | None:
        """The newest life of a group."""
        return next((life for life in reversed(self.lives) if life.group == group), None)

    def lives_of(self, group: int) -> list[Life]:
        """All lives of a group, oldest first."""
        return [life for life in self.lives if life.group == group]

    @property
    def is_starting(self) -> bool:
        """Whether no group has imported torch yet."""
        return all(life.imported_s is None for life in self.lives)

    @property
    def newest_step(self) -> int:
        """The newest step that a group of now has committed; 0: none has."""
        newest = (self.life_of(group) for group in range(self.num_groups))
        return max((life.last_step for life in newest if life is not None), default=0)

    def left_s(self, num_steps: int) -> float | None:
        """How long the steps up to that one take, if they take as long as those until now; None: there are too few to tell."""
        ends = [(step.step, step.at_s) for life in self.lives for step in life.steps if step.committed]
        (first, began_s), (last, now_s) = min(ends, default=(0, 0.0)), max(ends, default=(0, 0.0))
        return max(0, num_steps - last) * (now_s - began_s) / (last - first) if last > first else None

    def contributing(self) -> dict[int, int]:
        """The last committed step of each group that trains now and whose last step held its gradients."""
        newest = (self.life_of(group) for group in range(self.num_groups))
        return {
            life.group: life.last_step
            for life in newest
            if life is not None and life.phase is Phase.TRAINING and life.steps[-1].contributed
        }


def measure_kills(timeline: Timeline) -> list[KillFigures]:
    """Return the figures of every kill, in order."""
    followed = pairwise([*timeline.kills, None])
    return [_measure_kill(timeline, kill, after.at_s if after else float("inf")) for kill, after in followed if kill]


def typical_step_s(timeline: Timeline) -> float | None:
    """The median time between two commits of a group; None if there were none."""
    gaps = [end - start for group in range(timeline.num_groups) for start, end in _commit_gaps(timeline, group)]
    return median(gaps) if gaps else None


def loss_curve(lives: Iterable[Life]) -> list[tuple[float, int, float]]:
    """Return (time, step, loss) of the committed steps that held the group's own gradients."""
    steps = [step for life in lives for step in life.steps if step.committed and step.contributed]
    return [(step.at_s, step.step, step.loss) for step in steps if step.loss is not None]


def final_loss(timeline: Timeline, *, num_steps: int = 50) -> float | None:
    """The mean loss of all groups over their last committed steps; None if there were none."""
    losses = [
        loss for group in range(timeline.num_groups) for _, _, loss in loss_curve(timeline.lives_of(group))[-num_steps:]
    ]
    return sum(losses) / len(losses) if losses else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What the committed steps were computed of, and their losses. Nothing of it depends on who was killed.

    `samples` and `losses` are digests, of the samples of each step and of all bits of its mean loss.
    """

    num_steps: int
    num_samples: int
    num_missing: int
    num_twice: int
    num_split: int
    samples: str
    losses: str

    @property
    def is_whole(self) -> bool:
        """Whether each step had each of its samples once, and one loss in all groups."""
        return not (self.num_missing or self.num_twice or self.num_split)

    def __str__(self) -> str:
        split = f", {self.num_split} steps with several losses" if self.num_split else ""
        missing, twice = self.num_missing or "none", self.num_twice or "none"
        return f"{self.num_samples} samples in {self.num_steps} steps: {missing} missing, {twice} twice{split}"


def keep_ledger(timeline: Timeline, *, num_in_step: int) -> Ledger:
    """Return the ledger of a run that has ended, of so many samples a step."""
    trained, maybe = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    losses, num_drawn_from = defaultdict[int, set[float]](set), 0
    for life in timeline.lives:
        num_drawn_from = num_drawn_from if life.finished is None else life.finished.num_samples
        counted = {step.step for step in life.steps if step.committed and step.contributed}
        of_step = defaultdict[int, dict[int, None]](dict)
        for computed in life.computed:
            of_step[computed.after + 1] |= dict.fromkeys(computed.samples)
        for step, samples in of_step.items():
            (trained if step in counted else maybe)[step] += samples
        for ended in life.steps:
            if ended.loss is not None:
                losses[ended.step].add(ended.loss)
    num_steps = max(losses, default=0)
    for step in range(1, num_steps + 1):  # who was killed after its vote could not say that its step counts
        trained[step] += {*maybe[step]} - {*trained[step]}
    lines = [f"{step} {sorted(trained[step])}" for step in range(1, num_steps + 1)]
    num_epochs = max(1, -(-num_steps * num_in_step // max(1, num_drawn_from)))
    often = Counter(sample for step in range(1, num_steps + 1) for sample in trained[step])
    return Ledger(
        num_steps=num_steps,
        num_samples=often.total(),
        num_missing=sum(max(0, num_in_step - len(trained[step])) for step in range(1, num_steps + 1)),
        num_twice=sum(max(0, count - num_epochs) for count in often.values()),
        num_split=sum(len(some) > 1 for some in losses.values()),
        samples=_digest(lines),
        losses=_digest([f"{step} {loss.hex()}" for step in sorted(losses) for loss in sorted(losses[step])]),
    )


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether all groups ended equal, with the sentence that says why."""

    is_bit_equal: bool
    reason: str
    step: int | None
    digests: dict[int, str]


def judge(timeline: Timeline, *, num_planned_kills: int) -> Verdict:
    """Compare the ends of all groups: same step, same digest, and every planned kill carried out."""
    ends = {
        group: life.finished for group in range(timeline.num_groups) if (life := timeline.life_of(group)) is not None
    }
    finished = {group: end for group, end in ends.items() if end is not None}
    digests = {group: end.digest for group, end in finished.items()}
    steps = sorted({end.step for end in finished.values()})
    missing = [group for group in range(timeline.num_groups) if group not in finished]
    if missing:
        reason = f"groups that never finished: {', '.join(map(str, missing))}"
    elif len(steps) > 1:
        reason = f"groups ended at different steps: {', '.join(map(str, steps))}"
    elif len(set(digests.values())) > 1:
        reason = f"groups ended at step {steps[0]} with {len(set(digests.values()))} different states"
    elif len(timeline.kills) < num_planned_kills:
        reason = f"only {len(timeline.kills)} of {num_planned_kills} planned kills were carried out"
    else:
        reason = (
            f"all {timeline.num_groups} groups ended bit-equal at step {steps[0]}, "
            f"after {len(timeline.kills)} kill{'' if len(timeline.kills) == 1 else 's'}"
        )
        return Verdict(is_bit_equal=True, reason=reason, step=steps[0], digests=digests)
    return Verdict(is_bit_equal=False, reason=reason, step=steps[0] if len(steps) == 1 else None, digests=digests)


def _measure_kill(timeline: Timeline, kill: Kill, until_s: float) -> KillFigures:
    survivors = [group for group in range(timeline.num_groups) if group != kill.group]
    reborn = next((life for life in timeline.lives_of(kill.group) if life.spawned_s >= kill.at_s), None)
    returned_s = reborn.imported_s if reborn is not None and reborn.imported_s is not None else until_s
    gaps = [gap for group in survivors for gap in _commit_gaps(timeline, group) if kill.at_s < gap[1] <= until_s]
    rejoined = next((step for step in reborn.steps if step.committed and step.contributed), None) if reborn else None
    return KillFigures(
        group=kill.group,
        step=kill.step,
        at_s=kill.at_s - timeline.started_s,
        discarded={
            group: sum(
                not step.committed
                for life in timeline.lives_of(group)
                for step in life.steps
                if kill.at_s <= step.at_s < until_s
                and life.contributed_s is not None
                and life.contributed_s <= step.at_s
            )
            for group in survivors
        },
        gap_s=_longest(gap for gap in gaps if gap[1] <= returned_s),
        rejoin_gap_s=_longest(gap for gap in gaps if gap[1] > returned_s),
        start_s=_difference(reborn.imported_s, reborn.spawned_s) if reborn else None,
        rejoin_s=_difference(rejoined.at_s, reborn.imported_s) if reborn and rejoined else None,
        rejoined_step=rejoined.step if rejoined else None,
    )


def _commit_gaps(timeline: Timeline, group: int) -> Sequence[tuple[float, float]]:
    """The (start, end) of the times between one commit and the next, within each life of a group."""
    gaps: list[tuple[float, float]] = []
    for life in timeline.lives_of(group):
        commits = [step.at_s for step in life.steps if step.committed and step.contributed]
        gaps += itertools.pairwise(commits)
    return gaps


def _longest(gaps: Iterable[tuple[float, float]]) -> float | None:
    return max((end - start for start, end in gaps), default=None)


def _difference(later_s: float | None, earlier_s: float | None) -> float | None:
    return None if later_s is None or earlier_s is None else later_s - earlier_s
