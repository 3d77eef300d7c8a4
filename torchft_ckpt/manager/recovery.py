"""One recovery of this rank: the quorum thread begins to fetch the state that a quorum names, the training thread loads it.

It waits for that before it computes anything, and all ranks of the group load it, or none does. A state of the name of that which
is here is compared with it, and loaded where it differs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft_ckpt.checkpointing.state.versions import Counted
from torchft_ckpt.core.coordination.learning import RESTS, SAY_EVERY_S, in_words
from torchft_ckpt.core.coordination.messages import (
    Answer,
    Given,
    JoinProgress,
    Receives,
    Role,
    StateArrived,
    StateLocated,
    StateVersion,
    clip,
    name_some,
)
from torchft_ckpt.core.coordination.replica import StepPlan
from torchft_ckpt.core.coordination.trial import NOWHERE, Corrections
from torchft_ckpt.core.training.ledger import Waits
from torchft_ckpt.errors import (
    CheckpointError,
    ReplicasDifferError,
    StateDictLoadError,
    StateMismatchError,
    UnsupportedValueError,
)
from torchft_ckpt.events import Healed
from torchft_ckpt.manager.comparing import Differences
from torchft_ckpt.manager.event_queue import EventQueue
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.state_registry import OwnState, StateRegistry
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper
from torchft_ckpt.manager.volatile import StateToServe

logger = logging.getLogger(__name__)
_SAID_BEFORE_S = 0.5
"""What is said to be left while a state function is called: nobody knows how long, and who is silent is left behind."""
_COMES_IN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The training thread's preparations for the quorum that it asks for."""

    version: StateVersion
    """Of the state, as it is asked with."""
    captured: StateToServe | None
    """The state, to serve it."""
    counted: list[Counted]
    """The versions of parameters, where the state may have to be captured later."""
    trainer_waits: bool
    """The training thread waits for the quorum."""
    is_untouched: bool
    """No forward pass was computed in this step."""
    has_pending_request: bool
    """Somebody who looks at this job from outside asks for the state."""
    stood_s: float = 0.0
    """How long the state was captured and shown for those who come in, while training stood still."""


class Recovery:
    """Gets the state of a quorum, if it is another one than that which is here.

    Args:
        is_alone: this group has one rank.
        limit: within which all ranks of the group have to have fetched the state.
    """

    def __init__(
        self,
        healing: Healing,
        registry: StateRegistry,
        serving: StateServing,
        own: OwnState,
        client: StepClient,
        *,
        events: EventQueue,
        timekeeper: Timekeeper,
        is_alone: bool,
        limit: timedelta,
    ) -> None:
        self._healing = healing
        self._registry = registry
        self._serving = serving
        self._own = own
        self.client = client
        self._events = events
        self._timekeeper = timekeeper
        self.is_alone = is_alone
        self._limit = limit
        self.is_pending = False
        """A state is fetched, or has been, and is not loaded yet."""
        self._say_at = 0.0
        """When to say again how far it is with what it receives outside of the quorum."""
        self.num_healed = 0
        self.num_corrected = 0
        self._corrections = Corrections()
        self._not_returned: frozenset[str] = frozenset()
        """Paths in the state that was loaded last which the functions did not return afterwards."""

    # ------------------------------------------------------------------------------------------- on the quorum thread

    def begin(self, plan: StepPlan, prepared: Prepared) -> None:
        """Begin to fetch what a quorum wants this rank to load, if it does."""
        formed = plan.formed
        if not plan.load:
            self.say_fetched(formed)
            return
        if not prepared.trainer_waits:
            self.client.note_error(
                CheckpointError("it lacks the newest state, and did not wait for the quorum to get it")
            )
            self.say_fetched(formed, "it did not wait for the quorum")
            return
        # What was loaded may hold up whoever asks for it: a load as well, for those who wait.
        say = functools.partial(self._tell, formed, _SAID_BEFORE_S, Receives.LOADS)
        self._healing.calls("state_dict")
        with self._healing.saying(say, after_s=_SAID_BEFORE_S):
            receiving = self._registry.capture_to_receive(also_frozen=not formed.names_state)
        self._healing.calls("")
        self.is_pending = True
        # Else nobody could say what differed; and an outer loop that loads puts its global parameters into the model. A state of
        # the same step, as it was in another attempt, may be the only one that is left if its source dies.
        is_whole = prepared.version == formed.version
        in_place = prepared.is_untouched and not (is_whole or formed.differs or self._registry.trains_apart)
        tell = functools.partial(self._tell, formed)

        def on_end(failure: str) -> None:
            self.say_fetched(formed, failure, loads=self._healing.differs)

        compare = None
        if formed.differs:
            compare = self._registry.comparison_with((prepared.captured or self._registry.capture_to_serve()).state)
        self._healing.start(formed, receiving, in_place, compare=compare, on_end=on_end, tell=tell)

    def say_fetched(self, formed: Answer, failure: str = "", *, loads: bool = False) -> None:
        """Tell the other ranks of this group that its state is here, or why it will not be: all of them load it, or none."""
        if formed.role is not Role.HEALTHY and not self.is_alone:
            self.client.send(StateArrived(request_id=formed.request_id, failure=clip(failure), loads=loads))

    def _tell(self, formed: Answer, reach_s: float, does: Receives) -> None:
        progress = self._healing.progress
        said = JoinProgress(
            quorum_id=formed.quorum_id,
            step=formed.version.step,
            reach_s=reach_s,
            does=does,
            done_bytes=progress.received_bytes + progress.skipped_bytes if progress is not None else 0,
            total_bytes=progress.total_bytes if progress is not None else 0,
            takes=self._healing.takes,
        )
        self.client.send(said)
        if formed.differs or formed.held:
            return
        now = time.monotonic()
        if formed.follows and now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            logger.info("%s follows the others outside of the quorum: it %s", self.client.replica_id, in_words(said))

    # ----------------------------------------------------------------------------------------- on the training thread

    @contextlib.contextmanager
    def comes_in(self) -> Iterator[None]:
        """Around what this group does, and not the script's loop, between the load of a state that a quorum is held for and the
        step: those who wait are told of it if it takes long.
        """
        now = self.client.view()
        if not now.came_in or now.quorum is None:
            yield
            return
        say = functools.partial(self._tell, now.quorum, _SAID_BEFORE_S, Receives.LOADS)
        with self._healing.saying(say, after_s=_COMES_IN_S):
            yield
        self._tell(now.quorum, 0.0, Receives.LOADS)

    def rest(self, formed: Answer) -> None:
        """Keep a state that was received outside of the quorum for a while, if this group is a spare. On the training thread.

        A rank that asks before the others has them ask as well.
        """
        client, now = self.client, time.monotonic()
        until = now + max(RESTS * self._healing.took_s, SAY_EVERY_S)
        if formed.why is not Given.TO_STAY or client.view().version != formed.version or client.rest(now):
            return  # it could not be had, or loaded; or one of the others was lost meanwhile
        logger.info("%s: this spare is ready: it has the state of step %d", client.replica_id, formed.version.step)
        with self._timekeeper.waiting(Waits.CALL):
            while (now := time.monotonic()) < until:
                self._tell(formed, 0.0, Receives.NOTHING)  # again, as a lighthouse may have been started again
                if client.rest(min(until, now + SAY_EVERY_S)):
                    return

    def load(self) -> None:
        """Wait for the state, if one is fetched, and load it; a transfer that fails costs this replica the step and no more.

        Raises:
            StateDictLoadError, StateMismatchError: it cannot be loaded here.
            UnsupportedValueError: what is here cannot be moved, nor so received. Only as a job starts.
            ReplicasDifferError: see `_correct`.
        """
        plan = self.client.plan()
        if not self.is_pending or plan is None:
            return
        self.is_pending = False
        if plan.formed.differs:
            with self._timekeeper.waiting(Waits.COMPARISON):
                self._correct(plan.formed)
            return
        is_beside = plan.formed.follows and not plan.formed.held
        with self._timekeeper.waiting(Waits.STATE_BESIDE if is_beside else Waits.STATE):
            self._load(plan)

    def _load(self, plan: StepPlan) -> None:
        step = plan.formed.version.step
        try:
            self.take_state(as_group=not self.is_alone)
        except (StateMismatchError, StateDictLoadError):
            raise
        except Exception as error:  # whatever a transport raises: not healed yet, and no more
            if isinstance(error, UnsupportedValueError) and plan.formed.names_state:
                raise
            logger.warning("%s: healing to step %d failed: %s", self.client.replica_id, step, error)
            self.client.note_error(error)
            if plan.formed.follows and not plan.formed.held:
                self._healing.distance.failed()
            return
        self.client.load_finished(plan.formed.version)
        if plan.formed.follows and not plan.formed.held:
            self._healing.followed()
        else:
            self._healing.distance.joined()
        self.note_healed(plan.formed)
        logger.info("%s healed to step %d", self.client.replica_id, step)

    def _correct(self, formed: Answer) -> None:
        """Load what differs of the state that the others wait with, before all begin the step.

        Raises:
            ReplicasDifferError: the same differs for the third time in a row.
            StateDictLoadError, StateMismatchError: it cannot be loaded here.
        """
        name, step = self.client.replica_id, formed.version.step
        sources = name_some(source.replica_id for source in formed.sources)
        try:
            state = self._wait_for_state(as_group=not self.is_alone)
            found = self._healing.differences()
        except (StateMismatchError, StateDictLoadError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transport raises: it comes in as one that lacks the state
            logger.warning(
                "%s holds another state of step %d than %s, and could not load theirs: %s", name, step, sources, error
            )
            self.client.note_error(error)
            return
        user, paths, of_all, own = self._registry.keeping_own(state["user"], found.paths, self._own.known)
        # Else another rank of this group holds another state, or what differs may be each group's own.
        is_concerned = bool(of_all) or (self.is_alone and not paths)
        again = self._corrections.note(step, of_all) if is_concerned else ""
        why = (
            "Its script changes once a round what the others change at another place, or by what it had read before it came in:"
            " change it if loop.round_counted() is True, and read manager.current_step() there"
            if self._registry.trains_apart
            else "Its loop used something that it had read before it had this state (read the step after zero_grad), or"
            " that the others left out since (continue), or changes what belongs to a step after zero_grad, in this"
            " group alone, or by a count that no state_dict function returns (take manager.current_step()), or by"
            " random numbers of its own (weights that it moves to evaluate and back, as an optimizer's eval() and"
            " train() do, are rounded by that: do so in all groups, by manager.current_step())"
        ) + (f". Each group has its own {name_some(own)}, and no step may be computed with that" if own else "")
        if again:
            differs = ReplicasDifferError(
                f"{name} came to another state of step {step} than {sources}, for the third time in a row, in {again}. {why}:"
                " mend the loop. What each group may have for itself is not to be registered",
                name,
            )
            self.client.end(differs)
            raise differs
        # What loads may be a collective of all ranks, which do not differ in the same.
        keys = {key for key in user if any(path == key or path.startswith(f"{key}.") for path in paths)}
        self._load_received({**state, "user": user}, keys if self.is_alone else None)
        self.client.load_finished(formed.version)
        self.num_corrected += bool(paths) or is_concerned
        if not is_concerned:
            what = name_some(paths) if paths else "nothing here"
            logger.info("%s takes what differs before step %d from %s: %s", name, step, sources, what)
            return
        self.note_healed(formed)
        times = self._corrections.count(of_all)
        logger.log(
            logging.WARNING if times.bit_count() == 1 else logging.INFO,
            "%s came to another state of step %d than %s: %s differed. It has loaded theirs before this step is computed%s. %s",
            name,
            step,
            sources,
            name_some(paths) if paths else NOWHERE,
            f", {times} times by now (a warning at each power of two)" if times > 1 else "",
            why,
        )

    def take_state(self, *, as_group: bool = False) -> None:
        """Wait for what is fetched, and load it; where that leaves a torn state it is said to be torn.

        Args:
            as_group: load it where all ranks of this group have it, and only there.

        Raises:
            StateDictLoadError, StateMismatchError: it cannot be loaded here.
            Whatever a transport raises.
        """
        self._load_received(self._wait_for_state(as_group))
        self.num_healed += 1

    def receive(self, located: StateLocated, in_place: bool, limit: timedelta) -> Exception | None:
        """Fetch and load a state outside of quorums, once; return the failure, if another attempt may help.

        Raises:
            StateDictLoadError, StateMismatchError: it cannot be loaded here.
        """
        self._healing.start(located, self._registry.capture_to_receive(), in_place, limit)
        try:
            self.take_state()
        except (StateMismatchError, StateDictLoadError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transport raises: asked again, until the time is up
            return error
        return None

    def note_healed(self, located: Answer | StateLocated) -> None:
        """Say that the state which was fetched from the sources of this message is loaded."""
        self._events.add(
            Healed(
                step=located.version.step,
                quorum_id=located.version.quorum_id,
                replica_id=self.client.replica_id,
                sources=tuple(source.replica_id for source in located.sources),
                took_s=self._healing.took_s,
                received_bytes=0 if (progress := self._healing.progress) is None else progress.brought_bytes,
            )
        )

    def _wait_for_state(self, as_group: bool = False) -> dict[str, Any]:
        try:
            plan = self.client.plan()
            is_held = plan is not None and plan.formed.held
            state = self._healing.wait(says=is_held)
            self._registry.check(state.get("user"))
            if as_group:
                self.client.await_loading(self._limit)
        except BaseException:
            self._give_up()
            raise
        return state

    def _give_up(self) -> None:
        self._healing.cancel()
        if self._healing.has_overwritten():
            self.client.load_torn()

    def _load_received(self, state: dict[str, Any], keys: Collection[str] | None = None) -> None:
        """Load it; `keys`: the registered functions to be called, None: all."""
        self._serving.end_offer()
        try:
            with self._healing.loading():
                self._healing.calls("load_state_dict")
                if not self._registry.load(state["user"], keys, in_place=self._healing.is_in_place):
                    self._healing.may_overwrite = False
                    raise CheckpointError(
                        "load_state_dict wrote to the tensors that it was given before it had copied them (w.zero_(); w.add_(s))."
                        " They are the registered ones, received in place. This group receives into fresh memory from now on, and"
                        " heals in the next step"
                    )
                self._healing.calls("state_dict after load_state_dict")
                self._take_own(state["torchft"])
                found = self._registry.not_returned(state["user"])
                self._check_returned(found)
                if slow := self._healing.takes:
                    logger.info("%s: %s: the other groups may have waited for it", self.client.replica_id, slow)
        except BaseException:  # weights without the counters and settings that belong to them are no state either
            self.client.load_torn()
            raise

    def _check_returned(self, found: Differences) -> None:
        """Warn of what state_dict does not return of the state that was loaded.

        Raises:
            StateDictLoadError: it did not return that of the state before either.
        """
        # Settings of optimizers travel by themselves.
        again = tuple(path for path in found.paths if path in self._not_returned and "param_groups" not in path)
        now = self.client.view()
        is_held = now.quorum is not None and now.quorum.held
        if not now.follows or is_held:  # who follows, or is corrected, may load more than one state
            self._not_returned = frozenset(found.paths)
        if again:
            raise StateDictLoadError(
                f"{self.client.replica_id} has loaded a state for the second time, and state_dict does not return what"
                f" load_state_dict was given ({found._replace(paths=again)}): this replica group cannot come to the state of the"
                " others. Let load_state_dict set it at once, or leave out of state_dict what each group may have of its own",
                party=again[0],
            )
        if found.paths:
            logger.warning(
                "%s: after load_state_dict, state_dict does not return what was loaded (%s): what it returns is stale, or was not"
                " loaded. A step that depends on that comes to another state than the other replica groups; set it in"
                " load_state_dict, as a scheduler's learning rate in optimizer.param_groups",
                self.client.replica_id,
                found,
            )

    def _take_own(self, own: dict[str, Any]) -> None:
        self._own.take_served(own)
        settings = self._registry.take_settings(own)
        if settings:
            logger.warning(
                "%s: load_state_dict did not set what the source's optimizers are set to (%s); it is set now. state_dict returns"
                " stale settings, or none: a step with them comes to another state than that of the other replica groups",
                self.client.replica_id,
                name_some(settings),
            )

    def abandon(self) -> None:
        """The step is over: what was not loaded in it is thrown away."""
        if self.is_pending:
            self._give_up()
        self.is_pending = False
