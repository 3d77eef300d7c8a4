"""This rank's half of the coordination of a step: it asks, votes and waits on the training thread, and hears on another one.

One lock guards the replica's state (`core.coordination.replica`) and the messages that came in; a thread that waits for an
answer waits for a change of them. The coordination thread only notes a message; where the message asks for something at once
(abort, cancel), that thread does it after it has released the lock. Nothing is sent and nobody is waited for with the lock
held.

Whoever else wants to know what this replica is reads `view`: one frozen whole, replaced under the lock with every change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import msgspec

from torchft_ckpt.core.coordination.meeting import Claim
from torchft_ckpt.core.coordination.messages import (
    Answer,
    CollectiveCleared,
    CollectiveWait,
    CommitDecided,
    CommitUnknown,
    CommitVote,
    ConnectBeside,
    GroupBroken,
    GroupToRank,
    Hello,
    JoinerWaiting,
    LeafDigests,
    Leave,
    LeaveAt,
    LeavesWanted,
    LetGo,
    LocateState,
    LostAsked,
    LostTold,
    Needed,
    Outcome,
    QuorumBroken,
    QuorumPending,
    QuorumRequest,
    RankToGroup,
    RankWord,
    Refused,
    ReplicasDiffer,
    StateArrived,
    StateLocated,
    StateVersion,
    clip,
)
from torchft_ckpt.core.coordination.replica import (
    ReplicaSettings,
    ReplicaState,
    ReplicaView,
    StepFacts,
    StepPhase,
    StepPlan,
    StepWishes,
)
from torchft_ckpt.core.coordination.waiting import Phase
from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.errors import (
    CollectiveFailedError,
    CommitUnknownError,
    CoordinationError,
    GroupBrokenError,
    GroupLeftError,
    JobFinishedError,
    ProcessGroupError,
    QuorumTimeoutError,
    RefusedError,
    ReplicasDifferError,
    SourceLostError,
    TransferTimeoutError,
)
from torchft_ckpt.events import PeerLost
from torchft_ckpt.manager.clearing import Issued
from torchft_ckpt.manager.collectives import ExceptionWithTraceback
from torchft_ckpt.manager.event_queue import EventQueue
from torchft_ckpt.manager.rank_config import Link, RankConfig, open_link
from torchft_ckpt.manager.timekeeping import Timekeeper
from torchft_ckpt.threads import Condition

logger = logging.getLogger(__name__)

PENDING_LOG_S = 10.0
"""How often to say what is waited for; the first time after a fifth of it."""
_LOOK_S = 0.1
"""How often who waits for a quorum looks whether the lighthouse is there."""
MORE, LAST, FAILS = "+.!"
"""At the begin of a word of a rank: another piece follows, or none; it does not go on."""
_WORDS_CHARS = 1 << 20
"""Of what all ranks of a group say at once, in one message to each."""
GIVE_UP_GRACE_S = 5.0
"""How long the group's rank 0 may take to say that the decision is not known."""


class SharedReplica:
    """This rank's `ReplicaState`: a `with` block changes it, under the client's lock, and `view` is the result, without the lock.

    The client says `with self._lock, self._replica`: what interrupts the block, or this class, frees the lock.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._state = ReplicaState(settings)
        self.view = self._state.view()

    def __enter__(self) -> ReplicaState:
        return self._state

    def __exit__(self, *_: object) -> None:
        self.view = self._state.view()


class StepClient:
    """One rank's side of the coordination. Every method may be called from any thread.

    Where one raises `GroupBrokenError` or another error of this group alone, no later step can mend it.

    Args:
        replica_id, job: for log and errors.
        abort: called when collectives in flight cannot finish.
        cancel: called when what is being fetched is of no use any more.
        events: gets the loss of groups that train with this one.
        answer_leaves: says which leaves of the state have which digests, when the lighthouse asks.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        replica_id: str,
        *,
        job: str,
        abort: Callable[[], None],
        cancel: Callable[[], None],
        events: EventQueue,
        answer_leaves: Callable[[LeavesWanted], LeafDigests],
        timekeeper: Timekeeper,
    ) -> None:
        self.replica_id = replica_id
        self._job = job
        self._abort = abort
        self._cancel = cancel
        self._events = events
        self._answer_leaves = answer_leaves
        self._timekeeper = timekeeper
        self.metrics_address = ""
        """Where metrics are served, for whoever asks the lighthouse."""
        self._on_leaving: Callable[[GroupToRank], None]
        self._connect_beside: Callable[[ConnectBeside], None]
        self._lock = self._changed = Condition()
        self._replica = SharedReplica(settings)
        self._group_world_size = 1
        self.link: Link
        """The connection, once `connect` has returned."""
        self.owner: object = None
        """Is there for as long as the connection. A script may let go of its Manager and train on with the optimizer alone, or
        end: at exit the group then leaves the job instead of vanishing from it."""
        self._plan: StepPlan | None = None
        self._answer: CommitDecided | CommitUnknown | None = None
        self._pending: QuorumPending | None = None
        self._held_until = self._held_s = 0.0
        """Until then the quorum that this rank has asked for is held for others, as it was told last; and for so long it has been
        and will be, all in all."""
        self._num_held = 0
        """The quorum that this rank has asked for is held for so many groups, and it has yet to serve them the state of now."""
        self._located: StateLocated | None = None
        self._asked_where: LocateState | None = None
        self._lost: LostTold | None = None
        """What was last told of the groups that contributed to a step."""
        self._num_words = 0
        self._word: RankWord | None = None
        """What all ranks of the group have said last, once it is known."""
        self._fatal: CoordinationError | None = None
        self.has_told_main_thread = False
        """A method has raised a `GroupLeftError` on the main thread."""
        self._error: ExceptionWithTraceback | None = None
        self._cleared: int | None = None
        self.is_called = False
        """This group is a spare, and is to ask when it has a state: one of the others was lost, or another rank of it asks."""
        self._loading: list[StateArrived] = []
        """The messages that say when the group's ranks load what they fetch: at most two in a step."""

    def connect(
        self,
        rank_config: RankConfig,
        rank_0: Claim | None,
        *,
        on_leaving: Callable[[GroupToRank], None],
        connect_beside: Callable[[ConnectBeside], None],
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
    ) -> None:
        """Connect to the group, and at rank 0 to the lighthouse; call it once, before anything is sent.

        Args:
            on_leaving: called with what says that this group is to leave, or has left; it must not block.
            connect_beside: called if this rank is to connect beside the quorum; it must not block.

        Raises: as `open_link`.
        """
        self._on_leaving, self._connect_beside = on_leaving, connect_beside
        self._group_world_size = rank_config.group_world_size
        self.link = open_link(
            rank_config,
            rank_0,
            hello=self._hello,
            on_message=self._hear,
            on_refused=self.end,
            heartbeat_interval=heartbeat_interval,
            connect_timeout=connect_timeout,
        )

    def schedule(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call something later, on the connection's thread, which must not be blocked."""
        self.link.schedule(delay_s, call)

    def send(self, message: RankToGroup) -> None:
        """Send a message to the group; return at once."""
        self.link.send(message)

    def view(self) -> ReplicaView:
        """Return what this replica is."""
        return self._replica.view

    # ------------------------------------------------------------------------------------------------- the step begins

    def wants(self) -> tuple[bool, bool]:
        """Return whether the next quorum has to be waited for, and whether the state has to be captured before it."""
        with self._lock, self._replica as replica:
            self._raise_if_fatal()
            return replica.waits_for_quorum, replica.wants_capture

    def keeps_step(self, wishes: StepWishes, *, has_reduced: bool, is_loading: bool, joins_open: bool) -> bool:
        """See `ReplicaState.keeps_step`."""
        with self._lock, self._replica as replica:
            self._raise_if_fatal()
            return replica.keeps_step(wishes, has_reduced=has_reduced, is_loading=is_loading, joins_open=joins_open)

    def begins_again(self) -> None:
        with self._lock, self._replica as replica:
            replica.begins_again()

    def may_begin(self) -> bool:
        """See `ReplicaState.may_begin`."""
        with self._lock, self._replica as replica:
            return replica.may_begin()

    def begin(self, wishes: StepWishes, facts: StepFacts) -> QuorumRequest:
        """Begin a step; an open one is abandoned. Returns what to send."""
        with self._lock, self._replica as replica:
            self._forget_step()
            return replica.begin(wishes, facts)

    def _forget_step(self) -> None:
        self._plan = None
        self._answer = None
        self._pending = None
        self._held_until = self._held_s = 0.0
        self._num_held = 0
        self._error = None
        self._cleared = None
        self.is_called = False
        self._loading = []

    def locate(self, until: float, **says: Any) -> StateLocated | None:
        """Ask where the newest state is, and wait for the answer; None: there was none in time.

        An open step is abandoned. `says`: as in `LocateState`.
        """
        with self._lock, self._replica as replica:
            self._raise_if_fatal()
            self._forget_step()
            self._located = None
            asked = self._asked_where = replica.locate(**says)
        self.send(asked)
        self._wait_for(lambda: self._located is not None, until)
        return self._located

    def exchange(self, text: str) -> list[str]:
        """Tell all ranks of this group something, each of which tells the others something; return what all say, in their order.

        Where a rank does not go on (`say_why_not`) what it says is returned, and nothing of the others.

        Raises:
            SourceLostError: another rank asks for a step, and will not say anything.
        """
        if self._group_world_size == 1:
            return [text]
        at_once, said = max(_WORDS_CHARS // self._group_world_size, 1), [""] * self._group_world_size
        for at in count(0, at_once):
            kind = MORE if at + at_once < len(text) else LAST
            words = self._say(kind + text[at : at + at_once])
            if any(word[:1] == FAILS for word in words):
                return [word[1:] if word[:1] == FAILS else "" for word in words]
            said = [before + word[1:] for before, word in zip(said, words, strict=True)]
            if all(word[:1] == LAST for word in words):
                break
        return said

    def say_why_not(self, text: str, waits: bool) -> None:
        """Tell the other ranks, which wait for what this one has to say, why it does not go on. `waits`: until they have heard.

        Raises: as `exchange`, if it waits.
        """
        if self._group_world_size > 1:
            self._say(FAILS + text, waits=waits)

    def _say(self, word: str, *, waits: bool = True) -> list[str]:
        with self._lock:
            self._raise_if_fatal()
            self._word = None
            self._num_words += 1
            number = self._num_words
        self.send(RankWord(number=number, words=[word]))
        if not waits:
            return []
        return self._await_words()

    def _await_words(self) -> list[str]:
        """Wait for what all ranks say; say now and then for whom. A rank that dies ends the wait."""
        started = time.monotonic()
        say_at = started + PENDING_LOG_S / 5
        while not self._wait_for(lambda: self._word is not None, say_at):
            say_at += PENDING_LOG_S
            logger.warning(
                "%s of job %s has waited %.1f s for other ranks of this group to restore the checkpoint with it: %s",
                self.replica_id,
                self._job,
                time.monotonic() - started,
                self.link.waiting_for(),
            )
        answer = self._word
        if answer is None or answer.failure:
            why = "they say nothing" if answer is None else answer.failure
            raise SourceLostError(f"not all ranks of this group go on: {why}", self.replica_id)
        return answer.words

    def lost_contributors(self, version: StateVersion, *, asks: bool) -> list[int]:
        """Return which contributors to the step that led to a state are gone, by number, as far as the lighthouse has told.

        It never waits. `asks`: ask the lighthouse as well; the answer is there a moment later.
        """
        if asks:
            self.send(LostAsked(version=version))
        told = self._lost
        return [*told.contributors] if told is not None and told.version == version else []

    def contributor_names(self, version: StateVersion) -> list[str]:
        """Return the names of the groups that contributed to that step, by number, as far as `lost_contributors` has asked."""
        told = self._lost
        return [*told.group_names] if told is not None and told.version == version else []

    def pause(self, seconds: float) -> None:
        """Wait until something is heard, or so long."""
        with self._changed:
            self._raise_if_fatal()
            self._changed.wait(seconds)

    def rest(self, until: float) -> bool:
        """Wait as a spare that has its state; return whether it is to ask now: it is called, or leaves. Raises as `pause`."""
        return self._wait_for(lambda: self.is_called or self.view().is_leaving, until)

    def await_plan(
        self, limit: timedelta, retries: int | None, serve_held: Callable[[int], None] = lambda num_held: None
    ) -> StepPlan:
        """Wait for the quorum, saying now and then what for.

        Args:
            limit: of one attempt. The time for which the quorum is held for others is no part of it.
            retries: attempts after the first, None: no end.
            serve_held: called if the quorum is held for so many others, which come for the state of now.

        Raises:
            QuorumTimeoutError: no attempt is left.
        """
        started = time.monotonic()
        most_s = float("inf") if retries is None else limit.total_seconds() * (retries + 1)
        say_at = started + PENDING_LOG_S / 5
        with self._changed:
            while self._plan is None:
                self._raise_if_fatal()
                if self._num_held:
                    num_held, self._num_held = self._num_held, 0
                    self._lock.release()
                    try:
                        serve_held(num_held)
                    finally:
                        self._lock.acquire()
                    continue
                self._timekeeper.quorum_is_at(self._waits_for())
                now, held_s = time.monotonic(), self._held_s
                reason = self._pending.reason if self._pending is not None else self.link.waiting_for()
                give_up_at = started + most_s + held_s
                if now >= give_up_at:
                    held = f", besides {held_s:.1f} s for which it was held for others," if held_s else ""
                    raise QuorumTimeoutError(
                        f"no quorum within {now - started - held_s:.1f} s{held} ({reason}); quorum_timeout is"
                        f" {limit.total_seconds():g} s, quorum_retries {retries}",
                        party=self.replica_id,
                    )
                if now >= say_at:
                    step, waited = self.view().version.step, now - started
                    logger.warning(
                        "%s of job %s has waited %.1f s for a quorum at step %d: %s",
                        self.replica_id,
                        self._job,
                        waited,
                        step,
                        reason,
                    )
                    say_at = now + PENDING_LOG_S
                self._changed.wait(min(say_at, give_up_at, now + _LOOK_S) - now)
            return self._plan

    def _waits_for(self) -> Waits:
        """Return why there is no quorum yet. With the lock held."""
        pending = self._pending
        if self.link.is_lighthouse_away:
            return Waits.LIGHTHOUSE
        if pending is not None and pending.is_below_minimum:
            return Waits.MINIMUM
        return Waits.NEWCOMER if time.monotonic() < self._held_until else Waits.QUORUM

    def plan(self) -> StepPlan | None:
        """Return the plan of the open step, once there is one."""
        return self._plan

    def configured(self, formed: Answer) -> None:
        """The process group is ready for a quorum, unless the step has failed meanwhile."""
        with self._lock, self._replica as replica:
            if self._plan is not None and self._plan.formed is formed and replica.error is None:
                replica.configure_finished()

    def await_loading(self, limit: timedelta) -> None:
        """Wait until all ranks of this group have fetched the state.

        Raises:
            SourceLostError: one of them will not have it, so none of them loads it.
            TransferTimeoutError: not all of them said so in time.
        """
        heard = self._loading
        give_up_at = time.monotonic() + limit.total_seconds()
        if not self._wait_for(lambda: bool(heard), give_up_at):
            raise TransferTimeoutError(
                f"not all ranks of this group had fetched the state within {limit.total_seconds():g} s",
                self.replica_id,
            )
        if heard[-1].failure:
            raise SourceLostError(f"no rank of this group loads the state: {heard[-1].failure}", self.replica_id)

    def agree_to_load_again(self, limit: timedelta, *, loads: bool, failure: str = "") -> bool:
        """Tell the other ranks whether this one loads the state again that all of them have loaded; return whether one does.

        Raises:
            SourceLostError, TransferTimeoutError: no rank may load it, as not all of them can.
        """
        heard, plan = self._loading, self._plan
        num_heard, give_up_at = len(heard), time.monotonic() + limit.total_seconds()
        if plan is not None:
            request_id = plan.formed.request_id
            self.send(StateArrived(request_id=request_id, failure=clip(failure), loads=loads, again=True))
            self._wait_for(lambda: len(heard) > num_heard, give_up_at)
        if len(heard) == num_heard:
            raise TransferTimeoutError("not all ranks of this group have said whether they load again", self.replica_id)
        if heard[-1].failure:
            raise SourceLostError(f"no rank of this group loads the state again: {heard[-1].failure}", self.replica_id)
        return heard[-1].loads

    def load_torn(self) -> None:
        """Loading failed half-way."""
        with self._lock, self._replica as replica:
            replica.load_torn()

    def load_finished(self, version: StateVersion) -> None:
        """See `ReplicaState.load_finished`."""
        with self._lock, self._replica as replica:
            replica.load_finished(version)

    def caught_up(self, version: StateVersion) -> None:
        """See `ReplicaState.caught_up`."""
        with self._lock, self._replica as replica:
            replica.caught_up(version)

    def restored(self, step: int) -> None:
        """See `ReplicaState.restore`."""
        with self._lock, self._replica as replica:
            replica.restore(step)

    def changes_state(self, *, by_optimizer: bool) -> None:
        """The state is about to change, perhaps by an optimizer of the loop."""
        with self._lock, self._replica as replica:
            replica.state_changed()
            replica.takes_step(again=by_optimizer)

    def has_to_take_step(self) -> bool:
        """Whether a step is decided and not yet taken. `view` may not say so, if an interrupt came in the way of that."""
        with self._lock, self._replica as replica:
            return replica.held != replica.version

    def took_step(self) -> None:
        """See `ReplicaState.took_step`."""
        with self._lock, self._replica as replica:
            replica.took_step()

    # ----------------------------------------------------------------------------------------------- what goes wrong

    def error(self) -> ExceptionWithTraceback | None:
        """Return the first error of the open step; after a lost connection, the one that says whose, once that is known."""
        return self._error

    def has_failed(self) -> bool:
        """Return whether collectives are of no use now: the open step cannot count any more, or, when it has been voted on, the
        process group cannot be used any more."""
        return not self.view().can_reduce

    def skips_collective(self) -> bool:
        """Return whether a collective has to be left out (`has_failed`).

        The others wait for it in vain then: the process group cannot be used again.
        """
        if not self.has_failed():
            return False
        with self._lock, self._replica as replica:
            replica.collectives_failed()
        return True

    def note_found(self, what: str) -> None:
        """The vote on the open step is to say this, whatever the vote is."""
        with self._lock, self._replica as replica:
            replica.found = what

    def note_error(self, error: Exception) -> None:
        """Something went wrong that ends the step."""
        with self._lock, self._replica as replica:
            self._note_error(replica, error)

    def note_collective_error(self, error: Exception, *, connects: bool = False) -> None:
        """A collective failed: the process group cannot be used again, and a step that was not voted on yet cannot count.

        `connects`: the process group could not be made.
        """
        with self._lock, self._replica as replica:
            is_first = self._error is None
            if connects:
                replica.cannot_connect()
            self._note_error(replica, error)
            replica.collectives_failed()
            is_late = replica.is_voted_on
        if is_first:
            ends = "it was issued after the vote, the step stands" if is_late else "the step will be discarded"
            logger.info("%s: a collective failed, %s: %s", self.replica_id, ends, error)

    def report_wait(self, issued: Issued, *, deviates: bool = False) -> bool:
        """Tell the lighthouse that this rank waits in a collective of the step, or (`deviates`) for its start.

        Returns: whether a step is open, in which the lighthouse answers.
        """
        now = self.view()
        formed = now.quorum
        if formed is None or now.phase is StepPhase.ASKING:
            return False
        self.send(
            CollectiveWait(
                quorum_id=formed.quorum_id,
                step=formed.version.step,
                index=issued.index,
                digest=issued.digest,
                deviates=deviates,
                what=issued.what[:256],
            )
        )
        return True

    def ask_to_start(self, issued: Issued, timeout: timedelta) -> None:
        """Ask the lighthouse whether a collective may start, and wait until it may.

        Raises:
            CollectiveFailedError: the step has failed meanwhile, or the others did not come in time.
        """
        is_open = self.report_wait(issued, deviates=True)
        give_up_at = time.monotonic() + (timeout.total_seconds() if is_open else 0.0)
        with self._changed:
            while self._cleared != issued.index:
                self._raise_if_fatal()
                left_s = give_up_at - time.monotonic()
                if self.has_failed() or left_s <= 0:
                    raise CollectiveFailedError(
                        f"collective {issued.index + 1} of the step ({issued.what}) was not started: in earlier steps another"
                        " one came here, and not all groups asked for this one"
                    )
                self._changed.wait(left_s)

    def end(self, error: CoordinationError) -> None:
        """This group cannot go on: whoever waits here, now or later, gets the error."""
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()

    @property
    def has_left(self) -> bool:
        """Whether this group has left its job on purpose."""
        return isinstance(self._fatal, GroupLeftError)

    @property
    def is_over(self) -> bool:
        """Whether this group cannot go on, or has left."""
        return self._fatal is not None

    def leave_between_steps(self) -> None:
        """This rank leaves as if its last step had ended with that."""
        with self._lock, self._replica as replica:
            replica.left_between_steps()

    def leave(self, reason: str, until: float) -> None:
        """Say that this rank has nothing more to do in its job, and wait until all ranks of the group have said so."""
        self.send(Leave(reason, as_wished=True))
        with self._changed:
            while self._fatal is None and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)
        self.end(self._left_error(reason))

    def go(self, reason: str) -> None:
        """Leave now: whoever waits here, now or later, gets a `GroupLeftError`, and what is in flight is aborted."""
        self.send(Leave(reason, as_wished=True))
        self.end(self._left_error(reason))
        self._abort()

    def _left_error(self, reason: str) -> GroupLeftError:
        return GroupLeftError(f"replica group {self.replica_id} has left its job: {reason}", self.replica_id)

    def _note_error(self, replica: ReplicaState, error: Exception) -> None:
        lines = str(error).splitlines()
        replica.fail(f"{type(error).__name__}: {lines[0] if lines else ''}")
        if self._error is None:
            self._error = ExceptionWithTraceback(error)
        self._changed.notify_all()

    def _raise_if_fatal(self) -> None:
        if self._fatal is not None:
            if self.has_left:
                self.tells_that_it_left()
            raise self._fatal

    def tells_that_it_left(self) -> None:
        """A `GroupLeftError` is raised on this thread."""
        if threading.current_thread() is threading.main_thread():
            self.has_told_main_thread = True

    # ---------------------------------------------------------------------------------------------------- the step ends

    def vote(self, collectives: str, num_collectives: int, state_digest: str) -> CommitVote:
        """All work of the step is done: send the vote, unless this replica is beside the quorum, and return it.

        Args:
            collectives: a word for the collectives of the step in their order.
            num_collectives: how many they are.
            state_digest: as in `ReplicaState.vote`.
        """
        with self._lock, self._replica as replica:
            self._raise_if_fatal()
            vote = replica.vote(collectives, num_collectives, state_digest)
            is_learner = replica.is_learner
        spent = {phase: round(seconds, 4) for phase, seconds in self._timekeeper.phases(of_step=True).items()}
        vote = msgspec.structs.replace(vote, computed_s=spent[Phase.COMPUTE], reduced_s=spent[Phase.ALLREDUCE])
        if not is_learner:
            self.send(vote)
        return vote

    def learned(self) -> tuple[Outcome, str]:
        """End a step beside the quorum, which nobody else knows of; returns how, and why."""
        with self._lock, self._replica as replica:
            return replica.learned(), replica.error or ""

    def await_decision(self, vote: CommitVote, limit: timedelta) -> tuple[Outcome, str]:
        """Wait for the decision on what was voted on; returns how the step ended here, and why.

        No rank stops to wait on its own: at the limit the group is asked, and what it answers holds for all its ranks.
        """
        give_up_at = time.monotonic() + limit.total_seconds()
        if not self._wait_for(lambda: self._answer is not None, give_up_at):
            self.send(CommitUnknown(quorum_id=vote.quorum_id, epoch=vote.epoch, step=vote.step))
            self._wait_for(lambda: self._answer is not None, give_up_at + GIVE_UP_GRACE_S)
        with self._lock, self._replica as replica:
            answer = self._answer
            if isinstance(answer, CommitDecided):
                # What this rank saw, a collective that failed, may follow from what the others decided for.
                outcome = replica.decided(answer) or Outcome.DISCARD
                is_own = outcome is Outcome.LEFT_BEHIND and not vote.approve
                return outcome, (vote.reason if is_own else "") or answer.reason or vote.reason
            if answer is None:
                self._fatal = self._fatal or GroupBrokenError(
                    f"group rank 0 of {self.replica_id} does not answer; restart all ranks of the group",
                    self.replica_id,
                )
                self._raise_if_fatal()
            replica.decision_unknown()
        unknown = CommitUnknownError(
            f"step {vote.step} of quorum {vote.quorum_id} was voted on, and not decided within {limit.total_seconds():g} s;"
            " it is taken for discarded, and this replica heals if the others committed it",
            party=self.replica_id,
        )
        logger.warning("%s: %s", self.replica_id, unknown)
        return Outcome.DISCARD, vote.reason or "the decision is not known"

    def _wait_for(self, is_heard: Callable[[], bool], until: float) -> bool:
        """Wait at most until a moment on the monotonic clock; return whether it was heard."""
        with self._changed:
            while not is_heard():
                self._raise_if_fatal()
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    # ---------------------------------------------------------------------------------------- on the coordination thread

    def _hello(self) -> Hello:
        """Return what a lighthouse has to know that hears of this group for the first time."""
        with self._lock, self._replica as replica:
            return replica.hello(self.replica_id, self._group_world_size, self.metrics_address)

    def _hear(self, message: GroupToRank) -> None:
        """Note a message; abort or cancel where it says so. Never blocks."""
        with self._lock, self._replica as replica:
            abort, cancel = self._note(replica, message)
            self._changed.notify_all()
        if abort:
            logger.info("%s: aborting collectives: %s", self.replica_id, abort)
            self._abort()
        if cancel:
            self._cancel()
        is_told = isinstance(message, CommitDecided | Answer) and message.leaving
        if is_told or isinstance(message, LetGo | LeaveAt | GroupBroken):
            self._on_leaving(message)
        if isinstance(message, LeavesWanted):
            self.send(self._answer_leaves(message))
        elif isinstance(message, ConnectBeside):
            self._connect_beside(message)
        elif isinstance(message, ReplicasDiffer) and not message.stops:
            logger.warning("%s: %s", self.replica_id, message.reason)

    def _note(self, replica: ReplicaState, message: GroupToRank) -> tuple[str, bool]:
        """Returns why to abort, if so, and whether to cancel."""
        if isinstance(message, Answer):
            self._plan = replica.formed(message) or self._plan
        elif isinstance(message, CommitDecided):
            if replica.is_open(message):
                self._answer = message
                return f"they are broken: {message.reason}" if message.broken else "", False
            replica.overtaken(message)
        elif isinstance(message, CommitUnknown):
            if replica.phase is StepPhase.VOTED and self._answer is None:
                self._answer = message
        elif isinstance(message, QuorumBroken):
            self._note_loss(replica, message)
            if replica.broken(message):
                first = self._error.original_exception if self._error is not None else None
                if first is None or isinstance(first, CollectiveFailedError):  # a lost connection names nobody
                    error = ProcessGroupError(f"quorum {message.quorum_id} broke: {message.reason}", message.replica_id)
                    error.__cause__ = first
                    self._error = ExceptionWithTraceback(error)
                return message.reason, False
        elif isinstance(message, StateLocated):
            if self._asked_where is not None and message.request_id == self._asked_where.request_id:
                self._asked_where = None
                replica.located(message)
                self._located = message
        elif isinstance(message, LostTold):
            self._lost = message
        elif isinstance(message, RankWord):
            self._word = message if message.number == self._num_words else self._word
        elif isinstance(message, CollectiveCleared):
            formed = replica.quorum
            if formed is not None and (formed.quorum_id, formed.version.step) == (message.quorum_id, message.step):
                self._cleared = message.index
        elif isinstance(message, StateArrived):
            if self._plan is not None and self._plan.formed.request_id == message.request_id:
                self._loading.append(message)
        elif isinstance(message, QuorumPending):
            self._pending, now = message, time.monotonic()
            self._held_s += now + message.held_s - max(self._held_until, now)
            self._held_until = now + message.held_s
        elif isinstance(message, Needed):
            if replica.follows:
                self.is_called = True
                logger.info("%s is called: %s", self.replica_id, message.reason)
        elif isinstance(message, LetGo):
            if replica.follows:  # it computes no step at whose end it could leave
                replica.left_between_steps()
        elif isinstance(message, JoinerWaiting):
            replica.joiner_waits(message)
            self._num_held += message.num_held if replica.phase is StepPhase.ASKING else 0
        elif isinstance(message, Refused):
            is_over = message.code == "finished"
            self._fatal = self._fatal or (
                JobFinishedError(message.reason, self.replica_id, message.step)
                if is_over
                else RefusedError(message.reason, self.replica_id)
            )
        elif isinstance(message, ReplicasDiffer) and message.stops:
            self._fatal = self._fatal or ReplicasDifferError(message.reason, self.replica_id)
            return message.reason, True
        elif isinstance(message, GroupBroken) and (message.has_left or replica.is_leaving):
            self._fatal = self._fatal or self._left_error(message.reason)
            return message.reason, True
        elif isinstance(message, GroupBroken):
            self._fatal = self._fatal or GroupBrokenError(
                f"replica group {self.replica_id} cannot go on, restart all of its ranks: {message.reason}",
                party=self.replica_id,
            )
            return message.reason, True
        return "", False

    def _note_loss(self, replica: ReplicaState, broken: QuorumBroken) -> None:
        formed, peer = replica.quorum, broken.replica_id
        if broken.lost and peer != self.replica_id and formed is not None and formed.quorum_id == broken.quorum_id:
            self._events.add(
                PeerLost(
                    step=replica.version.step,
                    quorum_id=broken.quorum_id,
                    replica_id=self.replica_id,
                    peer=peer,
                    reason=broken.reason,
                )
            )
