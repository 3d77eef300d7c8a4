"""The messages between ranks, groups and the lighthouse: typed, bounded, validated on decode.

Every message is a JSON object whose `type` names its class. A message that does not decode is a `ProtocolError` of the
peer that sent it, never an exception of another kind. Integers, texts and lists are bounded, so that no peer can make
another allocate at will.

Times on the wire are durations in seconds; no clock is ever compared across machines.

What one party says is sent on to others, and nobody can make the lighthouse, or a group, send something that the others
must refuse, because less is taken than is sent:
- steps and ids of who trains are taken below 2**53. What the lighthouse makes of them (the next step, the next quorum's id)
  may be larger, up to 2**62;
- a text that is quoted (a reason, a name) passes `clip`, after whatever was put before it;
- the addresses of a group are taken up to 256 KiB, in bytes of JSON: those of 64 ranks take 25. A message names at most four
  groups with them, so it has about 1 MiB at most, of 4 MiB that a receiver takes, however many groups there are.

Texts for people are made printable as they are taken, and a name that is not printable is not taken: an escape sequence or a
line that somebody forged reaches no terminal and no log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec

from torchft_ckpt.core.text import printable
from torchft_ckpt.errors import ProtocolError

PROTOCOL_VERSION = 17
SAME_EVERYWHERE = "install the same version of torchft_ckpt everywhere"
MAX_MESSAGE_BYTES = 4 << 20
MAX_TEXT_CHARS = 4096
MAX_QUOTE_CHARS = 600
MAX_ADDRESSES_BYTES = 256 << 10
"""For the addresses of a group's ranks, as JSON: 64 ranks with 4 KiB each, or 1,000 with 256 bytes."""
MAX_GROUPS = 65536
"""In a quorum."""
MIN_HEARTBEAT_TIMEOUT_S = 0.01
"""Three heartbeats are sent in that time."""
MAX_LEAVES = 4096
MAX_LEAF_CHARS = 120
MAX_TURNS = 32
MAX_NAMES_BYTES = 64 << 10
"""For each of the two lists of leaves that all members of a quorum are told, as JSON: some thousand names. A thousand members are
sent 125 MiB at most."""
MAX_NODES, MAX_MICROBATCHES = 64, 65536
MAX_NODES_TOLD = 1 << 14
"""To each member of a quorum, of all of them: 200 KiB of JSON. Where there are more, nobody's count."""

MAX_COUNT = (1 << 53) - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
"""A number that somebody says of himself."""
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""A number that may be made of somebody's `Count`."""
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_NOT_PRINTABLE = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"
)
ReplicaId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=rf"^[^{_NOT_PRINTABLE}]+\Z")]
"""It is compared, so it is not altered to be shown: control characters are refused, and what turns or hides text."""
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
StorePlace: TypeAlias = Annotated[str, msgspec.Meta(max_length=512, pattern=rf"^([^\s/{_NOT_PRINTABLE}]+:{_PORT})?\Z")]
"""`host:port`, or nothing."""
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
MeetingPlace: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
"""A word for a meeting beside a quorum that no other one has; empty: none."""
Addresses: TypeAlias = Annotated[list[Text], msgspec.Meta(max_length=65536)]
Issued: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=65536)]
"""How many collectives each rank of a group issued; one number: so many each. Of a rank: its own number."""
NumGroups: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUPS)]
ReplicaRank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2 * MAX_GROUPS)]
"""Those who learn beside a quorum come after its members."""
Digest: TypeAlias = Annotated[str, msgspec.Meta(max_length=32)]
CheckpointText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256, pattern=rf"^[^{_NOT_PRINTABLE}]*\Z")]
"""The name of a checkpoint: the later one's is the greater one."""
Damaged: TypeAlias = Annotated[dict[CheckpointText, Text], msgspec.Meta(max_length=64)]
"""By name, why; what is said of it is made printable where it is sent on."""
MAX_FAILED = 64
Microbatch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MICROBATCHES)]
Nodes: TypeAlias = Annotated[list[tuple[Microbatch, Microbatch]], msgspec.Meta(max_length=MAX_NODES)]
"""Runs of microbatches, each from the first to before the second, in ascending order: see `core.training.microbatches`."""


def _check_nodes(nodes: list[tuple[int, int]]) -> None:
    before = 0
    for first, end in nodes:
        if not before <= first < end:
            raise ValueError(f"`nodes` has ({first}, {end}) after one that ends at {before}")
        before = end


class StateVersion(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """Names one state of the model: two replicas with equal proven versions hold equal bits.

    `step` counts committed steps, `quorum_id` and `epoch` name the quorum in which the last of them was committed (or in
    which the first state was agreed on). `quorum_id` 0 is an unproven state: fresh weights, or a restored checkpoint.
    Versions of one step are ordered by quorum: the later quorum's is the one that the job went on with.
    """

    step: Number = 0
    quorum_id: Number = 0
    epoch: Annotated[str, msgspec.Meta(max_length=64)] = ""

    @property
    def proven(self) -> bool:
        return self.quorum_id > 0


class Role(str, Enum):
    """The part of a member of a quorum in this step."""

    HEALTHY = "healthy"
    """Holds the newest state, contributes, and its vote counts."""
    IDLE = "idle"
    """Must not heal in this step (`allow_heal=False`): contributes zeros, commits nothing, nobody waits for it."""
    LEARNER = "learner"
    """Is beside the quorum: in no collective and no majority, without a vote; it commits nothing, and nobody waits for it to ask.
    It receives a state (`follows`), or computes a step for itself."""


class Outcome(str, Enum):
    """The end of a step for one member."""

    COMMIT = "commit"
    DISCARD = "discard"
    LEFT_BEHIND = "left_behind"
    """The others committed, this member must not: it heals at a later quorum."""


class OnReplicasDiffer(str, Enum):
    """The policy for replica groups that were found equal since they came in, and differ now."""

    WARN = "warn"
    HEAL = "heal"
    """Those that are not right, by the rule of `trial`, load the state of those that are."""
    STOP = "stop"
    """None of those that were compared trains on."""


class Shows(str, Enum):
    """How much of its state a group shows with its next request, to have it compared with that of the others: see `trial`."""

    NOTHING = "nothing"
    SAMPLES = "samples"
    """All plain values, all small tensors, and samples of the large ones."""
    ALL = "all"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A group to recover from. `checkpoint_addresses` has one entry for each of its group ranks."""

    replica_id: ReplicaId
    replica_rank: ReplicaRank
    checkpoint_addresses: Addresses


# ---------------------------------------------------------------------------------------------- group -> lighthouse


class Leaf(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tensor or value of a state, or a run of them."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_LEAF_CHARS)]
    digest: Digest


Leaves: TypeAlias = Annotated[list[Leaf], msgspec.Meta(max_length=MAX_LEAVES)]
LeafNames: TypeAlias = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=MAX_LEAF_CHARS)]], msgspec.Meta(max_length=MAX_LEAVES)
]


class StateShown(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one rank shows of the state that it asks with."""

    is_sampled: bool = False
    """Of large tensors only samples were read: it says nothing beside a rank that has read all."""
    owned: Digest
    """Of what optimizers own, and of their settings."""
    common: Digest = ""
    """Of what else is known to be equal in all groups."""
    open: Leaves = []
    """Of the rest, where it is not known yet whether it has to be equal: each by itself."""
    num_still: Count = 0
    """So many of these, the last ones, have not moved since they were looked at first, or received: that they are equal says
    nothing."""
    own: Leaves = []
    """Of tensors that were found to be each group's own, those that a loop may have made equal since."""

    def __post_init__(self) -> None:
        if self.num_still > len(self.open):
            raise ValueError(f"`num_still` is {self.num_still} of {len(self.open)}")


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message on a connection, and what a lighthouse that lost its memory learns from."""

    protocol: Count
    replica_id: ReplicaId
    group_world_size: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1
    version: StateVersion = StateVersion()
    newest_step: Count = 0
    last_quorum_id: Count = 0
    last_quorum_size: Count = 0
    """0: it was beside that quorum, and has no part in how its steps end."""
    last_step: Count = 0
    last_epoch: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Which life of the lighthouse formed quorum `last_quorum_id`."""
    rolled_back_to: StateVersion = StateVersion()
    """The latest going back on purpose that this member knows of: see `Answer.rolled_back_to`."""
    last_outcome: Outcome | None = None
    """How the step `last_step` of quorum `last_quorum_id` ended here; None while it is open or in doubt."""
    checkpoint_addresses: Addresses = []
    """As in `QuorumRequest`, as far as they are known: whoever looks for the state may need them before the next one."""
    store_address: StorePlace = ""
    metrics_address: StorePlace = ""
    """Where its rank 0 serves metrics."""
    is_beside: bool = False
    """It is beside the quorum, a learner: nobody is to wait for it."""
    spare: bool = False
    """It follows the others, and takes the place of one that is lost."""
    init_sync: bool = True
    min_contributors: Count = 0
    """With fewer that contribute it votes against."""
    join_stall_limit_s: Seconds | None = None
    """How long, at most, all who come in may keep this member waiting in a row; None: there is no limit."""
    connects_beside: bool = False
    """Its process group can be connected beside the one that is in use: see `ConnectBeside`."""
    check_equal_every: Count = 0
    """The group votes with digests of its state after each committed step that this divides; 0: never."""
    on_replicas_differ: OnReplicasDiffer = OnReplicasDiffer.WARN
    speaks: bool = False
    """As in `QuorumRequest`."""

    @property
    def was_in_quorum(self) -> bool:
        """Whether it was in quorum `last_quorum_id`, not beside it."""
        return self.last_quorum_id > 0 and self.last_quorum_size > 0


class Heartbeat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Says that the sender lives; any other message says so too. One of several lighthouses answers with one, too."""

    number: Count = 0
    leads_for_s: Seconds | None = None
    """Of a lighthouse: no other one leads before this is over, counted from when the heartbeat that it answers was sent."""


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a group that lacks the newest state needs to have it."""

    reach_s: Seconds | None = None
    """How long it expects to need until it has received the state; None: it cannot say."""
    guesses: bool = False
    """It has measured no transfer yet: `reach_s` may be much longer."""
    can_follow: bool = False
    """It can receive a state outside of the quorum at the end of an iteration, while the others train on."""
    gains: bool = False
    """It is closer to theirs after that."""
    load_s: Seconds = 0.0
    """Seconds that loading took the last time."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a group trains."""

    digest: Word = ""
    """Of a rank: of its parameters: shapes, dtypes, boxes. Of a group: a word for that of all of its ranks."""
    text: Text | None = None
    """The parameters of group rank 0 in words; None: as in the last request on this connection."""
    frozen: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Which of them need no gradient, in words; empty: not known."""


class QuorumRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ready for the next step. Asking while a step is open abandons that step."""

    request_id: Count
    version: StateVersion
    restored: bool = False
    """The unproven `version` was loaded from a checkpoint on purpose."""
    torn: bool = False
    """The state is not whole (a load failed half-way, or the ranks of the group hold different states): nobody may train
    from it or be healed by it."""
    shrink_only: bool = False
    allow_heal: bool = True
    can_load: bool = True
    """False: no functions are registered that could load a state: it trains as long as it need not heal."""
    waits_for_quorum: bool = False
    """The training thread waits for the answer, so this member can load another state before its forward pass."""
    can_serve: bool = False
    """The state was captured on the training thread: it can be served without touching it again."""
    needs_new_quorum: bool = False
    speaks: bool = False
    """It was told that it speaks for the job, and may write until it votes in a step that makes another group the first."""
    issued: Issued = []
    """How many collectives it issued in the step before this one, with those after the decision."""
    contributes: bool = True
    """False: it did not train for this step, adds nothing to it, and takes its outcome."""
    patience_s: Seconds = 0.0
    """How long its own way to this step took: living members that are slower are waited for as long again."""
    warms_up: bool = False
    """Nothing of this step is to count: its loop may be in the middle of an iteration that began with another state."""
    came_in: bool = False
    """It was given its state by others, and has made no step since: that it is equal says nothing of its loop."""
    given_at: Count = 0
    """One more than the step with whose state it came in, however long ago; 0: it began the job, or has restored a checkpoint."""
    at_end: bool = False
    """An iteration of it has ended that did not count, and it lacks the newest state: it begins no step before it has that."""
    top_s: Seconds = 0.0
    """So long its training loop takes from the end of an iteration to the next step; 0: not known."""
    kinds: Annotated[list[Word], msgspec.Meta(max_length=MAX_TURNS)] = []
    """Which of its optimizers have ended each of its last steps, or tried to, the newest one last; with `at_end` that is the
    iteration that ends. A loop may have a step for each of several in turn."""
    need: Need = Need()
    stood_s: Seconds = 0.0
    """Its training thread has just stood still for so long to capture and show the state, for those who come in."""
    nodes: Nodes = []
    """What it has computed, in an earlier attempt, of the step that it asks for, or begins with; of a group: what all of its
    ranks have."""
    layout: Layout = Layout()
    shown: Annotated[list[StateShown], msgspec.Meta(max_length=65536)] = []
    """One of each rank, where the state is to be compared with that of the other groups before the quorum forms; it is served
    to them meanwhile."""
    checkpoint_addresses: Addresses | None = None
    """One for each group rank; None: as in the last request on this connection."""

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)


class Receives(str, Enum):
    """A member that lacks the state does this with it."""

    TRANSFER = "transfer"
    LOADS = "loads"
    NOTHING = "nothing"
    """It has received the state outside of the quorum, and keeps it: a spare."""


class JoinProgress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A member that receives and loads a state says how long it still needs.

    0: it has received all of it, and loads it later; or it has loaded it.
    """

    quorum_id: Count
    step: Count
    reach_s: Seconds
    does: Receives = Receives.TRANSFER
    done_bytes: Count = 0
    """Of `total_bytes` so many are here and right; of a group: of all its ranks."""
    total_bytes: Count = 0
    takes: Text = ""
    """What takes so long, in words, where it is no transfer."""


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """What a group says that starts without a state, again and again until it has one, or knows that there is none."""

    readable: CheckpointText = ""
    """The newest checkpoint that it can read whole; empty: none."""
    holds: CheckpointText = ""
    """The checkpoint of which it has the state, whole, that of `LocateState.version`, and serves it; empty: none."""
    place: Word = ""
    """In words, where it has that from, or can read it."""
    damaged: Damaged = {}
    """Checkpoints in the storage that all groups see, of which the bytes are not those that were written; and why."""
    failed: Annotated[list[ReplicaId], msgspec.Meta(max_length=MAX_FAILED)] = []
    """Groups that were to give it a state, and have not."""
    named: CheckpointText = ""
    """The newest that it has heard of, whoever can read it: a lighthouse that has started again hears of it by this."""
    is_at_work: bool = False
    """It reads, or receives, what it was told to."""
    done_bytes: Count = 0
    """With `is_at_work`: grows for as long as that goes on."""
    checkpoint_addresses: Addresses = []
    """One for each group rank."""


class LocateState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks where the newest state is, between steps and outside of quorums; a step that is open is abandoned."""

    request_id: Count
    version: StateVersion
    """What the asker holds; unproven where it holds nothing whole."""
    has_finished: bool = False
    """The asker has made its last step."""
    hands_over: bool = False
    """The asker stands still until somebody has taken its state over."""
    takes_over: bool = False
    """The asker goes on alone from the state of one that stands still for it, and from no other."""
    starts: Starts | None = None
    """Set while the asker starts."""


class CommitVote(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Whether the step may count, from one rank to its group and from one group to the lighthouse."""

    quorum_id: Count
    epoch: Annotated[str, msgspec.Meta(max_length=64)]
    step: Count
    approve: bool
    broken: bool = False
    """The collectives of this quorum cannot be used again."""
    counts: bool = True
    """False from one that sits out: nobody's commit depends on it."""
    num_voters: Count = 0
    """Votes that count in this quorum, as it was formed."""
    collectives: Word = ""
    """Of a rank: a digest of the step's collectives in their order. Of a group: a word for those of all of its ranks."""
    issued: Issued = []
    """How many they are."""
    state_digests: Annotated[list[Digest], msgspec.Meta(max_length=65536)] = []
    """Of a rank: one digest of the state that the step began with, where that is to be compared. Of a group: one for each of
    its
    ranks; empty where one of them has none."""
    connects: bool = True
    """False: the members of the quorum could not connect to each other, so its process group was not made."""
    computed_s: Seconds = 0.0
    """For so long it has computed in the step while none of its collectives was open. Of a group: its slowest rank."""
    reduced_s: Seconds = 0.0
    """For so long a collective was open. Of a group: of the rank that came last."""
    reason: Text = ""
    """Why it does not approve; of one that approves, what was found of how the groups compute: see `equality`."""


class ConnectedBeside(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to `ConnectBeside`, from one rank to its group and from one group, with all of its ranks, to the lighthouse."""

    place: MeetingPlace
    failure: Text = ""
    """Why the process group could not be made there; empty: it is."""


class CollectiveWait(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank waits in a collective of the step for longer than usual, or asks whether it may start one: see `sequence`.

    Those between the decision and the next request are of the step too; they are counted on.
    """

    quorum_id: Count
    step: Count
    group_rank: Count = 0
    index: Count
    """Which collective of the step, counted from 0."""
    digest: Word
    """Of the step's collectives up to this one."""
    deviates: bool = False
    """It has not started: in earlier steps another one came here. The lighthouse answers with `CollectiveCleared`."""
    what: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The collective in words, for the operator."""


class LeafDigests(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to `LeavesWanted`, as far as the digests are still known."""

    version: StateVersion
    group_rank: Count = 0
    leaves: Leaves = []


class LostAsked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Which of the groups that contributed to the step that led to the state `version` are gone? Asked for its checkpoint."""

    version: StateVersion


class LeaveWish(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The sender wants to leave, and to lose nothing by it: after the step that is open, or the next one.

    From a rank it is the wish of its group. The lighthouse answers by `leaving` in the group's next decision, or in the answer to
    a request that would wait: only it knows whether the others count on this group. The lighthouse sends it to a group after a
    `Drain`: the group repeats it to a lighthouse that was restarted.
    """

    is_told: bool = False
    """It was answered before, and the sender begins no step any more."""
    issued: Issued = []
    """With `is_told`, where the sender issues no collective of its last step any more: how many it issued."""
    reason: Text = ""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The sender goes on purpose."""

    reason: Text = ""
    as_wished: bool = False
    """After a `LeaveWish` of its group, and for all of it."""


class AllowStepLoss(msgspec.Struct, frozen=True, tag=True):
    """The operator's word that the job may go on from an older state than the newest one committed, also where it is finished.

    Answered by `Done`.
    """


class ForgetJob(msgspec.Struct, frozen=True, tag=True):
    """The operator's word that nobody of this job comes back. Answered by `Done`."""


class Drain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The operator's word that a replica group is to leave, as after a `LeaveWish` of its own. Answered by `Done`."""

    replica_id: ReplicaId
    """With or without what stands behind its last colon."""


# ---------------------------------------------------------------------------------------------- lighthouse -> group


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to `Hello`."""

    protocol: Count
    epoch: Annotated[str, msgspec.Meta(max_length=64)]
    heartbeat_timeout_s: Annotated[float, msgspec.Meta(ge=MIN_HEARTBEAT_TIMEOUT_S, le=1e9)]
    store_address: StorePlace = ""
    """Where the present quorum meets: connect before asking, connecting can be slow."""
    fence: Count = 0
    """Of the lease by which this lighthouse leads, higher than those of all before; 0: it is the only one."""
    leads_for_s: Seconds | None = None
    """As in `Heartbeat`; None: it is the only one."""


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The sender closes after this; trying again unchanged cannot help."""

    code: Annotated[str, msgspec.Meta(max_length=64)]
    """`finished`: the job is over, at `step`. `standby`: another lighthouse leads, or none does; ask the next one."""
    reason: Text
    step: Number = 0


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The operator's request is carried out. `text`: what follows from it."""

    text: Text


class QuorumPending(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Says why there is no quorum yet."""

    reason: Text
    waited_s: Seconds
    held_s: Seconds = 0.0
    """The quorum could form, and is held for groups that come in: for so long from now, unless something else is said before, the
    receiver's time to wait for a quorum stands still."""
    is_below_minimum: bool = False
    """Fewer groups live than may train."""


class LeavesFound(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of leaves that were shown by themselves, after a step."""

    common: LeafNames = []
    """They are equal in all groups, and are to be equal from now on."""
    own: LeafNames = []
    """They differed although all was equal before the step: each group has its own."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the members of a quorum meet."""

    store_address: StorePlace
    place: MeetingPlace = ""
    """These very members have been connected beside the quorum before, as `ConnectBeside` said: their process group is made."""
    standby_store_address: StorePlace = ""
    """Where the next quorum meets if the host of this one's store is lost: connect now, it will be wanted at once."""


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers to a request for a step have in common. Their size does not depend on the number of members."""

    request_id: Count
    quorum_id: Number
    """Of the quorum, or of the last one."""
    epoch: Annotated[str, msgspec.Meta(max_length=64)]
    version: StateVersion
    """The state that all members train from."""
    replica_world_size: NumGroups = 0
    num_contributors: NumGroups = 0
    newest_step: Number = 0
    """The newest step apart from states that were not committed in this life of the lighthouse: it may be below `version`."""
    rolled_back_to: StateVersion = StateVersion()
    """The job went back on purpose to this step in this quorum: later steps of earlier quorums are void."""
    reason: Text = ""

    # What is so unless an answer says otherwise.
    role = Role.LEARNER
    contributor_rank = cast("int | None", None)
    replica_rank = num_proved = num_voters = 0
    patience_s = 0.0
    destinations = cast("list[int]", [])
    sources = cast("list[Source]", [])
    leaves = LeavesFound()
    nodes = cast("list[Nodes | None]", [])
    why = cast("Given | None", None)
    names_state = warms_up = leaving = False

    @property
    def follows(self) -> bool:
        """It is given a state, computes no step with that, and asks again."""
        return self.why not in (None, Given.TO_LEARN)

    @property
    def held(self) -> bool:
        """The quorum is held until it has that state."""
        return self.why is Given.TO_COME_IN

    @property
    def differs(self) -> bool:
        """What it holds under that name is another state: the others wait until it has theirs."""
        return self.why is Given.TO_CORRECT


class QuorumFormed(_Answer, frozen=True, tag=True, kw_only=True):
    """A quorum: one member's view of its step."""

    role: Role
    replica_rank: ReplicaRank
    contributor_rank: ReplicaRank | None
    """Rank among those that contribute gradients, None for those that do not. One that came in for this step comes last."""
    num_proved: NumGroups = 0
    """So many of them, the first ones, did not come in for this step: if there are any, no other one counts as a holder of what
    comes of it, or writes a checkpoint of that, before it is compared."""
    num_voters: NumGroups
    meets: Meeting
    destinations: Annotated[list[ReplicaRank], msgspec.Meta(max_length=65536)] = []
    """Replica ranks beside the quorum that this member has to serve."""
    patience_s: Seconds = 0.0
    """The longest that a member's way to this step took: so long, too, the others may take from here on."""
    leaves: LeavesFound = LeavesFound()
    names_state: bool = False
    """`version` is a new name: a healthy member gives it to the state of that step that it holds."""
    nodes: Annotated[list[Nodes | None], msgspec.Meta(max_length=MAX_GROUPS)] = []
    """`QuorumRequest.nodes` of each member, in the order of replica ranks; None for one that does not contribute. Empty: all
    contribute, and none of them has computed anything; or a step counts, and the next one begins in the same quorum."""

    def __post_init__(self) -> None:
        if self.role is Role.LEARNER:
            raise ValueError("`role` is that of one that is in no quorum")
        if self.replica_rank >= self.replica_world_size:
            raise ValueError(f"`replica_rank` is {self.replica_rank} in a quorum of {self.replica_world_size}")
        if self.contributor_rank is not None and self.contributor_rank >= self.num_contributors:
            raise ValueError(f"`contributor_rank` is {self.contributor_rank} of {self.num_contributors}")
        if self.num_proved > self.num_contributors:
            raise ValueError(f"`num_proved` is {self.num_proved} of {self.num_contributors}")
        if not isinstance(self.nodes, list):
            return  # as it is encoded
        if self.nodes and len(self.nodes) != self.replica_world_size:
            raise ValueError(f"`nodes` has those of {len(self.nodes)} in a quorum of {self.replica_world_size}")
        if sum(len(nodes or ()) for nodes in self.nodes) > MAX_NODES_TOLD:
            raise ValueError(f"`nodes` has more than {MAX_NODES_TOLD}")
        for nodes in self.nodes:
            _check_nodes(nodes or [])


class Given(str, Enum):
    """Why a group is given a state outside of the quorum. But for the first it computes no step with it, and asks again."""

    TO_LEARN = "to learn"
    """It is of another layout, and is to know at which step the others are: it computes a step for itself alone."""
    TO_FOLLOW = "to follow"
    """It is further behind than a step; the others train on meanwhile."""
    TO_STAY = "to stay"
    """So is a spare, which keeps what it has received until it hears `Needed`."""
    TO_COME_IN = "to come in"
    """The others have asked for the step that begins with that state, and wait until this group has it and asks for it, too."""
    TO_CORRECT = "to correct"
    """What it holds under that name is another state than that of the others, which wait for it."""


class StateGiven(_Answer, frozen=True, tag=True, kw_only=True):
    """No quorum: receive and load the state `version` from `sources`."""

    why: Given
    sources: Annotated[list[Source], msgspec.Meta(min_length=1, max_length=64)]
    leaves: LeavesFound = LeavesFound()
    names_state: bool = False
    """`version` is that of the job's first state, and the receiver's loop has computed nothing before, and read no other step."""


class StepAlone(_Answer, frozen=True, tag=True, kw_only=True):
    """No quorum: compute one step for yourself alone; nothing of it counts."""

    leaving: bool = False
    """Then leave: no other step begins."""
    warms_up = True


Answer: TypeAlias = QuorumFormed | StateGiven | StepAlone


class Start(str, Enum):
    """What a group that starts is to do. The last two end its start."""

    MEETS = "meets"
    """Ask again: not all are here that may come."""
    WAITS = "waits"
    """Ask again: another group is at work, which is looked after."""
    READS = "reads"
    """Read its newest checkpoint, and say so."""
    RECEIVES = "receives"
    """Receive the state `version` from `sources`, who start as it does, and say so."""
    BEGINS = "begins"
    """Begin with what it has: all have that, or nobody can read anything. Not without a state beside what is `named`."""
    HEALS = "heals"
    """Begin: others train from `version`, or are about to, and it heals from them."""


class StartTold(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Starts`."""

    does: Start
    damaged: Damaged = {}
    """Leave these out as well, as others have found, and ask again."""
    checkpoint: CheckpointText = ""
    """Of which the state is that it is to receive."""
    place: Word = ""
    """In words, where the sources had that from."""
    named: CheckpointText = ""
    """The newest that any group has said it can read, also one that is gone; empty: there is none, it is damaged, or the operator
    allows the loss of steps."""
    num_groups: NumGroups = 0
    """So many start together."""
    reason: Text = ""


class StateLocated(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to `LocateState`, at once."""

    request_id: Count
    version: StateVersion = StateVersion()
    """The newest state that a living member is known to hold. Unproven: there is none, or only older ones than were
    committed."""
    is_held: bool = False
    """The asker, with all of its ranks, holds it."""
    is_finished: bool = False
    """It is the last one: a group that holds it has finished, and no others go on from it."""
    sources: Annotated[list[Source], msgspec.Meta(max_length=64)] = []
    """Who else holds it; empty where no address is known. For one that takes over: who hands it over."""
    taken_by: Text = ""
    """Who has taken it over; empty: nobody."""
    rolled_back_to: StateVersion = StateVersion()
    """As in `Answer`."""
    starts: StartTold | None = None
    """To one that starts; the rest is said of what it is told to do."""


MAX_NAMED = 64


class LostTold(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to `LostAsked`, at once, where the lighthouse remembers that step. All ranks of a group are told."""

    version: StateVersion
    contributors: Annotated[list[ReplicaRank], msgspec.Meta(max_length=MAX_GROUPS)] = []
    """The numbers that those who are gone had among the contributors."""
    group_names: Annotated[list[ReplicaId], msgspec.Meta(max_length=MAX_NAMED)] = []
    """The names of the first contributors, by number, without their incarnations."""


class JoinerWaiting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A group that lacks the state is about to ask: capture it at the next step boundary."""

    num_held: NumGroups = 0
    """The quorum that the receiver has asked for is held until so many groups have its state: it serves that to them now."""
    request_id: Count = 0
    names: StateVersion = StateVersion()
    """If it is proven: the state with which the receiver has asked so is the job's first one, and has this name now."""


class ConnectBeside(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Connect with these members beside the quorum that is at work: one of them is new, and in no quorum before that went well.

    Answered by `ConnectedBeside`. What was connected so before is given up.
    """

    place: MeetingPlace
    replica_rank: ReplicaRank
    replica_world_size: NumGroups
    store_address: StorePlace

    def __post_init__(self) -> None:
        if self.replica_rank >= self.replica_world_size or not self.store_address:
            raise ValueError(
                f"rank {self.replica_rank} of {self.replica_world_size} is to meet at {self.store_address!r}"
            )


class Needed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One of those who train was lost, or another rank of its group asks: the receiver, a spare, asks when it has a state."""

    reason: Text = ""


class CommitDecided(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The one decision on a step, for one member."""

    quorum_id: Number
    epoch: Annotated[str, msgspec.Meta(max_length=64)]
    step: Number
    outcome: Outcome
    broken: bool = False
    """The collectives of this quorum cannot be used any more, not even between this step and the next one."""
    shows: Shows = Shows.NOTHING
    """With its next request this member shows its state."""
    leaving: bool = False
    """This member leaves after this step, as it wished or was asked to: the others do not wait for it any more."""
    all_leave: bool = False
    """So do all that contributed to the step, and all of these commit it."""
    speaks: bool = False
    """This member speaks for the job from here on: what all groups would write, it writes."""
    silent_for: Text = ""
    """This member would speak, but for this other one, which did so last and may still write."""
    reason: Text = ""


class LetGo(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The receiver may leave as it wished: it has no step open, has not asked for one for a while, and nobody waits for it."""

    reason: Text = ""


class LeavesWanted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The digests of a state differ: say which of its tensors and values have which digest. Answered by `LeafDigests`."""

    version: StateVersion
    group_rank: Count


class ReplicasDiffer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Replica groups hold different states under the name `version`."""

    version: StateVersion
    stops: bool = False
    """None of those that hear this trains on."""
    reason: Text
    """Which groups, and in which tensors or values."""


class QuorumBroken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The collectives of this quorum cannot finish: abort what is in flight."""

    quorum_id: Number
    replica_id: ReplicaId
    """The member on whose account it broke."""
    lost: bool
    """That member is gone (else it gave the step up)."""
    reason: Text


class CollectiveCleared(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All members ask to start the same collective: start it."""

    quorum_id: Number
    step: Number
    group_rank: Count
    index: Count


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """This incarnation was taken for dead, or sent too much; it may connect again and will be told what to do."""

    reason: Text


# ---------------------------------------------------------------------------------------------- rank <-> group


class RankHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message of a rank to its group's manager service."""

    protocol: Count
    group_rank: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class CommitUnknown(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank does not want to wait for the decision any longer. It is answered by `CommitDecided`, or all ranks of its group by
    `CommitUnknown`: the group waits no longer, and no rank steps its optimizer, whatever is decided.

    No rank may give up alone: another could hear of a commit in the same moment, and the group would be torn apart.
    """

    quorum_id: Count
    epoch: Annotated[str, msgspec.Meta(max_length=64)]
    step: Count
    reason: Text = ""


class StateArrived(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank has fetched all of the state that the quorum of its request names, or holds it already. When each has, each is told
    so: all that have fetched it load it, also those that hold the same bits already, if any rank `loads`."""

    request_id: Count
    failure: Text = ""
    """Why it will not have it; to all: why none of them loads it."""
    loads: bool = False
    """It loads that state; of one that compares, because it came to another one."""
    again: bool = False
    """It has loaded that state, and its next step begins: it puts back what its loop has changed since, if `loads`."""


class RankWord(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank tells all ranks of its group something; when each has, each is told by a `RankWord` what all of them have said."""

    number: Count
    """Which of the rank's words it is, or answers."""
    words: Annotated[list[Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]], msgspec.Meta(max_length=65536)]
    """Its own; in the answer all of them, in the order of ranks."""
    failure: Text = ""
    """In the answer: why not all ranks will say something."""


class LeaveAt(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to `LetGo`: in this call of `Manager.should_leave` a rank waits, if it comes so far before. When each has said so,
    each is told in which call all leave, or at the first one after it that is between two steps."""

    call: Count


class GroupBroken(msgspec.Struct, frozen=True, tag=True):
    """A rank is gone: the group has left the quorum and must be restarted as a whole."""

    reason: Text
    has_left: bool = False
    """It has left on purpose, with all of its ranks."""


_OfBoth: TypeAlias = (
    Heartbeat
    | QuorumRequest
    | LocateState
    | CommitVote
    | JoinProgress
    | ConnectedBeside
    | CollectiveWait
    | LeafDigests
    | LostAsked
    | LeaveWish
    | Leave
)
"""A rank says it to its group, and the group, for all of its ranks, to the lighthouse."""
ToLighthouse: TypeAlias = Hello | _OfBoth | AllowStepLoss | ForgetJob | Drain
_AmongRanks: TypeAlias = CommitUnknown | StateArrived | RankWord | LeaveAt
"""A rank says it to its group, and that to all of its ranks."""
RankToGroup: TypeAlias = _OfBoth | _AmongRanks
_ToBoth: TypeAlias = (
    Refused
    | QuorumPending
    | Answer
    | StateLocated
    | LostTold
    | JoinerWaiting
    | ConnectBeside
    | Needed
    | CommitDecided
    | QuorumBroken
    | CollectiveCleared
    | LetGo
    | LeavesWanted
    | ReplicasDiffer
)
"""The lighthouse says it to a group, and that to its ranks."""
FromLighthouse: TypeAlias = Welcome | Heartbeat | Done | _ToBoth | LeaveWish | Dropped
GroupToRank: TypeAlias = _ToBoth | _AmongRanks | GroupBroken
Message: TypeAlias = ToLighthouse | FromLighthouse | RankHello | RankToGroup | GroupToRank

_FOR_PEOPLE = {
    "reason": MAX_TEXT_CHARS,
    "text": MAX_TEXT_CHARS,
    "failure": MAX_TEXT_CHARS,
    "frozen": 256,
    "what": 256,
    "code": 64,
}
"""Fields whose text people read, with the most characters of each."""
_Taken = TypeVar("_Taken", bound="ToLighthouse | RankToGroup")

_encoder = msgspec.json.Encoder()


def encode(message: Message) -> str:
    """Return the message as JSON text. What is long and the same for all who are told it is encoded once: the addresses of a
    source, names of leaves, and nodes."""
    if isinstance(message, Answer) and (message.leaves.common or message.leaves.own):
        message = msgspec.structs.replace(message, leaves=_encoded(message.leaves))
    if isinstance(message, QuorumFormed) and message.nodes:
        message = msgspec.structs.replace(message, nodes=_encoded(message.nodes))
    if sources := getattr(message, "sources", None):
        told = [
            msgspec.structs.replace(one, checkpoint_addresses=_encoded(one.checkpoint_addresses)) for one in sources
        ]
        message = msgspec.structs.replace(message, sources=told)
    return _encoder.encode(message).decode()


_latest_encoded: dict[int, tuple[object, msgspec.Raw]] = {}


def _encoded(said: object) -> msgspec.Raw:
    """Return what nobody changes as JSON; the few latest ones are kept, each with what it is of."""
    known = _latest_encoded.get(id(said))
    if known is None:
        if len(_latest_encoded) >= 8:
            _latest_encoded.clear()
        known = _latest_encoded[id(said)] = said, msgspec.Raw(_encoder.encode(said))
    return known[1]


def size_of(texts: list[str]) -> int:
    """Return how many bytes of a message a group's addresses, or names, take."""
    return len(_encoder.encode(texts))


def _decoder_of(messages: Any, *, is_sent_on: bool = False) -> Callable[[str | bytes, str], Any]:
    """Return what decodes messages of these classes from a party, whom its `ProtocolError` names."""
    decoder = msgspec.json.Decoder(messages)

    def decode(data: str | bytes, party: str) -> Any:
        message = _decode(decoder, data, party)
        return _bounded(message, party) if is_sent_on else message

    return decode


def _decode(decoder: msgspec.json.Decoder[Any], data: str | bytes, party: str) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{party} sent {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are read", party=party)
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        text, _, place = clip(str(error)).rpartition(" - at ")
        if "matching regex" in text:
            text = "a name that is not printable, or a store's address that is not HOST:PORT"
        text = f"{text} - at {place}" if text else place
        raise ProtocolError(f"{party} sent a message that cannot be read: {text}", party=party) from error
    if isinstance(message, QuorumRequest) and (layout := _printable(message.layout)) is not message.layout:
        message = msgspec.structs.replace(message, layout=layout)
    return _printable(message)


def _printable(said: Any) -> Any:
    """Return what somebody said, with what people read of it made printable."""
    for name, most in _FOR_PEOPLE.items():
        text = getattr(said, name, None)
        if isinstance(text, str) and not text.isprintable():
            said = msgspec.structs.replace(said, **{name: clip(text, most)})
    return said


def _bounded(message: _Taken, party: str) -> _Taken:
    """Return what was said to somebody who sends it on; ProtocolError where it leaves no room for what becomes of it."""
    for name in ("version", "rolled_back_to"):
        version = getattr(message, name, None)
        if isinstance(version, StateVersion) and max(version.step, version.quorum_id) >= 1 << 53:
            raise ProtocolError(
                f"{party} sent a `{name}` of step {version.step} and quorum {version.quorum_id}; both have to be below 2**53",
                party=party,
            )
    addresses = getattr(message, "checkpoint_addresses", None)
    if addresses and (num_bytes := size_of(addresses)) > MAX_ADDRESSES_BYTES:
        raise ProtocolError(
            f"{party} sent {num_bytes} bytes of `checkpoint_addresses`, at most {MAX_ADDRESSES_BYTES} are taken of one group",
            party=party,
        )
    return message


decode_to_lighthouse: Callable[[str | bytes, str], ToLighthouse] = _decoder_of(ToLighthouse, is_sent_on=True)
decode_from_lighthouse: Callable[[str | bytes, str], FromLighthouse] = _decoder_of(FromLighthouse)
decode_rank_to_group: Callable[[str | bytes, str], RankToGroup] = _decoder_of(RankToGroup, is_sent_on=True)
decode_rank_hello: Callable[[str | bytes, str], RankHello] = _decoder_of(RankHello)
decode_group_to_rank: Callable[[str | bytes, str], GroupToRank] = _decoder_of(GroupToRank)


class _First(msgspec.Struct):
    """A first message of any version: a JSON object with the number in `protocol`, for ever."""

    protocol: Count
    replica_id: Any = None


_first_decoder = msgspec.json.Decoder(_First)


def other_version(data: str | bytes) -> tuple[int, str] | None:
    """Return the version that a first message is of, and the replica id in it, where that is not ours; else None."""
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        first = _first_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if first.protocol == PROTOCOL_VERSION:
        return None
    return first.protocol, clip(first.replica_id, 200) if isinstance(first.replica_id, str) else ""


def last_answer(
    request: QuorumRequest,
    *,
    quorum_id: int,
    epoch: str,
    reason: str,
    newest_step: int = 0,
    rolled_back_to: StateVersion | None = None,
) -> StepAlone:
    """Return the answer to the request of a group, or of one of its ranks, that leaves: no other step begins."""
    return StepAlone(
        request_id=request.request_id,
        quorum_id=quorum_id,
        epoch=epoch,
        version=request.version,
        newest_step=newest_step,
        rolled_back_to=rolled_back_to or StateVersion(),
        leaving=True,
        reason=reason,
    )


def refuse_version(ours: str, theirs: str, protocol: int) -> Refused:
    """Return what to answer to a party that speaks another version of the protocol; both are named, as in "the lighthouse"."""
    reason = f"{ours} speaks protocol {PROTOCOL_VERSION}, {theirs} speaks {protocol}; {SAME_EVERYWHERE}"
    return Refused(code="version", reason=reason)


def refuse_unreadable(data: str | bytes, error: ProtocolError, *, ours: str, party: str) -> Refused:
    """Return what to answer to a message that cannot be read: by both versions, where its is another.

    Args:
        data: the message.
        error: what is wrong with it.
        ours: who we are, as in "the lighthouse".
        party: who sent it.
    """
    other = other_version(data)
    if other is None:
        return Refused(code="protocol", reason=str(error)[:1000])
    version, name = other
    return refuse_version(ours, f"{name} ({party})" if name else party, version)


def group_name(replica_id: str) -> str:
    """Return the name that a replica group keeps over its incarnations: what stands before the last colon."""
    return replica_id.rpartition(":")[0] or replica_id


def group_label(replica_id: str) -> str:
    """Return the same for metrics: `unnamed` for all groups without a name, which have another id in each life."""
    return replica_id.rpartition(":")[0] or "unnamed"


def clip(text: str, most: int = MAX_QUOTE_CHARS) -> str:
    """Return the text, printable, and shortened to `most` characters if it is longer."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def name_some(names: Iterable[str], most: int = 5) -> str:
    """Return the first few names, each shortened, and how many more there are."""
    listed = list(names)
    shown = ", ".join(clip(name, 100) for name in listed[:most])
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most} more"
