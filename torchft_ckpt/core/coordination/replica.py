"""The life of one rank's step: which state it holds, and whether it may contribute, vote and commit.

It knows no tensors, threads, sockets or clock. The manager drives it with what happens and does what it says; the
simulation drives it in the same way.

`StepPhase` says which phases a step has, `StepEvent` what leads from one to the other and what follows, and `TRANSITIONS` where
to. `ReplicaState.validate` says what holds between two events.

Rules that hold in every phase: the version moves only together with the state that it names, or ahead of it from the decision
until the optimizers have stepped, when `held` is another than it; a replica whose version is
not its quorum's neither contributes nor approves; a decision on another step than the open one changes nothing; a torn
state has no name until a whole one is loaded over it.

A training loop uses what it finds in the state between `begin` and `vote`: to clip, to unscale, to decay weights. So who lacks
the newest state is in no quorum: it computes an iteration for itself alone, receives the state at the end of that, and asks for
the next step with its name. All groups show their state when they ask after the first step of one that came in (`shows`). If
it is equal, it is as all others; if not, it loads that of the others first: see `trial`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from torchft_ckpt.core.coordination.equality import is_checked
from torchft_ckpt.core.coordination.messages import (
    MAX_NODES,
    PROTOCOL_VERSION,
    Answer,
    CommitDecided,
    CommitVote,
    Hello,
    JoinerWaiting,
    LocateState,
    Need,
    OnReplicasDiffer,
    Outcome,
    QuorumBroken,
    QuorumRequest,
    Role,
    Shows,
    StateLocated,
    StateShown,
    StateVersion,
)


class StepPhase(Enum):
    """The phases of a step."""

    IDLE = "idle"
    ASKING = "asking"
    TRAINING = "training"
    VOTED = "voted"


class StepEvent(Enum):
    """What `ReplicaState` is told that depends on the phase, by its method, and what follows."""

    BEGIN = "begin"
    """Send the returned `QuorumRequest`. The step that was open is abandoned: ask `keeps_step` before."""
    LOCATE = "locate"
    """Send the returned `LocateState`. The step that was open is abandoned."""
    FORMED = "formed"
    """Configure, serve and load as the returned `StepPlan` says."""
    CANNOT_CONNECT = "cannot_connect"
    """Say in the vote that the process group could not be made."""
    OVERTAKEN = "overtaken"
    """The step cannot count."""
    BROKEN = "broken"
    """Abort what is in flight. The step cannot count if it was not voted on, and else stands."""
    VOTE = "vote"
    """Send the returned `CommitVote`, unless the replica is beside the quorum: it has learned then."""
    DECIDED = "decided"
    """COMMIT: step the optimizers. The version moves on, and what is `held` follows it. Else do not step them."""
    DECISION_UNKNOWN = "decision_unknown"
    """Do not step the optimizers. The next quorum tells whether the others did."""
    LEARNED = "learned"
    """Nothing counts. Ask again at once if it follows: nothing was computed."""


TRANSITIONS: Mapping[tuple[StepPhase, StepEvent], StepPhase] = {
    (StepPhase.IDLE, StepEvent.BEGIN): StepPhase.ASKING,
    (StepPhase.IDLE, StepEvent.LOCATE): StepPhase.IDLE,
    (StepPhase.IDLE, StepEvent.BROKEN): StepPhase.IDLE,
    (StepPhase.ASKING, StepEvent.BEGIN): StepPhase.ASKING,
    (StepPhase.ASKING, StepEvent.LOCATE): StepPhase.IDLE,
    (StepPhase.ASKING, StepEvent.FORMED): StepPhase.TRAINING,
    (StepPhase.TRAINING, StepEvent.BEGIN): StepPhase.ASKING,
    (StepPhase.TRAINING, StepEvent.LOCATE): StepPhase.IDLE,
    (StepPhase.TRAINING, StepEvent.CANNOT_CONNECT): StepPhase.TRAINING,
    (StepPhase.TRAINING, StepEvent.OVERTAKEN): StepPhase.TRAINING,
    (StepPhase.TRAINING, StepEvent.BROKEN): StepPhase.TRAINING,
    (StepPhase.TRAINING, StepEvent.VOTE): StepPhase.VOTED,
    (StepPhase.TRAINING, StepEvent.LEARNED): StepPhase.IDLE,
    (StepPhase.VOTED, StepEvent.BEGIN): StepPhase.ASKING,
    (StepPhase.VOTED, StepEvent.LOCATE): StepPhase.IDLE,
    (StepPhase.VOTED, StepEvent.BROKEN): StepPhase.VOTED,
    (StepPhase.VOTED, StepEvent.DECIDED): StepPhase.IDLE,
    (StepPhase.VOTED, StepEvent.DECISION_UNKNOWN): StepPhase.IDLE,
    (StepPhase.VOTED, StepEvent.LEARNED): StepPhase.IDLE,
}
"""Where each event leads from each phase. One that is missing changes nothing there: it is late, or of another step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The user's choices for this replica."""

    min_replica_size: int
    init_sync: bool = True
    waits_for_quorum: bool = False
    """The training thread waits for each quorum."""
    fixed_with_spares: bool = False
    join_stall_limit_s: float | None = 60.0
    spare: bool = False
    check_equal_every: int = 0
    on_replicas_differ: OnReplicasDiffer = OnReplicasDiffer.WARN
    connects_beside: bool = False
    """As in `Hello`."""
    store_address: str = ""
    """Where others can meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWishes:
    """The caller's wishes for a step."""

    allow_heal: bool = True
    shrink_only: bool = False
    contributes: bool = True
    """False: nothing was trained for this step."""
    patience_s: float = 0.0
    """How long the way here took."""
    waits: bool | None = None
    """Whether the training thread waits for the quorum, None: where that helps. False: load nothing before the forward pass."""

    @property
    def is_outer(self) -> bool:
        """Whether an outer loop asks."""
        return self.patience_s > 0 or self.waits is not None


class StepFacts(NamedTuple):
    """A rank's own circumstances as a step begins."""

    can_serve: bool = False
    """The state is captured already."""
    need: Need = Need()
    stood_s: float = 0.0
    """How long the state was captured and shown just now, for those who come in."""
    shown: list[StateShown] = []
    """Of the state, where it `shows` something."""
    kinds: Sequence[str] = ()
    """See `QuorumRequest`."""
    at_end: bool = False
    """An iteration ends that did not count: ask for the newest state, and for no step."""
    top_s: float = 0.0
    """How long the loop takes from the end of an iteration to the next step; 0: not known."""
    computes_alone: bool = False
    """The loop may be in the middle of an iteration that began with another state than this one: nothing of it is to count."""
    needs_weights: bool = False
    """The loop goes back in this step through weights as they were before it: nothing is loaded in it."""
    nodes: Sequence[tuple[int, int]] = ()
    """See `QuorumRequest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work that follows from a quorum."""

    formed: Answer
    configure: bool
    """The process group has to be made anew."""
    load: bool
    """The state has to be loaded from `formed.sources`, and the step asked for again."""
    serve: bool
    """`formed.destinations` want this replica's state."""


class ReplicaView(NamedTuple):
    """A replica at one moment, all of it at the same. The names are those of `ReplicaState`."""

    version: StateVersion
    held: StateVersion
    newest_step: int
    quorum: Answer | None
    phase: StepPhase
    error: str | None
    restored: bool
    torn: bool
    is_behind: bool
    is_checked: bool
    is_learner: bool
    warms_up: bool
    follows: bool
    is_corrected: bool
    is_waited_for: bool
    came_in: bool
    is_on_trial: bool
    is_leaving: bool
    all_leave: bool
    speaks: bool
    silent_for: str
    is_in_step: bool
    is_between_steps: bool
    is_voted_on: bool
    can_reduce: bool
    shows: Shows
    serves_learners: bool
    num_participants: int
    num_writers: int
    writer_number: int | None
    participating_rank: int | None


class ReplicaState:
    """One rank's state over its steps. Not thread-safe: the caller serialises."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.settings = settings
        self.version = StateVersion()
        self._held: StateVersion | None = None
        self.restored = False
        self.torn = False
        """The state is not whole: a load failed half-way. It stays so until a whole one is loaded."""
        self.rolled_back_to = StateVersion()
        self.phase = StepPhase.IDLE
        self.quorum: Answer | None = None
        """The quorum of the open step, or of the last one."""
        self.newest_step = 0
        self.capture_wanted = True
        """Capture the state at the next step boundary: somebody waits for it, or nothing is known yet."""
        self.serves_learners = False
        """The last state that this replica was told to serve is for learners, too. No step waits for them, so it is served on
        when its step is committed."""
        self.error: str | None = None
        self.found = ""
        """What was found of the open step that the lighthouse is to know, and that is no reason to vote against it."""
        self.configured: tuple[int, str] | None = None
        """Quorum id and epoch that the process group was made for; None: it cannot be used."""
        self._request_id = 0
        self._last_outcome: Outcome | None = None
        self._is_broken = False
        self._is_unconnected = False
        self._is_stale = False
        """A quorum that went by trained from another state, or nobody knows that this replica holds its state now."""
        self.is_on_trial = False
        """The state was given to it by others, and what its first step makes of that has not been compared yet: it
        gives that to nobody, and writes it nowhere. If nobody makes that step with it who is not on trial, it is the job's."""
        self._has_caught_up = False
        """The state was given to it between two steps, and no quorum has formed with it since."""
        self._given_at = 0
        """As in `QuorumRequest`."""
        self._vote: CommitVote | None = None
        """What was said of the step that is voted on and not decided."""
        self._wishes: StepWishes | None = None
        """What the open step was asked for with."""
        self._is_changed = False
        """The state has changed since, otherwise than by a load before the forward pass."""
        self._is_again, self._was_again = False, True
        """The loop has begun the open step again; and did so in the last that counts, or with newcomers since, or none counts."""
        self._shows = Shows.SAMPLES
        """How much the next request shows, if the state has a name then."""
        self.is_leaving = False
        """The last step has ended, and the group leaves with it: no other one begins."""
        self.all_leave = False
        """So do all groups that contributed to that step."""
        self.speaks = False
        """It may write for the job: from a decision that says so to the vote in a step in which it is not the first."""
        self.silent_for = ""
        """As of the last step: see `CommitDecided.silent_for`."""

    # ------------------------------------------------------------------------------------------------ what it is now

    @property
    def healed(self) -> bool:
        """The state is the open quorum's (or, between steps, a proven one)."""
        if self.phase in (StepPhase.TRAINING, StepPhase.VOTED) and self.quorum is not None:
            return self.version == self.quorum.version
        return self.version.proven

    @property
    def held(self) -> StateVersion:
        """The version of the state that is here. It is another than `version` while a step is decided and not yet taken: the one
        before until an optimizer begins to step, then none until all have."""
        return self.version if self._held is None else self._held

    @property
    def is_in_step(self) -> bool:
        """A step was begun, and not voted on yet."""
        return self.phase in (StepPhase.ASKING, StepPhase.TRAINING)

    @property
    def is_between_steps(self) -> bool:
        """No step is open: the last one has been decided."""
        return self.phase is StepPhase.IDLE

    @property
    def is_voted_on(self) -> bool:
        """The step was voted on, or has been decided."""
        return self.phase in (StepPhase.VOTED, StepPhase.IDLE) and self.quorum is not None

    @property
    def can_reduce(self) -> bool:
        """Collectives may start: those of the open step while it can count, and those between its vote and the next step, which
        change nothing about it, while the process group can be used."""
        if self.is_in_step:
            return self.error is None
        return self.is_voted_on and not self._is_broken and not self.is_learner

    @property
    def waits_for_quorum(self) -> bool:
        """The training thread has to wait for the next quorum, because this replica may load a state before its forward pass."""
        is_behind = not self.version.proven or self.version.step < self.newest_step
        return self.settings.waits_for_quorum or is_behind or self.is_learner or self.shows is not Shows.NOTHING

    @property
    def shows(self) -> Shows:
        """How much of the state the next request shows, to have it compared: see `trial`."""
        return self._shows if self.version.proven else Shows.NOTHING

    @property
    def wants_capture(self) -> bool:
        """The state has to be captured before the next quorum: others may need it, or it is to be compared."""
        return self.capture_wanted or not self.version.proven or self.shows is not Shows.NOTHING

    @property
    def is_checked(self) -> bool:
        """The state of now is one that replica groups compare."""
        return self.version.proven and is_checked(self.version.step, self.settings.check_equal_every)

    @property
    def is_learner(self) -> bool:
        """In the open step, or the last one, it is beside the quorum."""
        return self.quorum is not None and self.quorum.role is Role.LEARNER

    @property
    def warms_up(self) -> bool:
        """It computes a step, or computed the last one, for itself alone: nothing of it counts, and nobody waits for it."""
        return self.is_learner and self.quorum is not None and self.quorum.warms_up

    @property
    def follows(self) -> bool:
        """It receives a state outside of the quorum, or has received it: it computes no step with that, and asks again."""
        return self.phase is StepPhase.TRAINING and self.quorum is not None and self.quorum.follows

    @property
    def is_corrected(self) -> bool:
        """The others wait while it loads the state that it should have, before they all begin the step."""
        return self.quorum is not None and self.quorum.differs

    @property
    def is_waited_for(self) -> bool:
        """The others wait until it has the state with which they all begin the step."""
        return self.quorum is not None and (self.quorum.differs or self.quorum.held)

    @property
    def came_in(self) -> bool:
        """It was given the newest state at the end of an iteration, and has begun no step with it yet."""
        return self.phase is StepPhase.IDLE and self.quorum is not None and self.quorum.held and not self.is_behind

    @property
    def num_writers(self) -> int:
        """So many contributors to the last step, the first ones, write a checkpoint of what came of it: none is on trial."""
        proved = 0 if self.quorum is None else self.quorum.num_proved
        return min(proved or self.num_participants, self.num_participants)

    @property
    def writer_number(self) -> int | None:
        """Number among those that write a checkpoint of the state that is here, between two steps. None: it writes nothing of it,
        as it did not contribute to the last step, or is on trial. The others do, and do not count on this one."""
        rank = self.participating_rank
        return None if self.is_on_trial or rank is None or rank >= self.num_writers else rank

    @property
    def is_behind(self) -> bool:
        """There is no state of worth here, or a newer one is known to exist."""
        return self.torn or self._is_stale or not self.version.proven or self.version.step < self.newest_step

    @property
    def num_participants(self) -> int:
        if self.quorum is None:
            return 0
        count = self.quorum.num_contributors
        return min(count, self.settings.min_replica_size) if self.settings.fixed_with_spares else count

    @property
    def participating_rank(self) -> int | None:
        """Rank among those that contribute, None for one that lacks the state and for a spare."""
        if self.quorum is None or (self.phase is not StepPhase.IDLE and not self.healed):
            return None  # between two steps it has the part that it had in the last one
        rank = self.quorum.contributor_rank
        if rank is not None and self.settings.fixed_with_spares and rank >= self.settings.min_replica_size:
            return None
        return rank

    def view(self) -> ReplicaView:
        return ReplicaView._make(getattr(self, name) for name in ReplicaView._fields)

    # -------------------------------------------------------------------------------------------------------- events

    def joiner_waits(self, message: JoinerWaiting) -> None:
        """A replica waits for a state: the state is captured before the next quorum. That with which this one has asked for the
        open step may get its name."""
        self.capture_wanted = True
        is_asked = message.request_id == self._request_id and self.phase is StepPhase.ASKING
        if message.names.proven and is_asked and not self.torn and self.version.step == message.names.step:
            self._adopt(message.names)

    def restore(self, step: int) -> None:
        """The user loaded a checkpoint of `step` on purpose."""
        self.version, self._held = StateVersion(step=step), None
        self.restored = True
        self.torn = self.is_on_trial = self._has_caught_up = False
        self._given_at = 0
        self.state_changed()

    def state_changed(self) -> None:
        """The state is not the one any more with which the open step was asked for."""
        self._is_changed = True

    def takes_step(self, *, again: bool = False) -> None:
        """The state is changed for the step that was decided and not yet taken; `again`: or for one that was taken already."""
        is_committed = self.phase is StepPhase.IDLE and self._last_outcome is Outcome.COMMIT and self.version.proven
        if self._held is not None or (again and is_committed):
            self._held = StateVersion()

    def took_step(self) -> None:
        """The optimizers have taken the step that was decided, or the loop has left it out."""
        self._held = None

    def keeps_step(self, wishes: StepWishes, *, has_reduced: bool, is_loading: bool, joins_open: bool = False) -> bool:
        """The loop begins a step. Return whether that may be the one that is open, because nothing has happened in it yet.

        A loop that calls `zero_grad` twice, or skips a batch, then costs the others nothing. It may have moved its place in the
        data meanwhile. Whoever was given the state before that begins with another batch, unless the loops do so in each step. So
        if one comes in with such a step, it does not count: once for each rank, until one counts. An outer loop, which says
        whether it contributes or waits, asks anew on purpose.

        Args:
            wishes: for the step that is asked for.
            has_reduced: a collective was issued in the open step.
            is_loading: what it has to load is on the way, or not known yet.
            joins_open: its forward pass was computed in the open step: it goes into no other one, whatever has gone wrong.
        """
        if not self.is_in_step or wishes != self._wishes or (self._is_changed and not joins_open):
            return False
        if not wishes.contributes or wishes.waits is not None:
            return False
        if joins_open:
            return True
        is_alone = self.warms_up and self.phase is StepPhase.TRAINING
        has_failed = not is_alone and (self.error is not None or self._is_broken)
        is_ready = is_alone or self.phase is StepPhase.ASKING or self.healed or is_loading
        self._is_again = is_ready and not (has_reduced or has_failed)
        return self._is_again

    def begins_again(self) -> None:
        """The loop goes on with the open step, perhaps at another place of its data, as one that `keeps_step` does."""
        self._is_again = self.is_in_step

    def begin(self, wishes: StepWishes, facts: StepFacts) -> QuorumRequest:
        """A step begins. One that is open is abandoned."""
        waits = self.waits_for_quorum if wishes.waits is None else wishes.waits or bool(facts.shown)
        self._leave_step()
        self._moves(StepEvent.BEGIN)
        self.capture_wanted = False
        self._wishes = wishes
        return QuorumRequest(
            request_id=self._request_id,
            version=self.version,
            restored=self.restored,
            torn=self.torn,
            shrink_only=wishes.shrink_only,
            allow_heal=wishes.allow_heal and not facts.needs_weights,
            waits_for_quorum=waits or facts.at_end,
            can_serve=facts.can_serve,
            needs_new_quorum=self.configured is None,
            speaks=self.speaks,
            contributes=wishes.contributes,
            patience_s=wishes.patience_s,
            warms_up=facts.computes_alone and not facts.at_end,
            came_in=self._has_caught_up or (self.is_on_trial and self._last_outcome is not Outcome.COMMIT),
            given_at=self._given_at,
            kinds=[*facts.kinds],
            at_end=facts.at_end,
            top_s=facts.top_s,
            need=facts.need,
            stood_s=facts.stood_s,
            shown=facts.shown,
            nodes=[] if facts.at_end else sorted(facts.nodes)[:MAX_NODES],
        )

    def locate(self, **says: Any) -> LocateState:
        """Ask where the newest state is. A step that is open is abandoned. `says`: as in `LocateState`."""
        self._leave_step()
        self._moves(StepEvent.LOCATE)
        return LocateState(request_id=self._request_id, version=self.version, **says)

    def located(self, located: StateLocated) -> None:
        """The answer says what the newest state is, or that nothing is known of it. One that comes too late changes nothing.

        If another rank of this group has yet to load it, this one is behind like that one: all of them come in alike.
        """
        if located.request_id != self._request_id or self.phase is not StepPhase.IDLE:
            return
        self._go_back(located.rolled_back_to)
        if located.is_held and located.version.proven and located.version == self.version:
            self._adopt(located.version)
            self.newest_step = located.version.step

    def caught_up(self, version: StateVersion) -> None:
        """The newest state, as the lighthouse has just named it, is in place."""
        self._adopt(version)
        self.newest_step, self._given_at = version.step, version.step + 1
        self._has_caught_up = True

    def _moves(self, event: StepEvent) -> bool:
        """Go where an event leads from this phase; False: nowhere."""
        if (self.phase, event) not in TRANSITIONS:
            return False
        self.phase = TRANSITIONS[self.phase, event]
        if self.phase is not StepPhase.VOTED:
            self._vote = None
        return True

    def _leave_step(self) -> None:
        if self.phase in (StepPhase.TRAINING, StepPhase.VOTED):
            # Without this replica's vote nobody can have committed, unless it has none.
            voter = self.quorum is not None and self.quorum.role is Role.HEALTHY
            self._last_outcome = Outcome.DISCARD if voter and self.phase is StepPhase.TRAINING else None
            self.configured = None
        self._request_id += 1
        self.error, self.found = None, ""
        self._is_broken = self._is_unconnected = False
        self._wishes, self._is_changed, self._is_again = None, False, False

    def formed(self, formed: Answer) -> StepPlan | None:
        """The quorum of the open request was formed; None: it answers a request that is not open any more."""
        if formed.request_id != self._request_id or not self._moves(StepEvent.FORMED):
            return None
        self.quorum = formed
        is_beginner = formed.held and formed.names_state
        if not formed.differs:  # who corrects shows as much as those who wait
            # Unless this step counts, and the decision says otherwise. A first state was compared as it was received.
            self._shows = Shows.NOTHING if is_beginner else Shows.SAMPLES
        if formed.leaving:
            self.fail(formed.reason)
            return StepPlan(formed=formed, configure=False, load=False, serve=False)
        self.newest_step = formed.newest_step
        self._go_back(formed.rolled_back_to)
        self.capture_wanted = False  # `JoinerWaiting` follows, if anybody waits
        if formed.destinations:
            self.serves_learners = True
        is_made = self._last_outcome is Outcome.COMMIT and not self._has_caught_up
        self._last_outcome = None
        if (formed.differs or formed.role is Role.IDLE) and self.version == formed.version:
            self.version = StateVersion(step=self.version.step)  # the others hold another state under that name
        if formed.role is Role.HEALTHY and self.version != formed.version:
            # A first state, or one that the job goes back to, is this replica's: it gets its name.
            if self.torn or not formed.names_state or self.version.step != formed.version.step:
                self.fail(f"the quorum takes this replica for a holder of {formed.version}, it holds {self.version}")
            else:
                self._adopt(formed.version)
        is_believed = is_made or formed.names_state or (formed.role is Role.HEALTHY and not formed.num_proved)
        is_given = (formed.held and not is_beginner) or formed.differs
        self.is_on_trial = is_given or ((self.is_on_trial or self._has_caught_up) and not is_believed)
        self._has_caught_up = False
        # Who is held has what it has of that name from an attempt that is over, or has computed alone since.
        is_here = self.version == formed.version and not formed.held
        load = formed.role is Role.LEARNER and not (is_here or formed.warms_up)
        self._is_stale = not is_here or formed.warms_up
        configure = self.configured != (formed.quorum_id, formed.epoch) and not self.is_learner
        if configure:
            self.configured = None
        if self.is_learner:
            self.fail(formed.reason)
        return StepPlan(
            formed=formed,
            configure=configure,
            load=load,
            serve=bool(formed.destinations),
        )

    def configure_finished(self) -> None:
        """The process group of the open quorum is ready."""
        if self.quorum is not None:
            self.configured = (self.quorum.quorum_id, self.quorum.epoch)

    def load_finished(self, version: StateVersion) -> None:
        """All of the state that `version` names is in place, and nothing was computed with another one in this step."""
        self._adopt(version)
        self._is_changed = False
        if self.quorum is None or not self.quorum.differs:  # who corrects has come in before
            begins = self.quorum is not None and self.quorum.names_state
            self._given_at = 0 if begins else version.step + 1

    def load_torn(self) -> None:
        """Loading failed half-way, or a step was not taken to its end: what is held now has no name."""
        self.version, self._held = StateVersion(), None
        self.restored = False
        self.torn = True
        self.state_changed()

    def fail(self, reason: str) -> None:
        """This step cannot count. The first reason is kept."""
        if self.error is None:
            self.error = reason

    def collectives_failed(self) -> None:
        """The process group of this quorum cannot be used again."""
        self._is_broken = True
        self.configured = None

    def cannot_connect(self) -> None:
        """The process group of the open quorum could not be made. Where the quorum broke meanwhile, that is why."""
        self._is_unconnected = self._moves(StepEvent.CANNOT_CONNECT) and self.error is None

    def broken(self, message: QuorumBroken) -> bool:
        """The lighthouse says that a quorum broke. Returns whether what is in flight has to be aborted."""
        if self.quorum is None or message.quorum_id != self.quorum.quorum_id:
            return False
        if not self._moves(StepEvent.BROKEN):
            self.configured = None
            return False
        if self.phase is StepPhase.TRAINING:
            self.fail(message.reason)
        self.collectives_failed()
        return True

    def vote(self, collectives: str = "", num_collectives: int = 0, state_digest: str = "") -> CommitVote:
        """All work of the step is done, or failed: what to say about it.

        Args:
            collectives: a word for those of the step in their order.
            num_collectives: how many they are.
            state_digest: of the state that was here when the step was asked for, where it `is_checked`; else empty.
        """
        if self.quorum is None or not self._moves(StepEvent.VOTE):
            raise RuntimeError(f"internal error: there is no step to vote on in phase {self.phase.value}")
        formed = self.quorum
        approve = self.error is None and self.healed
        reason = self.error or (self.found if self.healed else "its state is not loaded yet")
        if approve and self.num_participants < self.settings.min_replica_size:
            approve = False
            reason = f"{self.num_participants} replica groups contribute, min_replica_size is {self.settings.min_replica_size}"
        is_again = self._is_again and formed.num_proved < formed.num_contributors
        if approve and is_again and not self._was_again:
            approve = False
            reason = "its loop has begun this step again, and a group comes in that was given what it held before"
        self._was_again |= is_again  # one attempt a rank
        self.speaks = self.speaks and self.participating_rank == 0
        is_known_holder = formed.role is Role.HEALTHY and not formed.names_state
        self._vote = CommitVote(
            quorum_id=formed.quorum_id,
            epoch=formed.epoch,
            step=formed.version.step,
            approve=approve,
            broken=self._is_broken or self.error is not None,
            counts=formed.role is Role.HEALTHY,
            num_voters=formed.num_voters,
            collectives=collectives,
            issued=[num_collectives],
            state_digests=[state_digest] if state_digest and approve and is_known_holder else [],
            connects=not self._is_unconnected,
            reason=reason[:1000],
        )
        if self._vote.broken:
            self.collectives_failed()
        return self._vote

    def learned(self) -> Outcome:
        """The step beside the quorum is over: nothing of it counts. What was received instead of one is old by now."""
        is_old = self.follows and not self.is_waited_for
        if not self._moves(StepEvent.LEARNED):
            return Outcome.LEFT_BEHIND
        self._is_stale = self._is_stale or is_old
        self.speaks = False
        self.is_leaving = self.is_leaving or (self.quorum is not None and self.quorum.leaving)
        return Outcome.LEFT_BEHIND

    def may_begin(self) -> bool:
        """Whether a step may begin. One that is open and the last one ends with that."""
        if self.phase is StepPhase.TRAINING and self.quorum is not None and self.quorum.leaving:
            self.learned()
        return not self.is_leaving

    def left_between_steps(self) -> None:
        """No other step begins."""
        self.is_leaving = True

    def is_open(self, decided: CommitDecided) -> bool:
        """Whether this decision is about the step that was voted on."""
        vote = self._vote
        key = (decided.quorum_id, decided.epoch, decided.step)
        return vote is not None and (vote.quorum_id, vote.epoch, vote.step) == key

    def decided(self, decided: CommitDecided) -> Outcome | None:
        """The step was decided; None: not the one that is open.

        Only an approved step commits: the check here is the last of several, and the one that needs nobody's word.
        """
        vote = self._vote
        if vote is None or not self.is_open(decided):
            return None
        outcome = decided.outcome
        if outcome is Outcome.COMMIT and not (vote.approve and self.healed):
            outcome = Outcome.LEFT_BEHIND
        self._moves(StepEvent.DECIDED)
        self._last_outcome = outcome
        self.is_leaving, self.all_leave = decided.leaving, decided.leaving and decided.all_leave
        if decided.broken:
            self.collectives_failed()
        if outcome is Outcome.COMMIT:
            step = decided.step + 1
            version = StateVersion(step=step, quorum_id=decided.quorum_id, epoch=decided.epoch)
            self._adopt(version, held=self.version)
            self._shows, self._was_again = decided.shows, self._is_again
            self.speaks, self.silent_for = decided.speaks, decided.silent_for
        elif outcome is Outcome.LEFT_BEHIND:
            self.speaks = False
            self.newest_step = max(self.newest_step, decided.step + 1)
            self._is_stale = True
            self.configured = None
        return outcome

    def overtaken(self, decided: CommitDecided) -> None:
        """The others decided the open step without this replica's vote."""
        formed = self.quorum
        key = (decided.quorum_id, decided.epoch, decided.step)
        is_open = formed is not None and (formed.quorum_id, formed.epoch, formed.version.step) == key
        if is_open and self._moves(StepEvent.OVERTAKEN):
            self.fail(decided.reason or "the others went on without this replica")

    def decision_unknown(self) -> None:
        """The time to wait for the decision is over. If the others committed, the next quorum heals this replica.

        With several ranks in the group: only on the `CommitUnknown` that answers its own.
        """
        if not self._moves(StepEvent.DECISION_UNKNOWN):
            return
        self._last_outcome = None
        self.collectives_failed()

    def hello(self, replica_id: str, group_world_size: int, metrics_address: str = "") -> Hello:
        """Return what a lighthouse has to know that hears of this replica for the first time."""
        formed = self.quorum
        return Hello(
            protocol=PROTOCOL_VERSION,
            replica_id=replica_id,
            group_world_size=group_world_size,
            version=self.version,
            newest_step=self.newest_step,
            last_quorum_id=formed.quorum_id if formed else 0,
            last_quorum_size=formed.replica_world_size if formed and not self.is_learner else 0,
            last_step=formed.version.step if formed else 0,
            last_epoch=formed.epoch if formed else "",
            rolled_back_to=self.rolled_back_to,
            last_outcome=self._last_outcome,
            is_beside=self.is_learner and self.phase in (StepPhase.TRAINING, StepPhase.VOTED),
            store_address=self.settings.store_address,
            metrics_address=metrics_address,
            spare=self.settings.spare,
            init_sync=self.settings.init_sync,
            min_contributors=self.settings.min_replica_size,
            join_stall_limit_s=self.settings.join_stall_limit_s,
            connects_beside=self.settings.connects_beside,
            check_equal_every=self.settings.check_equal_every,
            on_replicas_differ=self.settings.on_replicas_differ,
            speaks=self.speaks,
        )

    def _go_back(self, rolled_back_to: StateVersion) -> None:
        if rolled_back_to.quorum_id > self.rolled_back_to.quorum_id:
            self.rolled_back_to = rolled_back_to

    def _adopt(self, version: StateVersion, held: StateVersion | None = None) -> None:
        self._held = held  # first: what interrupts this finds the state behind its name, not a name that is wrong
        self.version = version
        self.restored = False
        self.torn = False
        self._is_stale = False
        self.newest_step = max(self.newest_step, version.step)

    # ------------------------------------------------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check what holds between two events, for tests; a `RuntimeError` says what does not."""
        for what in (*self._wrong_in_state(), *self._wrong_in_step()):
            raise RuntimeError(f"{what}: {self}, {vars(self)}")

    def _wrong_in_state(self) -> Iterator[str]:
        """Say what is wrong with what is held, and the name that it has."""
        version = self.version
        if self.torn and version != StateVersion():
            yield "a torn state has a name"
        if self.restored and (version.proven or self.torn):
            yield "a state that was restored, and is the job's or torn since, counts as restored"
        if self._held is not None and self.phase is not StepPhase.IDLE:
            yield "a step begins with a state that is another than it says"
        if self._held is not None and (not version.proven or self._held.step >= version.step):
            yield "a step is to be taken that leads to no later state"
        if self._last_outcome is Outcome.LEFT_BEHIND and (self.speaks or self.configured is not None):
            yield "the others went on without it, and it may write for them, or needs no new process group"
        if self._is_broken and self.configured is not None:
            yield "a process group that is broken can be used again"
        if self.configured is not None and not self.is_learner and self.configured != self._quorum_key():
            yield "the process group is that of another quorum"
        if self.all_leave and not self.is_leaving:
            yield "all leave, and it does not"
        if self.is_leaving and self.phase is not StepPhase.IDLE and not self.follows:
            yield "a step is open, and the last one has ended"

    def _wrong_in_step(self) -> Iterator[str]:
        """Say what is wrong with the step that is open, and this replica's part in it."""
        formed, vote, version = self.quorum, self._vote, self.version
        if (vote is None) == (self.phase is StepPhase.VOTED):
            yield "there is a vote in another phase, or none in this"
        if self.phase is StepPhase.ASKING and self._wishes is None:
            yield "it is not known what the step was asked for with"
        if self.phase not in (StepPhase.TRAINING, StepPhase.VOTED):
            return
        if formed is None or formed.request_id != self._request_id:
            yield "the quorum of the step is none, or is not the answer to what was asked"
            return
        if (self._is_broken or self.is_learner or formed.leaving) and self.error is None and vote is None:
            yield "a step may count that is beside the quorum, or whose process group is broken"
        if self._is_unconnected and (self.error is None or self.configured is not None):
            yield "the process group could not be made, and the step goes on"
        if self.participating_rank is not None and not (version == formed.version and formed.role is Role.HEALTHY):
            yield "it contributes, and has another state than the quorum, or another part"
        if self.speaks and vote is not None and formed.contributor_rank != 0:
            yield "it has voted, and may write for those who contribute, of whom it is not the first"
        if formed.leaving:
            return
        if version != formed.version and not self.is_behind:
            yield "it has another state than the quorum, and does not know that it is behind"
        if formed.held and self.participating_rank is not None:
            yield "it is given the state of a step at the end of an iteration, and takes part in that step"
        if version == formed.version and _is_void(version, self.rolled_back_to):
            yield "the quorum's state is one from which the job went back"
        if self._last_outcome is not None:
            yield "the last step's outcome is told beside a later one"
        if self._shows is Shows.NOTHING and not (formed.differs or formed.names_state):
            yield "its state is not compared if this step does not count"
        if vote is not None and (vote.quorum_id, vote.epoch, vote.step) != (*self._quorum_key(), formed.version.step):
            yield "the vote is about another step"
        if vote is not None and vote.approve and (vote.broken or not vote.connects):
            yield "it approves of what it says that it cannot connect for, or is broken"
        if vote is not None and vote.approve and version.proven and version != formed.version:
            yield "it approves of a step from a state that it does not hold"
        if vote is not None and vote.approve and self.num_participants < self.settings.min_replica_size:
            yield "it approves of a step of too few"

    def _quorum_key(self) -> tuple[int, str]:
        return (0, "") if self.quorum is None else (self.quorum.quorum_id, self.quorum.epoch)

    def __repr__(self) -> str:
        quorum = self.quorum.quorum_id if self.quorum else None
        return (
            f"ReplicaState(step={self.version.step}, phase={self.phase.value}, quorum={quorum}, healed={self.healed})"
        )


def _is_void(version: StateVersion, rolled_back_to: StateVersion) -> bool:
    return version.quorum_id < rolled_back_to.quorum_id and version.step > rolled_back_to.step
