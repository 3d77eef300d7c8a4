"""The events of a training process, for programs: `Manager(on_event=...)` gets each, in order, when the next step begins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something happened at this replica group.

    Attributes:
        step: committed steps of the state that the event is about; of a step's end, the number of that step.
        quorum_id: of the quorum that the event is about; 0 before the first.
        replica_id: of this incarnation of the group.
    """

    step: int
    quorum_id: int
    replica_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCommitted(Event):
    """The step counts.

    Attributes:
        num_participants: replica groups that contributed to it.
        took_s: from `start_quorum` to the decision.
    """

    num_participants: int
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDiscarded(Event):
    """The step does not count here: it was discarded by all groups, or went on without this one.

    Attributes:
        reason: who is at fault, and with what.
        took_s: from `start_quorum` to the decision.
    """

    reason: str
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumChanged(Event):
    """Other groups train together than before, or the same ones have to connect anew, or other ones of them contribute.

    Attributes:
        num_groups: members of the quorum.
        num_participants: those of them that contribute.
        participating_rank: this group's number among those; None where it contributes nothing, as a spare.
    """

    num_groups: int
    num_participants: int
    participating_rank: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLost(Event):
    """A group that trained with this one was lost in a step: it died, left, or connected anew. Of several at once one is told.

    Attributes:
        peer: the other group's `replica_id`.
        reason: how the lighthouse knows.
    """

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Healed(Event):
    """The group has loaded the state of others; `step` is that state's.

    Attributes:
        sources: the `replica_id` of each group that it came from.
        took_s: of the transfer.
    """

    sources: tuple[str, ...]
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved(Event):
    """A save of this rank has ended well; `step` is the checkpoint's.

    Attributes:
        name: of the checkpoint's directory.
        is_closed: it was seen to be whole; False where the next save began before, or only this host can read what was written.
    """

    name: str
    is_closed: bool
