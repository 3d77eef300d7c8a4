"""One step of this rank, from `start_quorum` to the decision on it.

Two threads meet here. The training thread begins the step, reduces and votes. The quorum thread waits for the quorum, begins to
serve or to fetch, and connects the process group, which may go on beside the forward pass. What this replica may do is decided by
`core.coordination.replica`; this file carries it out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed import ReduceOp, Work
from torch.profiler import record_function

from torchft_ckpt.checkpointing import CheckpointTransport
from torchft_ckpt.checkpointing.state.samples import marks
from torchft_ckpt.checkpointing.state.versions import Counted, is_changed
from torchft_ckpt.core.coordination.messages import (
    MAX_TURNS,
    Answer,
    CommitVote,
    ConnectBeside,
    ConnectedBeside,
    Layout,
    Need,
    Outcome,
    QuorumFormed,
    Role,
    Shows,
    StateShown,
    clip,
    name_some,
)
from torchft_ckpt.core.coordination.replica import ReplicaView, StepFacts, StepWishes
from torchft_ckpt.core.training.graphs import OpenGraphs
from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.core.training.shared_step import SharedStep
from torchft_ckpt.core.training.taking import StepTaking
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    GroupLeftError,
    NoQuorumError,
    ProcessGroupAbortedError,
    ProcessGroupError,
)
from torchft_ckpt.events import QuorumChanged, StepCommitted, StepDiscarded
from torchft_ckpt.manager.checking import EqualityCheck, ParameterLayout
from torchft_ckpt.manager.clearing import Clearing
from torchft_ckpt.manager.collectives import Collectives, Way, done_work, fill_with_nothing
from torchft_ckpt.manager.coming_in import CameIn
from torchft_ckpt.manager.event_queue import EventQueue
from torchft_ckpt.manager.flight_recorder import name_dumps
from torchft_ckpt.manager.followers import Followers
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.leaving import WayOut
from torchft_ckpt.manager.outcomes import StepOutcomes
from torchft_ckpt.manager.rank_config import RankConfig, Timeouts
from torchft_ckpt.manager.recovery import Prepared, Recovery
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.showing import CheckedLeaf, shown
from torchft_ckpt.manager.state_registry import OwnState, StateRegistry
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper
from torchft_ckpt.manager.undo import Undo
from torchft_ckpt.threads import Event, Thread, Threads, new_future

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

logger = logging.getLogger(__name__)
_SAMPLED = 3
"""In so many deferred steps it is seen whether the loop writes to the memory of parameters."""
_OFTEN = 8
"""A loop that writes to parameters before its forward pass twice within so many steps does so for the step that begins."""
_UNVOTED = 8
"""So often a loop may clear its gradients in an iteration, for several tasks: then it is taken to skip iterations."""
_OWED = 8
"""So often in a row a loop may owe a backward pass at the end of an iteration, until it is told that it cannot come in so."""


@dataclass(slots=True)
class _Late:
    """The collectives between one vote and the next step."""

    count: int = 0
    has_failed: bool | None = None
    """Whether one of them has failed, as it was when the next step began; None: it has not begun."""


class Steps:
    """The steps of this rank, of which one at most is open. Methods belong to the training thread, unless they say otherwise.

    The arguments are the parts of a `Manager`, and two of its own (`quorum_retries` None: there is no end of attempts).
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        transport: CheckpointTransport[Any],
        client: StepClient,
        clearing: Clearing,
        way_out: WayOut,
        *,
        rank_config: RankConfig,
        timeouts: Timeouts,
        registry: StateRegistry,
        own: OwnState,
        serving: StateServing,
        healing: Healing,
        recovery: Recovery,
        check: EqualityCheck,
        outcomes: StepOutcomes,
        followers: Followers,
        events: EventQueue,
        timekeeper: Timekeeper,
        use_async_quorum: bool,
        quorum_retries: int | None,
        follows: bool,
    ) -> None:
        self._process_group = process_group
        self._transport = transport
        self._client = client
        self._clearing = clearing
        self._way_out = way_out
        self._rank_config = rank_config
        self._timeouts = timeouts
        self._registry = registry
        self._own = own
        self._serving = serving
        self._healing = healing
        self._recovery = recovery
        self._check = check
        self._outcomes = outcomes
        self._follows = follows
        self._followers = followers
        self._events = events
        self._timekeeper = timekeeper
        self._use_async_quorum = use_async_quorum
        self._quorum_retries = quorum_retries
        self._sharing = SharedStep()
        self.graphs = OpenGraphs(client.begins_again)
        self._undo = Undo(registry, client.replica_id)
        self._taking = StepTaking()
        self._worker = Threads("torchft_ckpt-quorum")
        self._store_prepared: threading.Event | None = None
        self._collectives = Collectives(
            process_group,
            clearing,
            on_error=client.note_collective_error,
            schedule=client.schedule,
            on_wait=client.report_wait,
            reduces=timekeeper.reduces,
        )
        self._quorum: Future[None] | None = None
        """The quorum thread's work for the open step."""
        self._is_planned = Event()
        """That thread has begun to receive what the quorum wants of this rank, or has failed; it may connect the group yet."""
        self._last_wishes = StepWishes()
        self._asked_with = "", ""
        """Layout and frozen parameters, as the open step was asked for with."""
        self._has_computed = False
        """A forward pass was computed in the open step: what it left is not of a state that is loaded from now on."""
        self._needs_weights = False
        """The loop goes back in the open step through weights as they were before it: nothing is loaded in it."""
        self._started_at = 0.0
        self._device: int | None = None
        """The training thread's CUDA device."""
        self._vote: CommitVote | None = None
        self._is_committed: bool | None = None
        """How the step was decided; None: it is open."""
        self.has_counted = False
        """How the last step was decided; False before that of the first."""
        self._is_at_end = False
        """An iteration ends that did not count: this rank asks for the newest state, and begins no step."""
        self._came_in = CameIn(registry)
        self._num_unvoted = 0
        """So often in a row, beside the quorum, the loop has cleared its gradients, and nothing was voted on."""
        self._num_owed = 0
        """So often in a row no state was loaded as an iteration ended, because a backward pass might have been owed."""
        self._has_reduced = False
        """A collective was asked for since it did so last."""
        self._rests_on_another_state = False
        """The loop may be in the middle of an iteration that began with another state than this one."""
        self._ended_at: float | None = None
        """When the last iteration ended, if no step has begun since."""
        self._top_s = 0.0
        """How long it took from there to the next step, the last time."""
        self._limit = timeouts.quorum
        self.is_deferred = False
        """Gradients were cleared, and nothing was computed or asked for since: the step has not begun yet."""
        self._sees_forward = False
        """A forward pass of the open step was seen."""
        self._seen_with: set[object] = set()
        """Optimizers in whose last steps one was seen."""
        self._loop_thread = threading.get_ident()
        """The thread that has deferred a step."""
        self._reported: list[Exception] = []
        """Errors of the step that is deferred, as other threads have reported them."""
        self._has_looked = False
        """A forward pass was computed since the last decision, in no step."""
        self._counted: Sequence[Counted] = ()
        """The versions of parameters as the step was deferred."""
        self._samples: list[bytes] = []
        self._num_to_sample = _SAMPLED + 1
        self._writes_first, self._wrote_at = False, -1 - _OFTEN
        self._has_written = False
        """The loop writes to parameters between clearing gradients and its forward pass: often; last before this step; and in the
        open one."""
        self._follows_decision = False
        """The step before the open one was decided, as far as this rank knows."""
        self._late = _Late()
        self._told_quorum: object = None
        """What listeners were told of the quorum last."""

    # --------------------------------------------------------------------------------------------------- a step begins

    def prepare_store(self, address: str) -> None:
        """Connect already to where the present quorum meets; empty: nowhere."""
        self._store_prepared = self._process_group.prepare_store(address) if address else None

    def start(self, wishes: StepWishes, limit: timedelta) -> None:
        """Begin a step, or go on with the open one where nothing has happened in it. See `Manager.start_quorum`.

        `limit` is that of one attempt at a quorum.
        """
        self._last_wishes, self._limit = wishes, limit
        was_deferred, self.is_deferred = self.is_deferred, False
        self._has_written = was_deferred and (is_changed(self._counted) or self._samples != self._sampled())
        # Now and then that is the tail of the step before: averaged weights, which are swapped in to validate.
        if self._has_written:
            step = self._client.view().version.step
            # Not twice in one step: a loop that writes as `current_step` says does so again in the next try.
            is_often = self._came_in.is_held or 0 < step - self._wrote_at <= _OFTEN
            self._writes_first, self._wrote_at = self._writes_first or is_often, step
        if self._ended_at is not None:
            self._top_s, self._ended_at = time.monotonic() - self._ended_at, None
        loads_here = self._loads_unvoted()
        if not loads_here and self._may_keep(wishes):
            self._settle(has_to_wait=self._client.wants()[0])
            return
        self.end_taking()
        self._way_out.check()
        self._needs_weights = self.graphs.is_open
        self.graphs.begins()
        self._followers.begins(is_torn=self._client.view().torn)
        self._follows_decision = self._is_committed is not None
        self.leave()
        self._put_back()
        self._undo.tries_again()
        # Each thread has a current device of its own, and the process group is connected on the quorum's.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._events.deliver()  # between two steps, so what a listener saves is whole
        if self._store_prepared is not None:
            # Who asks is waited for, so what may take long comes before asking.
            with self._timekeeper.waiting(Waits.CONNECTION):
                self._store_prepared.wait(self._timeouts.connect.total_seconds())
            self._store_prepared = None
        self._started_at = time.monotonic()
        self._timekeeper.begins_step(is_round=wishes.is_outer)
        if loads_here:
            logger.warning(
                "%s: gradients were cleared %d times, and should_commit was not called: the state of the other groups is loaded"
                " here. Nothing counts of what the loop computes until it calls should_commit",
                self._client.replica_id,
                self._num_unvoted,
            )
            self._come_in()
            self._rests_on_another_state = True
        now = self._client.view()
        # Where groups train apart, what a forward pass changes in a step is one group's own.
        self._serving.begin_step(now.version, is_open=self._registry.trains_apart and not now.is_between_steps)
        self._begin(wishes, limit)
        while (now := self._client.view()).quorum is not None and not now.quorum.leaving:
            if now.warms_up and not wishes.contributes:  # it has computed nothing, so it may as well load now
                self._client.learned()
                self._come_in()
            elif now.follows:
                # What was received is loaded, or could not be had. The others train on meanwhile, or wait for it.
                if not now.is_waited_for:
                    self._recovery.rest(now.quorum)
                self._client.learned()
            else:
                break
            self._way_out.check()
            self.leave()
            self._timekeeper.goes_outside()
            self._begin(wishes, limit)
            self._timekeeper.begins_step(is_round=wishes.is_outer)
        while self._reported:
            self._client.note_error(self._reported.pop(0))
        if self._registry.is_used_by_loops and not (wishes.is_outer or now.is_learner):
            self._undo.begin(has_written=self._has_written)

    def defers(self) -> bool:
        """Gradients are cleared. Return whether the step begins later, with what is computed or asked for first.

        What a loop does after it has cleared its gradients belongs to the step before: it counts the step, or moves an average.
        A rank that holds the newest state need not begin before that, if its loop's forward pass is seen as a rule.
        """
        last = self._last_wishes
        is_seen = self._sharing.joined and self._seen_with.issuperset(self._sharing.joined)
        # A backward pass may come first, and nothing can be loaded in its middle.
        is_able = is_seen and not (self._writes_first or self._has_looked or self.graphs.is_open)
        may_defer = is_able and not last.is_outer and self._holds()
        if may_defer:  # else that is done as the step begins
            self._put_back(goes_on=True)  # what the loop reads from here on is the state's, too
        self.is_deferred, self._loop_thread = bool(may_defer and self._holds()), threading.get_ident()
        self._counted, self._samples = (), []
        if self.is_deferred:
            self._counted = self._registry.count_writes()
            self._num_to_sample = max(self._num_to_sample - 1, 0)
            self._samples = self._sampled()
        return self.is_deferred

    def _holds(self) -> bool:
        """Whether this rank holds the newest state, as far as it knows, and no step is open."""
        now = self._client.view()
        return now.version.proven and not now.is_behind and now.quorum is not None and now.is_between_steps

    def _sampled(self) -> list[bytes]:
        """Return digests of samples of some parameters, in the first steps that are deferred: no version says that a loop writes
        to `data`, and each step of a loop does what its first ones do."""
        return marks(self._registry.some_parameters()) if self._num_to_sample else []

    def begins_here(self, *, asks: bool = False, has_computed: bool = False) -> bool:
        """Return whether the step that is deferred begins with what is computed here, or asked for (`asks`). Any thread.

        `has_computed`: the loop may have gradients already, so no other state is loaded in this step.

        It begins on the loop's thread, between two of its lines. What another one asks is answered as of the last step.

        Raises:
            ConfigError: a backward pass or another thread computes before the loop does.
        """
        if not self.is_deferred:
            return False
        if not self._is_between_lines and (_is_in_backward() or not asks):
            what = "a backward pass" if _is_in_backward() else "another thread than the loop"
            raise ConfigError(
                f"{what} comes first after zero_grad, and the step was to begin with a forward pass of DistributedDataParallel,"
                " as the one before: no state could be loaded here. Call manager.start_quorum() after zero_grad if the loop"
                " leaves that forward pass out, or computes it before zero_grad",
                party="zero_grad",
            )
        self._has_computed = self._has_computed or (has_computed and self._is_between_lines)
        return self._is_between_lines

    def keeps_error(self, error: Exception) -> bool:
        """Whether an error is kept for the step that is deferred, as none may begin here. Any thread."""
        is_kept = self.is_deferred and not self._is_between_lines
        if is_kept:
            self._reported.append(error)
        return is_kept

    @property
    def _is_between_lines(self) -> bool:
        """This is the loop's thread, and in no backward pass."""
        return threading.get_ident() == self._loop_thread and not _is_in_backward()

    # ------------------------------------------------------------------------------------- an iteration ends, and loads

    def _may_come_in(self) -> bool:
        """Whether this rank lacks a state that others hold, and may load it now, as an iteration ends that did not count."""
        now, last = self._client.view(), self._last_wishes
        is_plain = last.contributes and last.allow_heal and not self._registry.trains_apart
        is_known = now.is_learner or now.newest_step > 0
        lacks, is_owed = is_plain and now.is_behind and is_known and not now.is_leaving, self.graphs.is_open
        self._num_owed = self._num_owed + 1 if lacks and is_owed else 0
        if self._num_owed == _OWED:
            logger.warning(
                "%s does not come in: at the end of each of its last %d iterations a forward pass with gradients waited for its"
                " backward pass, so no state could be loaded. Compute what is only looked at under torch.no_grad()",
                self._client.replica_id,
                _OWED,
            )
        return lacks and not is_owed

    def _loads_unvoted(self) -> bool:
        """The loop clears its gradients. Return whether a state is loaded here, as it does not come to a vote by itself.

        With the weights of a new process, or data that are NaNs with them, a loop may skip each iteration. Others clear gradients
        several times in one, for several tasks, so this may be the middle of an iteration. Therefore nothing of it counts: the
        group comes in at the vote that follows.
        """
        now = self._client.view()
        if not (now.warms_up and now.is_in_step):
            return False
        self.graphs.clears()
        # Else a loop whose forward passes are not seen may be about to go back through the weights.
        is_whole = self._has_computed or self._has_reduced or not self._registry.has_gradients()
        self._has_computed = self._has_reduced = False
        self._num_unvoted += is_whole
        is_due = (
            self._num_unvoted >= _UNVOTED and self._num_unvoted.bit_count() == 1
        )  # the less often, the longer it goes on
        return is_due and is_whole and self._may_come_in()

    def _come_in(self) -> None:
        """Wait, at the end of an iteration that did not count, until this rank holds the newest state.

        It returns without one if nobody is at work who holds it, or this group leaves. Raises as `start`.
        """
        # An optimizer that asks in its own step whether it counts, as torchtitan's container, has taken it to step.
        if self._registry.lock.held_for_step():
            self._registry.lock.release_write()
        self._is_at_end, started = True, time.monotonic()
        self._timekeeper.goes_outside()
        try:
            while (now := self._client.view()).is_behind and not now.is_leaving:
                self._way_out.check()
                self.leave()
                self._begin(self._last_wishes, self._limit)
                now = self._client.view()
                may_ask_again = now.follows
                if now.follows and now.quorum is not None and not now.is_waited_for:
                    self._recovery.rest(now.quorum)
                self._client.learned()
                if not may_ask_again:
                    break
        finally:
            self._is_at_end = False
            self._timekeeper.goes_between()
        now = self._client.view()
        if now.came_in:
            took_s = time.monotonic() - started
            logger.info("%s has come in to step %d after %.2f s", self._client.replica_id, now.version.step, took_s)

    def _put_back(self, *, goes_on: bool = False) -> None:
        """A step begins: what the loop has changed since the newest state was loaded, in an iteration that did not count.

        `goes_on`: the loop may change it yet, before the step begins.
        """
        if not self._came_in.is_held:
            self._came_in.forget()
            return
        agree = None if self._recovery.is_alone else self._agree_to_put_back
        if self._has_written:  # for the step that begins, or for the one before: nobody can tell
            self._came_in.forget()
            self._client.load_torn()
            if agree is not None:
                agree(None)
            return
        is_whole, why = False, ""
        try:
            with self._recovery.comes_in():
                is_whole = self._came_in.put_back(self._client.view().version, goes_on=goes_on, agree=agree)
        except CoordinationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a state function raises: what is here is no state
            why = f" ({error})"
        finally:  # also if it was interrupted
            if not is_whole:
                self._came_in.forget()
                self._client.load_torn()
        if is_whole and not self._came_in.moved:
            return
        logger.warning(
            "%s: after should_commit had returned False the loop has changed what belongs to a step (%s): %s. Change it only if"
            " the step counts",
            self._client.replica_id,
            name_some(self._came_in.moved) or "what its state functions return",
            "it is put back" if is_whole else f"that cannot be put back{why}: it is received again",
        )

    def _agree_to_put_back(self, loads: bool | None) -> bool:
        """Return whether the ranks of this group load the state that they came in with again. None: this one cannot."""
        failure = "it holds another state, or has written to it" if loads is None else ""
        try:
            return self._client.agree_to_load_again(self._limit, loads=bool(loads), failure=failure)
        except CheckpointError as error:
            logger.warning("%s: %s", self._client.replica_id, error)
            return False

    def _begin(self, wishes: StepWishes, limit: timedelta) -> None:
        """Ask for a quorum, and do what comes before the forward pass."""
        with self._recovery.comes_in(), self._timekeeper.waiting(Waits.COMPARISON):
            self._learn_leaves()
            layout = self._registry.layout()
            has_to_wait, prepared, parts = self._prepare(wishes)
        self._is_planned = is_planned = Event()
        self._quorum = quorum = new_future()  # what is on its way is never left without its step
        try:
            quorum.add_done_callback(lambda _: is_planned.set())
            self._ask(wishes, layout, prepared, parts, can_serve=self._can_serve(wishes, prepared))
            self._worker.fulfil(quorum, functools.partial(self._run_quorum, prepared, limit))
        except BaseException:
            if quorum.cancel():
                self._quorum = None
            raise
        self._settle(has_to_wait)

    def _can_serve(self, wishes: StepWishes, prepared: Prepared) -> bool:
        return prepared.captured is not None or (self._can_capture_later(wishes) and not self._has_written)

    def _can_capture_later(self, wishes: StepWishes) -> bool:
        """Whether the state stays as it is until the quorum is there."""
        return (not self._use_async_quorum and wishes.waits is not False) or self._registry.is_explicitly_locked

    def _prepare(self, wishes: StepWishes) -> tuple[bool, Prepared, list[StateShown]]:
        """Return whether to wait for the quorum, what it will need of the state that is here, and what is shown of it."""
        now, registry, began_at = self._client.view(), self._registry, time.monotonic()
        has_to_wait, has_to_capture = self._client.wants()
        # What a loop has written to is not the state any more with which the step begins.
        is_comparable = not (self._is_at_end or self._has_written) and self._may_show(wishes)
        is_told_to_show = now.shows is not Shows.NOTHING and is_comparable
        self._transport.advance_to(now.version.step)
        has_pending_request = self._transport.has_pending_request(now.version.step)
        can_capture_later = self._can_capture_later(wishes)
        # In an outer loop the script goes on at once: what is captured later would be of another place of it than it says.
        captures = has_to_capture or has_pending_request or registry.trains_apart
        # Who asks at the end of an iteration serves nobody.
        captures = ((captures and not can_capture_later) or is_told_to_show) and not (
            self._has_written or self._is_at_end
        )
        seen = self._came_in.take_seen()  # no function of the script has run since, but for one that hears of events
        seen = None if self._events.is_heard else seen
        captured = registry.capture_to_serve(seen) if captures else None
        is_compared = now.version.proven and wishes.contributes and not self._has_written
        is_new = now.is_checked or now.shows is not Shows.NOTHING
        leaves: list[CheckedLeaf] = []
        is_looked_at = now.version.proven and registry.trains_apart and not registry.is_explicitly_locked
        known = self._own.known
        is_first = not (known.has_looked or registry.trains_apart or registry.is_empty or self._has_written)
        has_to_look = is_told_to_show or (is_compared and is_new)
        if has_to_look or is_first or is_looked_at or (is_compared and self._check.is_due(now.version.step)):
            leaves = registry.leaves_to_compare(seen if captured is None else captured.returned)
        if is_looked_at:
            known.look(leaves, asks=True)
        elif not registry.trains_apart and (has_to_look or is_first):
            known.watch(leaves, came_in=now.is_on_trial)
        is_shown = is_told_to_show or (known.has_news and is_comparable and now.version.proven)
        has_to_wait = has_to_wait if wishes.waits is None else wishes.waits or is_shown
        # Others may come for what is captured, and a loop like SAM's writes to it while its quorum is held for them.
        has_to_wait = has_to_wait or self._is_at_end or (wishes.waits is None and captures and self._undo.sees_writes)
        parts: list[StateShown] = []
        if is_shown:
            captured = captured or registry.capture_to_serve()
            parts = [self._show(leaves, now)]
            known.has_news = False
            # Where an outer loop begins, others may still receive the state as it was then.
            if not self._serving.serve_shown(now.version, captured, keeps_awaited=not self._follows_decision):
                captured = None
        # What is shown whole is compared before the step.
        is_new = now.is_checked or (is_new and not (parts and not parts[0].is_sampled))
        self._look_at(now, leaves, is_compared=is_compared, is_new=is_new)
        prepared = Prepared(
            version=now.version,
            captured=captured,
            counted=[] if captured or can_capture_later else registry.count_writes(),
            trainer_waits=has_to_wait,
            is_untouched=not self._has_computed,
            has_pending_request=has_pending_request,
            stood_s=time.monotonic() - began_at
            if has_to_capture and captured and is_compared and not now.is_behind
            else 0.0,
        )
        return has_to_wait, prepared, parts

    def first_inner_step(self) -> None:
        """See what of the script's own state moves with the rounds of its outer loop, and what in their inner steps."""
        if not self._registry.is_explicitly_locked:
            self._own.known.look(self._registry.leaves_to_compare(), asks=False)

    def _look_at(self, now: ReplicaView, leaves: Sequence[CheckedLeaf], *, is_compared: bool, is_new: bool) -> None:
        """Have what the vote shows read of the state with which the step begins."""
        if is_compared and self._registry.trains_apart:
            common = [leaf for leaf in leaves if leaf.key in self._own.known.common]
            self._check.glance.take_leaves(now.version.step, common)
        elif is_compared:
            self._registry.glance(self._check.glance, now.version.step)
        else:
            self._check.glance.forget()
        if is_compared and leaves and (is_new or self._check.is_due(now.version.step)):
            self._check.begin(now.version, leaves, is_new=is_new)
        else:
            self._check.forget()

    def _may_show(self, wishes: StepWishes) -> bool:
        """Whether what is here can be compared before the quorum, and loaded then where it differs."""
        registry = self._registry
        in_loop = registry.is_used_by_loops and wishes.waits is None and not self._has_computed
        can_load = in_loop or registry.trains_apart
        return can_load and self._transport.uses_memory_of_state and wishes.contributes and not registry.is_empty

    def _show(self, leaves: Sequence[CheckedLeaf], now: ReplicaView) -> StateShown:
        size = self._rank_config.group_world_size
        shows = Shows.SAMPLES if now.shows is Shows.NOTHING else now.shows
        return shown(leaves, self._own.known, now.version.step, shows, group_world_size=size)

    def _ask(
        self,
        wishes: StepWishes,
        layout: ParameterLayout,
        prepared: Prepared,
        parts: list[StateShown],
        *,
        can_serve: bool,
    ) -> None:
        registry, healing = self._registry, self._healing
        frozen = registry.frozen()
        need = Need(guesses=healing.guesses, load_s=healing.load_s)
        if self._client.view().is_behind:
            num_bytes, changing_bytes = registry.sizes(None if prepared.captured is None else prepared.captured.state)
            if self._client.view().torn:
                healing.distance.lost()
            lacking_bytes = healing.distance.lacking_bytes(num_bytes, changing_bytes)
            # The training thread has to wait for what is received, and the state must not have been used in this step.
            is_able = self._follows and prepared.trainer_waits and prepared.is_untouched and registry.is_used_by_loops
            need = msgspec.structs.replace(
                need,
                reach_s=healing.expected_s(lacking_bytes),
                can_follow=is_able,
                gains=healing.distance.gains(num_bytes, changing_bytes),
            )
        facts = StepFacts(
            can_serve=can_serve,
            need=need,
            stood_s=prepared.stood_s,
            shown=parts,
            kinds=self._kinds(),
            at_end=self._is_at_end,
            top_s=self._top_s,
            computes_alone=self._rests_on_another_state,
            nodes=self._registry.microbatches.held(self._client.view().version),
            needs_weights=self._needs_weights and not self._is_at_end,
        )
        request = self._client.begin(wishes, facts)
        self._asked_with = layout.digest, frozen
        self._client.send(
            msgspec.structs.replace(
                request,
                checkpoint_addresses=[self._transport.metadata()],
                layout=Layout(
                    digest=layout.digest,
                    text=layout.text if self._rank_config.group_rank == 0 else None,
                    frozen=frozen,
                ),
                can_load=not registry.is_empty,
                issued=[self._clearing.count],
            )
        )

    def _kinds(self) -> list[str]:
        """See `QuorumRequest`."""
        steps = [*self._sharing.last, *([self._sharing.ending] if self._is_at_end else ())]
        guarded = self._registry.guarded()
        named = (",".join(str(n) for n, optimizer in enumerate(guarded) if optimizer in step) for step in steps)
        kinds = [kind[:64] for kind in named if kind][-MAX_TURNS:]
        # Most loops have one optimizer, and ask in each step: so many times the same says no more than once.
        is_one = len(kinds) == MAX_TURNS and len({*kinds}) == 1 and not self._client.view().is_behind
        return kinds[-1:] if is_one else kinds

    def _may_keep(self, wishes: StepWishes) -> bool:
        """Whether the step that is asked for can be the one that is open."""
        quorum = self._quorum
        if quorum is None:
            return False
        is_there = quorum.done()
        if is_there and quorum.exception() is not None:
            return False
        may_keep = self._client.keeps_step(
            wishes,
            has_reduced=is_there and self._clearing.count > 0,  # there is none before the quorum is there
            is_loading=self._recovery.is_pending or not is_there,
            joins_open=self._sharing.joins_open,
        )
        # A loop of two networks may freeze one of them between its forward pass and `zero_grad`.
        frozen = self._asked_with[1] if self._sharing.joins_open else self._registry.frozen()
        return may_keep and self._asked_with == (self._registry.layout().digest, frozen)

    def _settle(self, has_to_wait: bool) -> None:
        """Do what has to be done before the forward pass: wait for the quorum, load what is to be loaded before it."""
        if has_to_wait:
            # To connect the process group can take long: where nobody asked to wait for that, it goes on beside the forward pass.
            waits_for_group = not self._use_async_quorum or bool(self._last_wishes.waits)
            if waits_for_group:
                self.wait_quorum()
            else:
                self.wait_plan()
            if not self._has_computed:  # else that was not of the state that arrives
                self._recovery.load()

    def wishes_before_forward(self) -> StepWishes | None:
        """Return what a step has to begin with before a forward pass; None: none has to begin. See `Manager.ensure_step`."""
        last, now = self._last_wishes, self._client.view()
        is_ready = self._registry.knows_optimizers and not self._registry.is_empty
        # An outer loop begins its rounds itself.
        may_begin = is_ready and not last.is_outer and not self._sharing.is_half_taken
        # Of a loop that clears first, such a pass may be a look at the model, and what follows it belongs to the step before.
        has_to = self._is_committed is False or not self._sharing.clears_first
        return last if may_begin and has_to and not now.is_in_step else None

    def begins_by_forward(self) -> None:
        """A step begins that the script has not cleared the gradients for: those of a discarded one are not to count twice."""
        if self._is_committed is False:
            for optimizer in self._sharing.again():
                if isinstance(optimizer, torch.optim.Optimizer):
                    optimizer.zero_grad()
        else:
            self._sharing.begins()

    def note_forward(self) -> None:
        """A forward pass begins."""
        is_in_step = self._client.view().is_in_step
        self._has_computed = self._has_computed or is_in_step
        self._has_looked = self._has_looked or not is_in_step
        self._sees_forward = self._sees_forward or is_in_step
        self._undo.forward_begins(is_in_step=is_in_step)

    def clears_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer clears its gradients; return whether a step has to begin with that. `Optimizer.zero_grad` asks.

        Several that are wrapped share a step: the rule is `core.training.shared_step.SharedStep`.
        """
        self._registry.microbatches.refuse("zero_grad")
        is_decided = self._client.view().is_between_steps and not self.is_deferred
        self._registry.clears(optimizer)
        self._sharing.keep(self._registry.guarded())
        return self._sharing.clears(optimizer, is_decided=is_decided)

    def takes(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to ask whether it has to step. `Optimizer.step` calls it.

        Raises:
            ConfigError: it steps again before all that share its last step have stepped.
        """
        if self._is_committed is False and self._sharing.has_stepped(optimizer):
            raise ConfigError(
                f"step {self._client.view().version.step} was discarded, and its optimizer steps again, though no other step has"
                " begun: call zero_grad in each iteration, not only if step() has returned True",
                party=type(optimizer).__name__,
            )
        if not self._sharing.steps(optimizer):
            raise ConfigError(
                "an optimizer steps again, and another one that cleared its gradients in the same step has not stepped yet: step"
                " all of them once in a step, and call zero_grad of those only that step in it"
            )
        self._taking.enters((optimizer,))

    # ---------------------------------------------------------------------------------- what is decided is to be taken

    def begins_to_take(self, optimizer: torch.optim.Optimizer) -> None:
        """A guarded optimizer is about to step. Raises `ConfigError` where no step that counts is there for it to take."""
        if self.may_take(optimizer):
            self._taking.enters(optimizer)

    @torch.compiler.disable
    def may_take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a guarded optimizer, or one that it holds, is about to step for the loop. Raises as `begins_to_take`."""
        if self._registry.in_function:
            return False
        now, name = self._client.view(), type(optimizer).__name__
        is_open = self._is_committed is None and not now.is_between_steps
        is_training = self._registry.is_used_by_loops and not now.warms_up and not self._client.is_over
        # torchtitan's container steps by the `Optimizer` that wraps it, and has it in an attribute.
        is_training = is_training and all(
            getattr(held, "optim", None) is not optimizer for held in vars(optimizer).values()
        )
        if is_training and (is_open or self._is_committed is False) and not _makes_state(optimizer):
            raise ConfigError(
                f"{name} steps, and step {now.version.step} "
                + ("is not decided yet" if is_open else "was discarded")
                + ": each replica group would train by itself. Call step() of the Optimizer that wraps it, not its own and not in"
                " the backward pass, or step it only if should_commit() has returned True",
                party=name,
            )
        return True

    def ends_taking(self, who: object) -> None:
        """A guarded optimizer, or an `Optimizer`, has done its part of the step."""
        self._taking.ends(who)
        if self._taking.is_taken([(optimizer,) for optimizer in self._sharing.joined]):
            self._took_step()

    def took_all(self) -> None:
        """What takes the step that counts is over, whoever has stepped in it."""
        self._took_step()
        self._taking.closes()

    def _took_step(self) -> None:
        self._client.took_step()
        self._timekeeper.took_step()

    def broke_off(self) -> None:
        """A step that counts is not taken to its end."""
        if self._client.has_to_take_step() or (self._is_committed and not self._registry.announces_steps):
            step = self._client.view().version.step - 1
            self._client.load_torn()
            logger.error(
                "%s was interrupted in step %d, which counts, before its optimizers had taken it to the end: its state is torn,"
                " and it loads that of the other groups when the next step begins",
                self._client.replica_id,
                step,
            )

    def end_taking(self) -> None:
        """The next step begins: the last one that counts is taken, however the loop has done that, or it is torn."""
        if self._taking.is_inside:
            if self._registry.lock.held_for_step():
                raise ConfigError(
                    "a step begins while an optimizer takes the last one, by a forward pass in a closure, perhaps: no vote is"
                    " about what it computes. Compute all gradients of a step before should_commit, and pass no closure",
                    party="closure",
                )
            self.broke_off()
        if self._client.has_to_take_step():
            step = self._client.view().version.step - 1
            self._client.took_step()
            # All groups have left it out alike, or the next votes differ.
            logger.info("%s: not all optimizers have taken step %d, which counts", self._client.replica_id, step)
        self._taking.closes()
        self._timekeeper.took_step()

    def leave(self) -> None:
        """Abandon the step that is open, if there is one. What was issued after the decision ends first."""
        self.end_taking()
        quorum = self._quorum
        is_undecided = quorum is not None and self._is_committed is None
        # It was raised from wait_quorum already, or its step was abandoned. Whoever is interrupted here waits for it again.
        has_failed = quorum is not None and quorum.exception() is not None
        self._quorum = None
        self._vote = self._is_committed = None
        if self._collectives.has_open():
            # They must not end in the middle of the next one.
            if not self._client.view().is_between_steps:
                self._client.note_error(ProcessGroupAbortedError("the step was abandoned", self._client.replica_id))
                self._process_group.abort()
            self._collectives.wait_all()
        if self._late.count:
            self._ask_device()
        if is_undecided:
            # If nothing went wrong it was the loop's choice, as a plain loop's that skips what overflows.
            self._undo.end(counts=not has_failed and self._client.error() is None)
        self._late.has_failed, self._late = self._client.has_failed(), _Late()
        self._recovery.abandon()

    # ------------------------------------------------------------------------------------------------------ the quorum

    @property
    def has_quorum(self) -> bool:
        """Whether a quorum was asked for in the open step, or the last one."""
        return self._quorum is not None

    def wait_quorum(self) -> None:
        """See `Manager.wait_quorum`. Any thread."""
        with record_function("torchft::manager::wait_quorum"):
            self._wait_quorum()

    def wait_plan(self) -> None:
        """Wait until it is known who trains together; the process group may be connected beside what is computed then."""
        if self._quorum is not None:
            with self._timekeeper.waiting(Waits.QUORUM):
                self._is_planned.wait()
        if self._quorum is None or self._quorum.done():
            self.wait_quorum()

    def _wait_quorum(self) -> None:
        if self._quorum is None:
            raise NoQuorumError(
                "there is no quorum before the first start_quorum (Optimizer.zero_grad calls it)", "manager"
            )
        try:
            with self._timekeeper.waiting(Waits.QUORUM):
                self._quorum.result()
        except GroupLeftError:  # raised on the quorum's thread, and here for the script
            self._client.tells_that_it_left()
            raise

    def _run_quorum(self, prepared: Prepared, limit: timedelta) -> None:
        with record_function("torchft::manager::_client::_quorum"):

            def serve_held(num_held: int) -> None:
                version = self._client.view().version
                is_first = version != prepared.version  # it has got its name since
                self._serving.serve(version, prepared.captured, prepared.counted, range(num_held), is_first=is_first)

            try:
                plan = self._client.await_plan(limit, self._quorum_retries, serve_held)
            finally:
                self._timekeeper.quorum_is_at(None)
        formed = plan.formed
        self._own.found = formed.leaves.common, formed.leaves.own
        self._note_quorum(formed)
        self._collectives.begin_step(is_new_quorum=plan.configure)
        if plan.serve or (prepared.has_pending_request and formed.role is Role.HEALTHY):
            served = formed.version, prepared.captured, prepared.counted, formed.destinations
            self._serving.serve(*served, for_learners=plan.serve)
        self._recovery.begin(plan, prepared)
        if plan.configure and isinstance(formed, QuorumFormed):
            self._is_planned.set()
            self._configure(formed)

    def _learn_leaves(self) -> None:
        """Take what was found before the last quorum. As it is served with the state, it changes between two steps only."""
        news, no_more = self._own.known.learn(*self._own.found)
        if news:
            logger.info(
                "%s: each replica group has its own %s, as they differ after a step that all began with the same. These are not"
                " loaded from others any more, unless they become equal",
                self._client.replica_id,
                name_some(news),
            )
        if no_more:
            logger.info(
                "%s: most groups move %s alike by now: it has to be equal", self._client.replica_id, name_some(no_more)
            )

    def _note_quorum(self, formed: Answer) -> None:
        now = self._client.view()
        news = formed.epoch, formed.quorum_id, now.num_participants, now.participating_rank
        if news == self._told_quorum:
            return
        self._told_quorum = news
        self._events.add(
            QuorumChanged(
                step=formed.version.step,
                quorum_id=formed.quorum_id,
                replica_id=self._client.replica_id,
                num_groups=formed.replica_world_size,
                num_participants=now.num_participants,
                participating_rank=now.participating_rank,
            )
        )

    def _configure(self, formed: QuorumFormed) -> None:
        self._timekeeper.quorum_is_at(Waits.CONNECTION)
        try:
            with record_function("torchft::manager::_pg::configure"):
                self._connect_group(formed)
        finally:
            self._timekeeper.quorum_is_at(None)

    def _connect_group(self, formed: QuorumFormed) -> None:
        rank_config = self._rank_config
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            self._process_group.configure(
                self._meets_at(formed.meets.store_address, formed.meets.place or f"{formed.epoch}/{formed.quorum_id}"),
                self._client.replica_id,
                formed.replica_rank,
                formed.replica_world_size,
                formed.quorum_id,
                rank_config.group_rank,
                rank_config.group_world_size,
            )
        except (ProcessGroupError, RuntimeError) as error:
            why = self._client.view().error or error  # where the quorum broke meanwhile, that is why
            logger.warning("%s cannot connect quorum %d: %s", self._client.replica_id, formed.quorum_id, why)
            self._client.note_collective_error(error, connects=not isinstance(error, ProcessGroupAbortedError))
        else:
            name_dumps(formed.quorum_id, formed.replica_rank * rank_config.group_world_size + rank_config.group_rank)
            self._client.configured(formed)
            if formed.meets.standby_store_address:
                self._process_group.prepare_store(formed.meets.standby_store_address)

    def _meets_at(self, store_address: str, place: str) -> str:
        """Return where the ranks of this number meet."""
        return f"{store_address}/torchft_ckpt/{place}/{self._rank_config.group_rank}"

    def connect_beside(self, connect: ConnectBeside) -> None:
        """Connect with newcomers, or as one, while the present process group is in use. On any thread; does not block."""
        address, name = self._meets_at(connect.store_address, connect.place), self._client.replica_id

        def wait(until_connected: Callable[[], None]) -> None:
            with self._answers(connect, name):
                until_connected()
                self._client.send(ConnectedBeside(place=connect.place))

        with self._answers(connect, name):
            group = self._process_group.connect_beside(address, name, connect.replica_rank, connect.replica_world_size)
            Thread(lambda: wait(group), "torchft_ckpt-beside").start()

    @contextlib.contextmanager
    def _answers(self, connect: ConnectBeside, name: str) -> Iterator[None]:
        """Tell the lighthouse why the process group could not be connected beside the quorum, if it could not."""
        try:
            yield
        except ProcessGroupAbortedError:  # another meeting has begun
            pass
        except Exception as error:  # noqa: BLE001 - whatever a process group raises
            logger.info("%s cannot connect beside the quorum: %s", name, error)
            self._client.send(ConnectedBeside(place=connect.place, failure=clip(str(error) or repr(error))))

    # ---------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensor: torch.Tensor, way: Way | None, reduce_op: ReduceOp.RedOpType) -> Work:
        """See `Manager.allreduce`. Any thread."""
        client = self._client
        self._registry.microbatches.refuse("a collective over groups")
        self._has_reduced = True
        if client.error() is None:
            self._wait_quorum()
        now = client.view()
        late = self._late if now.is_voted_on else None
        if late is not None:
            late.count += 1
        if client.skips_collective():
            return done_work(tensor, lambda: True)
        if now.participating_rank is None:
            fill_with_nothing(tensor, reduce_op)
        is_average = reduce_op == ReduceOp.AVG
        return self._collectives.allreduce(
            tensor,
            op=ReduceOp.SUM if is_average else reduce_op,
            divisor=now.num_participants if is_average else None,
            timeout=_as_long_as_others(self._timeouts.collective, now),
            failed=client.has_failed if late is None else functools.partial(self._has_failed, late),
            way=way,
        )

    def _has_failed(self, late: _Late) -> bool:
        """Whether a collective that no vote follows has failed, which the device may know only when it is done."""
        if late.has_failed is None:
            self._ask_device()
            return self._client.has_failed()
        return late.has_failed

    def _ask_device(self, *, synchronize: bool = True) -> None:
        """Note what has gone wrong on the device or in the process group."""
        if synchronize and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        error = self._process_group.errored()
        if error is not None:
            self._client.note_collective_error(error)

    # ------------------------------------------------------------------------------------------------------ the step ends

    def commit(self, limit: timedelta) -> bool:
        """End the step: vote, wait for the decision, and return whether the step counts. See `Manager.should_commit`.

        `limit` for the decision is extended where the members are further apart.
        """
        self.wait_quorum()
        if self._is_committed is not None:
            return self._ask_again(self._is_committed)
        self._registry.microbatches.votes()
        vote = self._vote or self._cast_vote(synchronize=True)
        now = self._client.view()
        self._own.batches_before = self._own.batches_committed
        self._taking.enters(self)  # until the answer is on its way to the script
        if now.is_learner:
            outcome, reason = self._client.learned()
        else:
            with self._timekeeper.waiting(Waits.VOTE):
                outcome, reason = self._client.await_decision(vote, _as_long_as_others(limit, now))
        self._is_committed = outcome is Outcome.COMMIT
        self._end(vote, outcome, reason)
        self._taking.leaves(self)
        is_committed = self.has_counted = self._is_committed
        self._num_unvoted, self._rests_on_another_state, self._has_reduced = 0, False, False
        if not is_committed and self._may_come_in():
            self._come_in()
            self._is_committed = False
            if (now := self._client.view()).came_in:
                with self._recovery.comes_in():
                    self._came_in.take(now.version)
        self._ended_at = time.monotonic()
        return is_committed

    def _ask_again(self, is_committed: bool) -> bool:
        # If an `Optimizer` asks, `takes` sees to it.
        if self._late.count and not is_committed and not self._taking.is_inside:
            raise ConfigError(
                f"step {self._client.view().version.step} was discarded, and {self._late.count} collectives were issued since,"
                " but no other step has begun: call start_quorum, or zero_grad of the Optimizer, in each iteration"
            )
        if self._late.count and is_committed:
            step = self._client.view().version.step - 1
            self._client.load_torn()  # the first optimizer has taken this step, the others have not
            raise ConfigError(
                f"step {step} was decided when its first optimizer stepped, and {self._late.count} collectives were issued since,"
                " which no vote is about: do all backward passes of a step before the first optimizer steps, and average a metric"
                " when all have stepped; or call zero_grad of one after the others have stepped, which begins a step of its own."
                " A loop that steps and clears one after the other clears all of them once before it begins"
            )
        return is_committed

    def cast_vote(self) -> None:
        """See `Hooks.cast_vote`. Any thread."""
        self.wait_quorum()
        if self._vote is None:
            # The caller's stream has waited; the device may be busy with the next step.
            self._cast_vote(synchronize=False)

    def _cast_vote(self, *, synchronize: bool) -> CommitVote:
        with self._timekeeper.waiting(Waits.COLLECTIVE):
            self._collectives.wait_all()
            self._ask_device(synchronize=synchronize)
        return self._send_vote()

    def _send_vote(self) -> CommitVote:
        with self._timekeeper.waiting(Waits.COMPARISON):
            digest = "" if self._client.has_failed() else self._check.digest()
        vote = self._vote = self._client.vote(*self._clearing.vote(), digest)
        return vote

    def _end(self, vote: CommitVote, outcome: Outcome, reason: str) -> None:
        now = self._client.view()
        self._undo.end(counts=outcome is Outcome.COMMIT)
        self._clearing.decided(committed=outcome is Outcome.COMMIT)
        self._followers.decided(counts=outcome is Outcome.COMMIT)
        self._registry.microbatches.decided(counts=outcome is Outcome.COMMIT)
        self._has_computed = self._has_looked = False
        self._seen_with -= {*self._sharing.ending}
        self._seen_with |= {*self._sharing.ending} if self._sees_forward else set()
        self._sees_forward = False
        if outcome is Outcome.COMMIT:
            if not self._registry.announces_steps:
                self._client.took_step()  # when the optimizers step, nobody says
            self._own.batches_committed += now.num_participants
            if not now.serves_learners:
                self._serving.withdraw()  # who has not received this state by now gets a later one
        took_s, name = time.monotonic() - self._started_at, self._client.replica_id
        fate, is_to_take = self._outcomes.fate(outcome, now), self._client.has_to_take_step()
        spent = self._timekeeper.ends_step(fate, is_to_take=is_to_take)
        self._events.add(
            StepCommitted(
                step=vote.step,
                quorum_id=vote.quorum_id,
                replica_id=name,
                num_participants=now.num_participants,
                took_s=took_s,
                spent=spent,
            )
            if outcome is Outcome.COMMIT
            else StepDiscarded(
                step=vote.step, quorum_id=vote.quorum_id, replica_id=name, reason=reason, took_s=took_s, spent=spent
            )
        )
        self._outcomes.ended(vote, outcome, reason, now, took_s)

    def shutdown(self, timeout_s: float) -> None:
        """End the threads; wait so long for each at most."""
        self._worker.shutdown(timeout_s=timeout_s)
        self._healing.shutdown()
        self._check.shutdown(timeout_s=timeout_s)


def _makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step makes an optimizer's first state and moves nothing, as those of torch's state dict functions."""
    return not optimizer.state and not any(float(group.get("lr", 1.0)) for group in optimizer.param_groups)


def _is_in_backward() -> bool:
    """Whether this thread computes a part of a backward pass, as in a hook of it."""
    return bool(torch._C._current_graph_task_id() != -1)


def _as_long_as_others(limit: timedelta, now: ReplicaView) -> timedelta:
    """Return how long to wait for the members: they may be as far apart as their ways here were long."""
    formed = now.quorum
    if formed is None:
        return limit
    return max(limit, timedelta(seconds=formed.patience_s))
