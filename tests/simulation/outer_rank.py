"""One rank of an outer loop (LocalSGD, DiLoCo): drives `core.coordination.replica` as the manager and `outer.loop` do together.

It trains alone for a long phase, asks for a quorum towards its end (`contributes`, with its patience), and takes the decision
at its very end. New, or left behind, it catches up beside the others' phases, gets what they have made meanwhile before they
begin their round (`at_end`), and then watches that (`contributes` False) before it trains itself. Its state is the trainer's: a
number, changed by committed rounds alone, offered to all at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from simulation.trainer import Trainer
from simulation.transfers import Arrival, Snapshot
from torchft_ckpt.core.coordination.messages import (
    Answer,
    CommitDecided,
    CommitUnknown,
    CommitVote,
    GroupToRank,
    LeaveAt,
    LetGo,
    Need,
    Outcome,
    StateLocated,
)
from torchft_ckpt.core.coordination.replica import StepFacts, StepPhase, StepWishes
from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundOutcome, after_vote

CATCH_UP_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterPace:
    """How one replica's outer loop goes. Durations in seconds."""

    phase_s: float = 1.0
    """From one round's end to the next, for this replica."""
    jitter: float = 0.05
    """How much longer a phase may be, as a part of it."""
    delay: float = 0.0
    """The last part of a phase, during which the average is on its way."""
    retries: int = 2
    late_vote_rate: float = 0.0
    """How often it votes at the phase's end only, and not when the average is there."""
    catch_up_s: float = 10.0

    @property
    def schedule(self) -> OuterSchedule:
        return OuterSchedule(sync_every=100, sync_delay=round(100 * self.delay))


class OuterRank(Trainer):
    """One rank of one incarnation, as `Trainer`. `pace` has to be set before it begins."""

    by_microbatches = False
    shows_state = False
    pace = OuterPace()
    is_at_work = False
    """It is in a phase that counts, or waits at its end: a full member."""
    began_at = 0.0
    phase_s = 0.0
    """How long the present phase is."""
    _number = 0
    """Of the phase."""
    _patience_s = 0.0
    _retries_left = 0
    _is_at_sync = _contributes = False
    _is_exchanged = False
    _answer: CommitDecided | CommitUnknown | None = None
    _located_for: int | None = None
    _cast: CommitVote | None = None
    _until = 0.0

    # ------------------------------------------------------------------------------------------------- into the job

    def begin(self) -> None:
        """Find the way into the job."""
        self.is_at_work = False
        self._number += 1
        if self.replica.is_behind:
            self._until = self._clock.now + self.pace.catch_up_s
            self._locate()
        else:
            self._offer()
            self._watch_round()

    def _go_away(self) -> None:
        self._number += 1  # of an inner step that is to come nothing follows
        super()._go_away()

    def _leave(self) -> int:
        """Abandon what is open. Returns the turn that begins."""
        self._turn += 1
        self.is_at_end = False
        self._leave_behind()
        self._answer, self._located_for = None, None
        self._is_exchanged = False
        if self._handle is not None and self._handle.waiting:
            self._collectives.abort(self._handle)
        self._oracle.may_hold(self)
        return self._turn

    def _locate(self) -> None:
        turn = self._leave()
        message = self.replica.locate()
        self._located_for = message.request_id
        self._send(message)
        self._later(self._until - self._clock.now, lambda: self._gives_up_catching_up(turn))
        self._may_abandon(turn)

    def _gives_up_catching_up(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._rng.random() < 0.3:
            self._stop("it could not catch up, and nobody caught that")
        else:
            self._watch_round()  # which names sources as well, and whoever is there then

    def _hears_where(self, located: StateLocated) -> None:
        if located.request_id != self._located_for:
            return
        self._located_for = None
        self.replica.located(located)
        if located.is_held or not located.version.proven:
            self._offer()
            self._watch_round()
        elif not located.sources:
            self._watch_round()
        elif located.version == self.replica.version:
            self._locate()  # another rank of this group has yet to load it
        else:
            turn = self._turn
            source = self._rng.choice(located.sources).checkpoint_addresses
            if not source:
                self._oracle.fail(f"{self.address} is told of a source without an address: {located}")
            self._transfers.fetch(
                source[self.rank], located.version, self.process, lambda a, v: self._fetched(turn, located, a, v)
            )

    def _fetched(self, turn: int, located: StateLocated, arrival: Arrival, snapshot: Snapshot | None) -> None:
        if turn != self._turn:
            return
        if snapshot is not None:
            self.value = snapshot.value
            self.replica.caught_up(located.version)
            self._oracle.healed(self)
            self._locate()
            return
        if arrival is Arrival.TORN:
            self.value = ("torn", self._rng.getrandbits(32))
            self.replica.load_torn()
            if self._rng.random() < 0.3:
                self._stop("load_state_dict raised, and nobody caught it")
                return
        pause_s = self._rng.uniform(0.5, 1.0) * CATCH_UP_PAUSE_S
        self._later(pause_s, lambda: self._locate() if turn == self._turn else None)

    def _watch_round(self) -> None:
        if self.replica.is_behind:
            self._come_in()
        else:
            self._ask_as(contributes=False)

    def _may_come_in(self) -> bool:
        return self.is_at_end and self.replica.is_behind

    def _come_in(self) -> None:
        if not self.replica.may_begin():
            self._next()
            return
        turn = self._leave()
        self.is_at_end = self._waits = True
        reach_s = self._reach_s() if self._settings.tells_reach else None
        facts = StepFacts(can_serve=True, at_end=True, need=Need(reach_s=reach_s))
        request = self.replica.begin(StepWishes(contributes=False, waits=True), facts)
        self._send(msgspec.structs.replace(request, checkpoint_addresses=[self.address]))
        self._may_abandon(turn)

    def _goes_on(self) -> None:
        self._ask_as(contributes=False)

    # --------------------------------------------------------------------------------------------------------- a phase

    def _begin_phase(self) -> None:
        pace = self.pace
        self.is_at_work = True
        self._number += 1
        self._turn += 1
        number = self._number
        self.began_at = self._clock.now
        self.phase_s = pace.phase_s * (1.0 + self._rng.uniform(0.0, pace.jitter))
        self._retries_left = pace.retries
        self._is_at_sync = False
        self._offer()

        def in_phase(action: Callable[[], None]) -> Callable[[], None]:
            return lambda: action() if number == self._number else None

        self._later(self.phase_s * (1.0 - pace.delay), in_phase(self._prepare_first))
        self._later(self.phase_s, in_phase(self._come_to_sync))

    def _prepare_first(self) -> None:
        self._patience_s = self.pace.schedule.patience_s(self._clock.now - self.began_at)
        self._prepare()

    def _prepare(self) -> None:
        self._ask_as(contributes=True)

    def _asks_anew(self) -> None:
        self._ask_as(contributes=self._contributes)

    def _come_to_sync(self) -> None:
        self._is_at_sync = True
        self._sync()

    def _ask_as(self, *, contributes: bool) -> None:
        if not self.replica.may_begin():
            self._next()
            return
        turn, self._contributes = self._leave(), contributes
        patience_s = self._patience_s if contributes else 0.0
        shown = self._shown() if contributes else []
        self._waits = not contributes or bool(shown)
        self._digest = f"{self.held:x}" if contributes and self.replica.is_checked else ""
        request = self.replica.begin(
            StepWishes(contributes=contributes, patience_s=patience_s, waits=not contributes),
            StepFacts(
                can_serve=True,
                shown=shown,
            ),
        )
        self._send(msgspec.structs.replace(request, checkpoint_addresses=[self.address]))
        self._may_abandon(turn)

    def _may_abandon(self, turn: int) -> None:
        """Somewhere in what begins now, maybe, it begins anew."""
        if self._rng.random() >= self._moods.abandon:
            return
        again = self._prepare if self.is_at_work and self._rng.random() < 0.5 else self.begin

        def abandon() -> None:
            # A decision that the others of its group follow is not overlooked: each of them waits for it.
            is_free = self.is_alone or self.replica.phase is not StepPhase.VOTED
            if turn == self._turn and is_free and self._moods.abandon > 0.0:
                again()

        self._later(self._rng.uniform(0.0, 1.5) * self.pace.phase_s, abandon)

    # ------------------------------------------------------------------------------------------------------- its round

    def _collective_timeout_s(self, formed: Answer) -> float | None:
        return max(self._settings.decision_timeout_s, formed.patience_s)

    def _forward(self, turn: int) -> None:
        """The quorum is there, and connected or not."""
        if turn != self._turn:
            return
        if not self.is_at_work and self.replica.participating_rank is not None:
            self._begin_phase()  # nobody trains yet: this round begins here, and is asked for anew
            return
        if self._rng.random() < self._moods.step_error:
            self.replica.fail("something went wrong in the round")
        self._allreduce(turn)

    def _finish(self, turn: int) -> None:
        """The averages are there, or never will be."""
        self._is_exchanged = True
        is_late = self._rng.random() < self.pace.late_vote_rate
        if self.is_at_work and not self._is_at_sync and not is_late:
            self._vote(turn)
        self._sync()

    def _sync(self) -> None:
        """Where the phase is over and the averages are there: vote, and take the decision."""
        turn = self._turn
        if not self._is_exchanged or (self.is_at_work and not self._is_at_sync):
            return
        self._vote(turn)
        self._take_answer()
        vote = self._cast
        if self.replica.phase is not StepPhase.VOTED or vote is None or turn != self._turn:
            return
        formed = self.replica.quorum
        patience_s = formed.patience_s if formed is not None else 0.0
        unknown = CommitUnknown(quorum_id=vote.quorum_id, epoch=vote.epoch, step=vote.step)

        def give_up() -> None:
            if turn == self._turn and self.replica.phase is StepPhase.VOTED:
                self._send(unknown)

        is_impatient = self._rng.random() < self._moods.impatience
        limit_s = max(self._settings.decision_timeout_s, patience_s)
        self._later(limit_s * self._rng.uniform(0.0 if is_impatient else 1.0, 1.2), give_up)

    def _await_decision(self, turn: int, vote: CommitVote) -> None:
        self._cast = vote  # not waited for before the phase is over

    def _take_answer(self) -> None:
        """The decision is known here, maybe for long."""
        answer = self._answer
        if answer is None or not self._is_exchanged or (self.is_at_work and not self._is_at_sync):
            return
        before = self.replica.version
        outcome: Outcome | None = Outcome.DISCARD
        if isinstance(answer, CommitDecided):
            outcome = self.replica.decided(answer)
            if outcome is None:
                self._oracle.fail(f"{self.address} has an answer to another vote: {answer}")
        else:
            self.replica.decision_unknown()
        is_committed = outcome is Outcome.COMMIT
        if is_committed:
            sums = tuple(self._results)
            value = self._oracle.next_value(self.value, sums)
            self._oracle.commits(self, before, value, sums)
            self._take(value)
            self.replica.took_step()
            self.last_commits.append(self.replica.version)
        else:
            self.last_commits.clear()
            if self.is_at_work:
                self.num_discarded += 1
        self._go_on(is_committed)

    def _go_on(self, is_committed: bool) -> None:
        self._answer, self._is_exchanged = None, False
        if self.replica.is_leaving:
            self._next()
            return
        if not self.is_at_work:
            if is_committed:
                self._begin_phase()
            else:
                self.begin()
            return
        verdict = after_vote(committed=is_committed, is_behind=self.replica.is_behind, retries_left=self._retries_left)
        if verdict is RoundOutcome.REJOIN:
            self.begin()
        elif verdict is RoundOutcome.RETRY:
            self._retries_left -= 1
            self._prepare()
        else:
            self._begin_phase()

    def _offer(self) -> None:
        """Serve this state to whoever asks, until it changes."""
        if self.replica.version.proven and not self.replica.is_behind:
            self._transfers.serve(self.address, Snapshot(self.replica.version, self.held, self.process))

    # ------------------------------------------------------------------------------------------------------- messages

    def receive(self, message: GroupToRank) -> None:
        """Take a message of the group."""
        if isinstance(message, StateLocated):
            self._hears_where(message)
        elif isinstance(message, LetGo) and self.is_alone:  # groups of several are as loops that do not ask
            self._send(LeaveAt(call=1))
        elif isinstance(message, LeaveAt) and self.replica.is_between_steps:
            self._turn += 1
            self.replica.left_between_steps()
            self._go_away()
        elif isinstance(message, CommitDecided):
            if self.replica.is_open(message):
                self._answer = message
                self._take_answer()
            else:
                self.replica.overtaken(message)
        elif isinstance(message, CommitUnknown):
            if self.replica.phase is StepPhase.VOTED and self._answer is None:
                self._answer = message
                self._take_answer()
        else:
            super().receive(message)
