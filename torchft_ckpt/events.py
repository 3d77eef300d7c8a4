"""The events of a training process, for programs: `Manager(on_event=...)` gets each, in order, when the next step begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something happened at this replica group.

    Attributes:
        step: the number of the step that has ended; otherwise the committed steps of the state that the event is about.
        quorum_id: number of the quorum that the event is about; 0 before the first.
        replica_id: name of this run of the group.
    """

    step: int
    quorum_id: int
    replica_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted(Event):
    """The step counts.

    Attributes:
        num_participants: number of replica groups that contributed.
        took_s: seconds from `start_quorum` to the decision.
        spent: seconds of the training thread since the event of the step before, by account (see Operating, Goodput).
    """

    num_participants: int
    took_s: float
    spent: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDiscarded(Event):
    """The step does not count here: all groups discarded it, or the others committed it without this one.

    Attributes:
        reason: names the group at fault and its error.
        took_s: seconds from `start_quorum` to the decision.
        spent: as of `StepCommitted`.
    """

    reason: str
    took_s: float
    spent: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumChanged(Event):
    """Other groups train together than before, the same groups connect anew, or other groups of them contribute.

    Attributes:
        num_groups: members of the quorum.
        num_participants: number of members that contribute.
        participating_rank: this group's number among those; None if it contributes nothing, as a spare.
    """

    num_groups: int
    num_participants: int
    participating_rank: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLost(Event):
    """A group that trained with this one died, left, or connected anew in a step. If several did, the event names one.

    Attributes:
        peer: the other group's `replica_id`.
        reason: how the lighthouse knows of it.
    """

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Healed(Event):
    """The group has loaded the state of other groups; `step` is that of this state.

    Attributes:
        sources: the `replica_id` of each group that sent it.
        took_s: seconds of the transfer.
        received_bytes: what came from them; 0 if the transport does not say.
    """

    sources: tuple[str, ...]
    took_s: float
    received_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved(Event):
    """A save of this rank has ended well; `step` is that of the checkpoint. If the rank only looked on, it has seen it whole.

    Attributes:
        name: name of the checkpoint's directory.
        is_closed: this rank has seen that it is whole. False if the next save began before, or if only this host reads the files.
    """

    name: str
    is_closed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchDiffers(Event):
    """Groups that have computed one microbatch of a step have found other bits: see `check_microbatches_every` of `StepLoader`.

    Attributes:
        microbatch: its number in the step.
        groups: the `replica_id` of each group that has computed it.
        wrong: that of the one that differs from two others, which are equal; None if nobody can say who is right.
        first: the first parameter or buffer that differs.
    """

    microbatch: int
    groups: tuple[str, ...]
    wrong: str | None
    first: str
