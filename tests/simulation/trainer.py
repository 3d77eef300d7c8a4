"""One rank: drives `core.coordination.replica` through its steps in the way in which the manager does, without tensors.

Its state is a number that depends on every step that went into it and on every contribution, so that two ranks that do
not hold the same can be told apart for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec

from simulation.clock import Clock, Process
from simulation.collectives import Collectives, Handle
from simulation.microbatches import Held, check_whole
from simulation.oracle import Oracle
from simulation.transfers import Arrival, Snapshot, Transfers
from torchft_ckpt.core.coordination.learning import Distance
from torchft_ckpt.core.coordination.messages import (
    MAX_TURNS,
    Answer,
    CollectiveWait,
    CommitDecided,
    CommitUnknown,
    CommitVote,
    ConnectBeside,
    ConnectedBeside,
    GroupBroken,
    GroupToRank,
    JoinerWaiting,
    JoinProgress,
    Leaf,
    LeafDigests,
    Leave,
    LeavesWanted,
    LeaveWish,
    Need,
    Outcome,
    QuorumBroken,
    QuorumFormed,
    QuorumPending,
    RankToGroup,
    Receives,
    Refused,
    Role,
    Shows,
    StateArrived,
    StateLocated,
    StateShown,
    StateVersion,
)
from torchft_ckpt.core.coordination.replica import (
    ReplicaSettings,
    ReplicaState,
    StepFacts,
    StepPhase,
    StepPlan,
    StepWishes,
)
from torchft_ckpt.core.training.microbatches import Node, accept, cover, deal, members

if TYPE_CHECKING:
    from simulation.chaos import Moods

VALUE_BITS = 64
"""What lies above them in a state is drift."""
NUM_MICROBATCHES = 7
REPORT_WAIT_S = 0.5
"""A collective between two steps that takes longer is reported."""
_SAY_S = 0.25
ABANDONS_WITHIN_S = 0.5
LEAVE_WITHIN_S = 3.0
"""So long after the wish to leave a rank goes as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Durations in seconds."""

    replica: ReplicaSettings
    compute_s: tuple[float, float] = (0.03, 0.12)
    quorum_timeout_s: float = 4.0
    decision_timeout_s: float = 2.0
    tells_reach: bool = False
    changing: float | None = None
    """Training changes this part of the state, and who is far behind can follow; None: nobody can."""
    load_s: tuple[float, float] = (0.0, 0.0)
    turns: str = "0"
    """The networks that the loop trains in turn, each in a step of its own."""
    shows: bool = True
    num_allreduces: int = 1
    num_late: int = 0
    """Collectives between the decision and the next step."""
    late_limit_s: float | None = None
    """A rank that waits longer in one of them that fails was not told in time."""


class Trainer:
    """One rank of one incarnation. `num_ranks`, set before it begins: so many its group has.

    Args:
        process: its process.
        replica_id, rank: who it is.
        value: its first state.
        send: takes its messages to its group.
        stop: ends the process, as an exception that nobody catches does.
    """

    shows_state = True
    """It asks for each step with what it shows of its state, where that is to be compared."""
    num_ranks = 1
    by_microbatches = True
    """A step has microbatches, which are dealt among those that contribute; what a discarded attempt has computed is kept."""

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        process: Process,
        *,
        replica_id: str,
        rank: int,
        value: object,
        settings: TrainerSettings,
        collectives: Collectives,
        transfers: Transfers,
        oracle: Oracle,
        moods: Moods,
        send: Callable[[RankToGroup], None],
        stop: Callable[[str], None],
    ) -> None:
        self.process = process
        self.replica_id, self.rank = replica_id, rank
        self.address = f"{replica_id}/{rank}"
        self.held = value
        self.replica = ReplicaState(settings.replica)
        self.num_discarded = 0
        self.last_commits: deque[StateVersion] = deque(maxlen=4)
        """The versions it came to by its latest commits in a row; a discarded step or a healing begins anew."""
        self.pending: QuorumPending | None = None
        self._clock, self._rng, self._settings = clock, rng, settings
        self._collectives, self._transfers, self._oracle, self._moods = collectives, transfers, oracle, moods
        self._send, self._stop = send, stop
        self._turn = 0
        """Rises with each step: what was meant for an earlier one is dropped."""
        self._handle: Handle | None = None
        self._plan: StepPlan | None = None
        self._results: list[tuple[object, ...]] = []
        self._num_late = 0
        """How many it has issued between the last decision and the next step."""
        self._waits = False
        """It has asked for the open step, and computes nothing before it is answered."""
        self._request_id: int | None = None
        """Of that question; None: what no step changes stays as it is, however often it asks."""
        self._arrival: tuple[Arrival, Snapshot | None] | None = None
        self._is_receiving = False
        self._is_cancelled = False
        self._told: StateArrived | None = None
        """What the ranks of this group heard last of the state that they receive, or load again."""
        self._distance = Distance()
        self._load_s, self._told_load_s = rng.uniform(*settings.load_s) if settings.load_s[1] else 0.0, 0.0
        """How long it takes to load a state, and how long the last time, if it has loaded one."""
        self._after_load: Callable[[], None] | None = None
        self._after_agreement: Callable[[StateArrived | None], None] | None = None
        self._said_finished_at = StateVersion()
        self._goes_away = False
        self._has_shown = False
        """It asked for the open step with what it shows of its state."""
        self._digest = ""
        """Of the state that the open step was asked for with, where it is to be compared."""
        self.is_at_end = False
        """It asks for a state at the end of an iteration, and for no step."""
        self._came_in: tuple[StateVersion, object] | None = None
        """What it has loaded there, until its next step begins."""
        self._is_new = False
        """Its next step is the first with that."""
        self._ended_at, self._top_s = 0.0, 0.0
        self._computed, self._computed_with = Held(NUM_MICROBATCHES), (StateVersion(), 0)
        """What it has computed of a step, and the state with which that was: its name, and how often one was loaded."""
        self._num_loads = 0
        self._mine: list[int] = []
        """The microbatches of the open step that it has or computes."""
        self._early: list[int] = []
        """Those that it begins the next one with, before its quorum has formed."""
        self._own_rng = Random(f"microbatches of {self.address}")
        self._made: StateVersion | None = None
        """What its last step has led to, if that counted."""
        self._num_left_out, self._read = 0, list[tuple[int, bool]]()
        """So many batches it has left out in the open step; and how many each one has that contributed, and whether it is new."""
        self._wishes = StepWishes()
        self._place, self._kinds = 0, deque[str](maxlen=MAX_TURNS)
        """The place of the open step in the turns, and which networks the last steps have trained."""

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    @property
    def value(self) -> object:
        """What the state is by all that went into it, whatever it has drifted by."""
        return self.held & ((1 << VALUE_BITS) - 1) if isinstance(self.held, int) else self.held

    @value.setter
    def value(self, value: object) -> None:
        self.held = value

    # ---------------------------------------------------------------------------------------------------- one step

    def begin(self) -> None:
        """Begin a step; one that is open is abandoned."""
        if not self.replica.may_begin():
            self._next()
            return
        self._turn += 1
        turn = self._turn
        self.is_at_end = False
        self._put_back(lambda: self._begin_step(turn))

    def _begin_step(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._finishes():
            self._send(self.replica.locate(has_finished=True))
            self._later(self._rng.uniform(0.05, 1.5), lambda: self.begin() if turn == self._turn else None)
            return
        self._leave_behind()
        self._ask(turn)

    def _leave_behind(self) -> None:
        self._is_receiving, self._after_load, self._arrival, self._told = False, None, None, None
        self._plan, self._after_agreement = None, None
        self._has_shown = False

    def _may_come_in(self) -> bool:
        """Whether it lacks a state that others hold, as an iteration ends that did not count."""
        replica = self.replica
        is_known = replica.is_learner or replica.newest_step > 0
        is_able = self._drawn("heals") >= self._moods.no_heal
        return is_able and replica.is_behind and is_known and not replica.is_leaving

    def _come_in(self) -> None:
        """Ask for the newest state, and for no step."""
        self._turn += 1
        self.is_at_end = True
        self._leave_behind()
        self._ask(self._turn)

    def _goes_on(self) -> None:
        """The iteration that did not count is over; its loop comes to the next one."""
        self._turn += 1
        turn = self._turn
        if self.replica.came_in:
            self._came_in, self._is_new = (self.replica.version, self.held), True
            if self._rng.random() < self._moods.moves_state:
                self.value = self._rng.getrandbits(60)
        self._ended_at = self._clock.now
        top_s = self._rng.uniform(0.5, 1.0) * self._moods.top_s
        self._later(top_s, lambda: self.begin() if turn == self._turn else None)

    def _put_back(self, then: Callable[[], None]) -> None:
        """What the loop has changed since it came in goes back: at all ranks of the group, if at one, or it has no name."""
        came_in, self._came_in = self._came_in, None
        if came_in is None or self._plan is None:
            then()
            return
        is_whole, has_moved = came_in[0] == self.replica.version, came_in[1] != self.held
        if self.is_alone:
            self.held = came_in[1] if is_whole else self.held
            then()
            return
        failure = "" if is_whole else "it holds another state"
        request_id, turn = self._plan.formed.request_id, self._turn

        def agreed(told: StateArrived | None) -> None:
            if is_whole and told is not None and not told.failure and told.loads:
                self.held = came_in[1]
            elif is_whole and has_moved:
                self.replica.load_torn()
            then()

        def give_up() -> None:
            if turn == self._turn and self._after_agreement is agreed:
                self._after_agreement = None
                agreed(None)

        self._after_agreement = agreed
        self._send(StateArrived(request_id=request_id, failure=failure, loads=has_moved, again=True))
        self._later(self._settings.quorum_timeout_s, give_up)

    def _ask(self, turn: int) -> None:
        if self._ended_at and not self.is_at_end:
            self._top_s, self._ended_at = self._clock.now - self._ended_at, 0.0
        self._digest = f"{self.held:x}" if self.replica.is_checked and isinstance(self.held, int) else ""
        shown = self._shown() if self.shows_state and not self.is_at_end else []
        self._transfers.retire(self.address)
        can_serve = self.replica.wants_capture
        self._waits = self.is_at_end or self.replica.waits_for_quorum
        facts = StepFacts(
            can_serve=can_serve,
            shown=shown,
            need=Need(
                reach_s=self._reach_s() if self._settings.tells_reach and self.replica.is_behind else None,
                can_follow=self._settings.changing is not None,
                load_s=self._told_load_s,
                gains=self._settings.changing is not None and self._distance.gains(*self._sizes()),
            ),
            at_end=self.is_at_end,
            top_s=self._top_s,
            kinds=self._kinds,
            nodes=self._nodes_to_tell(),
        )
        allow_heal = self.is_at_end or self._rng.random() >= self._moods.no_heal
        self._wishes, self._num_left_out = StepWishes(allow_heal=allow_heal), 0
        request = self.replica.begin(self._wishes, facts)
        self._request_id = request.request_id
        if shown:
            self._serve()
        num_collectives = len(self._results) + self._num_late
        self._send(msgspec.structs.replace(request, checkpoint_addresses=[self.address], issued=[num_collectives]))
        self._later(self._settings.quorum_timeout_s, lambda: self._ask_again(turn))
        if not self._waits and self._own_rng.random() < self._moods.abandon:  # `continue`, before the quorum is there
            self._later(self._own_rng.uniform(0.0, ABANDONS_WITHIN_S), lambda: self._ask_again(turn))
        if not self._waits and self._moods.leaves_out:
            after_s = self._own_rng.uniform(0.0, ABANDONS_WITHIN_S)
            self._later(after_s, lambda: self._leave_out(turn) if self.replica.phase is StepPhase.ASKING else None)

    def _leave_out(self, turn: int) -> None:
        """`continue` after the forward pass, which all do alike that have made the step before: the loop goes on with the open
        step at another place of its data."""
        now = self.replica.version
        is_due = now == self._made and now.step % 2 == 0 and Random(f"{now} skips").random() < self._moods.leaves_out
        is_due = is_due and turn == self._turn and not (self._num_left_out or self.is_at_end)
        if is_due and self.replica.keeps_step(self._wishes, has_reduced=False, is_loading=False):
            self._num_left_out += 1

    def _serve(self, *, outlives_step: bool = False) -> None:
        snapshot = Snapshot(self.replica.version, self.held, self.process, self._request_id, outlives_step)
        self._transfers.serve(self.address, snapshot)

    def _nodes_to_tell(self) -> list[Node]:
        """Return what is here of the step; after one that counts that is computed now with which the next one begins."""
        made, num_loads = self._computed_with
        if self.replica.version.step == made.step + 1 and self.replica.version.proven and num_loads == self._num_loads:
            self._computed.nodes, self._computed_with = {}, self._state_name()
            for one in self._early:
                self._computed.compute(self.value, one)
        return [*self._computed.nodes] if self._computed_with == self._state_name() else []

    def _state_name(self) -> tuple[StateVersion, int]:
        return self.replica.version, self._num_loads

    def _deal(self, formed: Answer) -> None:
        """Learn which microbatches are this rank's; let go of what does not count."""
        size = formed.replica_world_size
        told = formed.nodes or [[] for _ in range(size)]
        accepted = accept([nodes or [] for nodes in told], NUM_MICROBATCHES)
        dealt = deal(NUM_MICROBATCHES, [a if t is not None else None for a, t in zip(accepted, told, strict=True)])
        mine = accepted[formed.replica_rank] + [
            (one, one + 1) for one in self._early if one in dealt[formed.replica_rank]
        ]
        kept = mine if self._computed_with == self._state_name() else []
        usual = deal(NUM_MICROBATCHES, [None if nodes is None else [] for nodes in told])
        self._early = usual[formed.replica_rank][:1]
        self._computed.nodes = {node: value for node, value in self._computed.nodes.items() if node in kept}
        self._computed_with, self._mine = self._state_name(), dealt[formed.replica_rank]

    def _compute(self, *, to_the_end: bool) -> None:
        todo = [one for one in self._mine if one not in members(self._computed.nodes)]
        for one in todo if to_the_end else todo[: self._own_rng.randint(0, len(todo))]:
            self._computed.compute(self.value, one)

    def _check_sum(self, result: tuple[object, ...]) -> None:
        """What all have brought together is each microbatch once, added as the tree says."""
        brought = [part[4] for part in result if isinstance(part, tuple) and len(part) > 4]
        problem = check_whole(brought, NUM_MICROBATCHES, self.value)
        if problem:
            self._oracle.fail(f"{self.address} in step {self.replica.version}: {problem}")

    def _check_batches(self) -> None:
        """Who has just come in has read the batch that those have read who were there, and live."""
        if not self.replica.is_on_trial and any(is_new and read != self._num_left_out for read, is_new in self._read):
            self._oracle.fail(
                f"step {self.replica.version} counts, and those that came in have read another batch in it"
            )

    def _shown(self) -> list[StateShown]:
        self._has_shown = self._settings.shows and self.replica.shows is not Shows.NOTHING
        held = self.held if isinstance(self.held, int) else crc32(repr(self.held).encode())
        return [StateShown(owned=f"{held:x}")] if self._has_shown else []

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the state, and of what training changes in it."""
        return 1000, 1000 if self._settings.changing is None else int(1000 * self._settings.changing)

    def _reach_s(self) -> float:
        if self._settings.changing is None:
            return 0.05
        return sum(self._transfers.duration_s) / 2 * self._distance.lacking_bytes(*self._sizes()) / 1000

    def _finishes(self) -> bool:
        """Whether this group says, once after this step, that it has finished. All of its ranks say the same."""
        version = self.replica.version
        if version == self._said_finished_at or not version.proven or not self._moods.finishes:
            return False
        self._said_finished_at = version
        return Random(f"{self.replica_id} {version} finishes").random() < self._moods.finishes

    def _ask_again(self, turn: int) -> None:
        if turn != self._turn or self.replica.phase is not StepPhase.ASKING:
            return
        if self.is_at_end:
            self._come_in()
        else:
            self.begin()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._clock.after(delay_s, self.process, action)

    def _formed(self, formed: Answer) -> None:
        plan = self.replica.formed(formed)
        if plan is None:
            return
        self._oracle.formed(self, formed)
        self._plan = plan
        self.pending = None
        self._results, self._num_late = [], 0
        turn = self._turn
        if plan.serve:
            self._serve(outlives_step=True)
        self._receive(turn, plan)
        if formed.follows:
            if not formed.differs:
                self._oracle.follows(self)
            self._load_then(turn, lambda: self._end_following(turn))
            return
        if self.is_at_end:  # nobody is at work whose state it could get, or it leaves
            self.replica.learned()
            if self.replica.is_leaving:
                self._next()
            else:
                self._goes_on()
            return
        if plan.configure and isinstance(formed, QuorumFormed):
            if self._handle is not None:
                self._collectives.abort(self._handle)
            self._handle = self._collectives.configure(
                (formed.meets.place or formed.quorum_id, formed.epoch, self.rank),
                formed.replica_rank,
                formed.replica_world_size,
                self.process,
                lambda: self._configured(turn),
                lambda: self._configure_failed(turn),
            )
        else:
            self._configured(turn)

    def _end_following(self, turn: int) -> None:
        """It has received a state outside of the quorum, or not: it asks again."""
        if turn != self._turn or self.replica.phase is not StepPhase.TRAINING:
            return
        is_corrected = self.replica.is_waited_for
        if self._plan is not None and self.replica.version == self._plan.formed.version and not is_corrected:
            self._distance.followed()
        last = self.replica.quorum
        is_held = last is not None and last.held and self.is_at_end
        self.replica.learned()
        if is_held and not self.replica.is_behind and not self.replica.is_leaving:
            self._goes_on()
        elif is_corrected and not is_held:
            self._later(0.0, lambda: self._asks_anew() if turn == self._turn else None)
        else:
            self._next()

    def _asks_anew(self) -> None:
        """It has loaded what differed before the step, and asks for that again."""
        self.begin()

    def _configured(self, turn: int) -> None:
        if turn != self._turn or self._plan is None:
            return
        if self.replica.error is None:
            self.replica.configure_finished()
        if not self.replica.is_learner and self.by_microbatches:
            self._deal(self._plan.formed)
        self._load_then(turn, lambda: self._forward(turn))

    def _configure_failed(self, turn: int) -> None:
        if turn == self._turn:
            self.replica.cannot_connect()
            self.replica.fail("could not connect")
            self.replica.collectives_failed()
            self._load_then(turn, lambda: self._forward(turn))

    def _drawn(self, what: str) -> float:
        """A random number; the same at all ranks of a group if their loop takes turns: else they would be at different ones."""
        if len(self._settings.turns) == 1 or self._plan is None:
            return self._rng.random()
        formed = self._plan.formed
        return Random(f"{self.replica_id} {formed.quorum_id} {formed.version.step} {what}").random()

    def _forward(self, turn: int) -> None:
        def done() -> None:
            if turn != self._turn:
                return
            is_whole = self._own_rng.random() > self._moods.step_error and self._moods.abandon < 1.0
            self._compute(to_the_end=is_whole)
            if self._drawn("abandons") < self._moods.abandon:
                self.begin()  # `continue` in the training loop
                return
            self._leave_out(turn)
            if self._rng.random() < self._moods.step_error:
                self.replica.fail("something went wrong in the step")
            self._allreduce(turn)

        self._later(self._rng.uniform(*self._settings.compute_s) * self._moods.slowness, done)

    def _allreduce(self, turn: int) -> None:
        if turn != self._turn or self._plan is None:
            return
        formed, replica = self._plan.formed, self.replica
        if replica.error is not None and len(self._results) < self._settings.num_allreduces:
            replica.collectives_failed()  # it enters no collective any more, in which the others will wait
        if replica.error is not None or self._handle is None or len(self._results) == self._settings.num_allreduces:
            self._finish(turn)
            return
        network = self._settings.turns[self._place]
        contribution: object = network  # zeros for its gradients
        if replica.participating_rank is not None:
            self._oracle.contributes(self)
            read = (self._num_left_out, replica.is_on_trial)
            contribution = (self.replica_id, self._rng.getrandbits(32), network, read)
            if self.by_microbatches and not self._results:
                self._compute(to_the_end=True)
                if sorted(self._computed.nodes) != cover(self._mine, NUM_MICROBATCHES):
                    self._oracle.fail(f"{self.address} has {self._computed.nodes}, and was dealt {self._mine}")
                contribution += (dict(self._computed.nodes),)

        def done(result: tuple[object, ...] | None) -> None:
            if turn != self._turn:
                return
            if result is None:
                replica.fail("a collective failed")
                replica.collectives_failed()
            elif len({part[2] if isinstance(part, tuple) else part for part in result}) > 1:
                replica.fail("gradients of different networks were to be averaged")
                replica.collectives_failed()
            else:
                is_whole = self.by_microbatches and replica.participating_rank is not None
                if is_whole and not self._results and not self._settings.replica.fixed_with_spares:
                    self._check_sum(result)
                self._read = [part[3] for part in result if isinstance(part, tuple)]
                self._results.append(tuple(part[:3] if isinstance(part, tuple) else part for part in result))
            self._allreduce(turn)

        timeout_s = self._collective_timeout_s(formed)
        self._collectives.allreduce(self._handle, formed.version.step, contribution, done, timeout_s)

    def _collective_timeout_s(self, formed: Answer) -> float | None:
        return None

    def _finish(self, turn: int) -> None:
        self._vote(turn)

    def _vote(self, turn: int) -> None:
        if turn != self._turn or self.replica.phase is not StepPhase.TRAINING:
            return
        vote = self.replica.vote(num_collectives=len(self._results), state_digest=self._digest)
        if vote.approve and len(self._results) != self._settings.num_allreduces:
            self._oracle.fail(f"{self.address} approves without the sum: {vote}")
        self._oracle.votes(self, vote)
        if self.replica.is_learner:
            self.replica.learned()
            self._next()
            return
        self._send(vote)
        self._await_decision(turn, vote)

    def _await_decision(self, turn: int, vote: CommitVote) -> None:
        unknown = CommitUnknown(quorum_id=vote.quorum_id, epoch=vote.epoch, step=vote.step)

        def give_up() -> None:
            if turn == self._turn and self.replica.phase is StepPhase.VOTED:
                self._send(unknown)

        is_impatient = self._rng.random() < self._moods.impatience
        self._later(self._settings.decision_timeout_s * self._rng.uniform(0.0 if is_impatient else 1.0, 1.2), give_up)

    def _take(self, value: object) -> None:
        """The state is another one, and has drifted as far as before, or further."""
        drift = self.held >> VALUE_BITS if isinstance(self.held, int) else 0
        rate, place = (self._moods.uses_state, 0) if self._is_new else (self._moods.drift, self._rng.randrange(4))
        self._is_new = False
        if rate and self._rng.random() < rate:
            drift ^= 1 << place  # all that come in use the same
        self.held = value | drift << VALUE_BITS if isinstance(value, int) else value

    def _next(self) -> None:
        self._turn += 1
        if self._plan is not None and not self.is_at_end:
            self._kinds.append(self._settings.turns[self._place])
            self._place = (self._place + 1) % len(self._settings.turns)
        if self.replica.is_leaving:
            self._go_away()
        elif self._may_come_in():
            self._come_in()
        else:
            self._reduce_late(self._turn)

    # -------------------------------------------------------------------------------------------------------- leaving

    def wish_to_leave(self) -> None:
        """SIGTERM."""
        self._send(LeaveWish(reason="SIGTERM"))
        self._later(LEAVE_WITHIN_S, lambda: self._send(Leave(as_wished=True)))

    def _go_away(self) -> None:
        """The last step is over, as it is for all ranks of the group: save, and leave."""
        if self._goes_away:
            return
        self._goes_away = True
        if self._plan is not None:
            self._oracle.leaves(self, self._plan.formed)
        self._send(LeaveWish(is_told=True, issued=[len(self._results) + self._num_late]))
        self._later(self._rng.uniform(0.0, 1.0), lambda: self._send(Leave(as_wished=True)))

    def _reduce_late(self, turn: int) -> None:
        """Between two steps: average something for the log, unless this loop does not care for it now; then begin the next."""
        replica, index = self.replica, len(self._results) + self._num_late
        is_skipped = Random(f"{self.replica_id} {replica.version.step} {index}").random() < self._moods.skips_late
        is_done = self._num_late >= self._settings.num_late or is_skipped  # by all ranks of a group alike
        if is_done or self._handle is None or replica.quorum is None or not replica.can_reduce:
            self._later(self._rng.uniform(0.001, 0.01), lambda: self.begin() if turn == self._turn else None)
            return
        wait = CollectiveWait(
            quorum_id=replica.quorum.quorum_id, step=replica.quorum.version.step, index=index, digest=str(index)
        )
        began_at, is_open = self._clock.now, True

        def report() -> None:
            if is_open and turn == self._turn:
                self._send(wait)

        def done(result: tuple[object, ...] | None) -> None:
            nonlocal is_open
            is_open = False
            waited_s, limit_s = self._clock.now - began_at, self._settings.late_limit_s
            if turn != self._turn:
                return
            if result is None:
                replica.collectives_failed()
                if limit_s is not None and waited_s > limit_s:
                    self._oracle.fail(f"{self.address} waited {waited_s:.2f} s for {wait}, and nobody came")
            self._reduce_late(turn)

        self._num_late += 1
        self._later(REPORT_WAIT_S, report)
        self._collectives.allreduce(self._handle, replica.quorum.version.step, ("late", index), done)

    # -------------------------------------------------------------------------------------------------------- healing

    def _receive(self, turn: int, plan: StepPlan) -> None:
        """Begin to fetch what the quorum wants this rank to load, if it does."""
        formed = plan.formed
        self._is_receiving, self._is_cancelled = plan.load and self._waits, False
        if not plan.load:
            self._say_fetched(formed)
        elif not self._waits:
            self.replica.fail("it lacks the newest state, and did not wait for the quorum to get it")
            self._say_fetched(formed, "it did not wait for the quorum")
        else:
            source = formed.sources[0].checkpoint_addresses[self.rank]
            tell = (lambda reach_s: self._tell(turn, formed, reach_s)) if self._settings.tells_reach else None
            part = self._distance.lacking_bytes(*self._sizes()) / 1000
            self._transfers.fetch(
                source, formed.version, self.process, lambda a, s: self._arrived(turn, a, s), tell, part
            )

    def _say_fetched(self, formed: Answer, failure: str = "", *, loads: bool = False) -> None:
        """All ranks of the group load the state, or none does."""
        if not failure:
            self._oracle.has_fetched(self, formed.version)
        if formed.role is not Role.HEALTHY and not self.is_alone:
            self._send(StateArrived(request_id=formed.request_id, failure=failure, loads=loads))

    def _tell(self, turn: int, formed: Answer, reach_s: float, does: Receives = Receives.TRANSFER) -> None:
        if turn == self._turn and not self._is_cancelled:
            said = JoinProgress(quorum_id=formed.quorum_id, step=formed.version.step, reach_s=reach_s, does=does)
            self._send(said)

    def _arrived(self, turn: int, arrival: Arrival, snapshot: Snapshot | None) -> None:
        if turn == self._turn and self._plan is not None:
            formed = self._plan.formed
            self._arrival = (arrival, snapshot)
            if self._settings.tells_reach and arrival is not Arrival.FAILED:
                self._tell(turn, formed, 0.0)
            self._say_fetched(formed, "" if arrival is not Arrival.FAILED else "the transfer failed", loads=True)
            self._check_load()

    def _load_then(self, turn: int, then: Callable[[], None]) -> None:
        """Load the state when it is here, at all ranks of the group, and go on; or go on without it."""
        formed = None if self._plan is None else self._plan.formed
        if not self._is_receiving and (formed is None or not formed.held or self.is_alone):
            then()
            return

        def give_up() -> None:
            if turn == self._turn and self._after_load is not None:
                self._is_cancelled = True
                self._check_load()

        self._after_load = lambda: self._load(then)
        if not self.is_alone:
            self._later(self._settings.quorum_timeout_s, give_up)
        self._check_load()

    def _check_load(self) -> None:
        is_here = self._arrival is not None or not self._is_receiving
        has_failed = self._arrival is not None and self._arrival[0] is Arrival.FAILED
        is_agreed = self.is_alone or self._told is not None
        if self._after_load is not None and (self._is_cancelled or has_failed or (is_here and is_agreed)):
            action, self._after_load = self._after_load, None
            action()

    def _load(self, then: Callable[[], None]) -> None:
        takes_s = self._load_s if self._may_load() else 0.0
        self._told_load_s = takes_s or self._told_load_s
        self._go_on_loading(self._turn, takes_s, lambda: self._end_load(then))

    def _may_load(self) -> bool:
        is_here = self._arrival is not None and self._arrival[0] is not Arrival.FAILED
        return is_here and not self._is_cancelled and not (self._told is not None and self._told.failure)

    def _go_on_loading(self, turn: int, left_s: float, then: Callable[[], None]) -> None:
        if turn != self._turn or self._plan is None:
            return
        if left_s == 0.0:
            then()
            return
        if self._settings.tells_reach:
            self._tell(turn, self._plan.formed, left_s, Receives.LOADS)
        pause_s = min(left_s, _SAY_S)
        self._later(pause_s, lambda: self._go_on_loading(turn, left_s - pause_s, then))

    def _end_load(self, then: Callable[[], None]) -> None:
        if self._plan is None:
            return
        formed, is_receiving = self._plan.formed, self._is_receiving
        self._is_receiving = False
        if not is_receiving:
            if self._is_cancelled or self._told is None or self._told.failure:
                self.replica.fail("another rank of this group does not get the state")
        elif not self._may_load():
            self.replica.fail("the transfer failed")
        elif self._arrival is not None and (snapshot := self._arrival[1]) is not None:
            if formed.differs:
                self._transfers.withdraw(self.address)
            self.value = snapshot.value
            self._num_loads += 1
            self.replica.load_finished(formed.version)
            self._oracle.healed(self)
            self._oracle.was_given(self, snapshot)
            self._tell(self._turn, formed, 0.0, Receives.LOADS)
        else:
            self._distance.lost()
            self.value = ("torn", self._rng.getrandbits(32))
            self.replica.load_torn()
            if self._rng.random() < 0.5:
                self._stop("load_state_dict raised, and nobody caught it")
                return
            self.replica.fail("load_state_dict raised")
        then()

    # ------------------------------------------------------------------------------------------------------- messages

    def receive(self, message: GroupToRank) -> None:
        """Take a message of the group."""
        if isinstance(message, Answer):
            self._formed(message)
        elif isinstance(message, CommitDecided):
            self._decided(message)
        elif isinstance(message, CommitUnknown):
            vote_is_open = self.replica.is_open(
                CommitDecided(
                    quorum_id=message.quorum_id, epoch=message.epoch, step=message.step, outcome=Outcome.DISCARD
                )
            )
            if vote_is_open:
                self.replica.decision_unknown()
                self._made = None
                self.num_discarded += 1
                self._next()
        elif isinstance(message, QuorumBroken):
            if self.replica.broken(message) and self._handle is not None:
                self._collectives.abort(self._handle)
        elif isinstance(message, StateArrived):
            self._told_to_load(message)
        elif isinstance(message, JoinerWaiting):
            before = self.replica.version
            self.replica.joiner_waits(message)
            if self.replica.version != before:
                self._oracle.named(self)
            if message.num_held and self.replica.phase is StepPhase.ASKING and not self.is_at_end:
                self._serve()
        elif isinstance(message, ConnectBeside):
            self._connect_beside(message)
        elif isinstance(message, QuorumPending):
            self.pending = message
        elif isinstance(message, StateLocated):
            self.replica.located(message)
        elif isinstance(message, GroupBroken | Refused):
            self._stop(message.reason)
        elif isinstance(message, LeavesWanted):
            leaves = [Leaf(name="all", digest=self._digest)]
            self._send(LeafDigests(version=message.version, leaves=leaves))

    def _connect_beside(self, connect: ConnectBeside) -> None:
        epoch, _, _ = connect.place.partition("/")

        def done(failure: str) -> None:
            self._send(ConnectedBeside(place=connect.place, failure=failure))

        self._collectives.connect_beside(
            (connect.place, epoch, self.rank), connect.replica_rank, connect.replica_world_size, self.process, done
        )

    def _told_to_load(self, told: StateArrived) -> None:
        if self._plan is None or told.request_id != self._plan.formed.request_id:
            return
        self._told = told
        if self._after_agreement is not None:
            agreed, self._after_agreement = self._after_agreement, None
            agreed(told)
        else:
            self._check_load()

    def _decided(self, decided: CommitDecided) -> None:
        before = self.replica.version
        if decided.broken and self._handle is not None and self.replica.is_open(decided):
            self._collectives.abort(self._handle)
        outcome = self.replica.decided(decided)
        if outcome is None:
            self.replica.overtaken(decided)
            return
        self._made = self.replica.version if outcome is Outcome.COMMIT else None
        if outcome is Outcome.COMMIT:
            self._check_batches()
            value = self._oracle.next_value(self.value, tuple(self._results))
            self._oracle.commits(self, before, value, tuple(self._results))
            self._distance.lost()
            self._take(value)
            self.replica.took_step()
            self._oracle.hears_decision(self)
            self.last_commits.append(self.replica.version)
        else:
            self.last_commits.clear()
            if self._plan is not None and self._plan.formed.role is Role.HEALTHY:
                self.num_discarded += 1
        self._next()
