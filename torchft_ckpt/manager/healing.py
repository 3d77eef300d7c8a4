"""Moving the state: what a replica serves, what it fetches, and loading it whole or not at all.

The state is {"user": {key: state_dict()}, "torchft": {"step", "batches_committed", "quorum_id", "epoch", "settings"}}: torchft's
layout, the name of the state, because a source may still hold another one of the same step, and its optimizers' settings.

The users' `state_dict` functions run on the training thread, or while it waits for us; their `load_state_dict` functions
on the training thread alone. What arrives is checked against what is registered before the first of them is called.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch

from torchft_ckpt.checkpointing import CheckpointTransport, StateDictLock
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.state.local_state import tensors_but_optimizer_state
from torchft_ckpt.checkpointing.state.optimizer_loading import dtypes_kept
from torchft_ckpt.checkpointing.state.optimizer_state import with_optimizer_state
from torchft_ckpt.checkpointing.state.tree import in_words
from torchft_ckpt.checkpointing.state.versions import Counted, count_writes
from torchft_ckpt.core.joining import Reception
from torchft_ckpt.core.messages import QuorumFormed, Receives, StateLocated
from torchft_ckpt.core.recovery import same_rank_peers
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    LayoutMismatchError,
    SourceLostError,
    SourceRefusedError,
    StateDictLoadError,
    StateFormatError,
    StateMismatchError,
    TransferCancelledError,
    torn_where_it_raises,
)
from torchft_ckpt.manager.checking import Leaf, leaves_to_compare
from torchft_ckpt.manager.comparing import Differences, compare_states, fixed, not_returned
from torchft_ckpt.manager.layout import ParameterLayout, frozen_in_words, layout_of
from torchft_ckpt.manager.optimizer_settings import settings_of, take_settings, with_inner
from torchft_ckpt.manager.still import StateHeld, StateToServe, Unsteady, hold_still, hold_to_save, owned_by, tensors_in
from torchft_ckpt.threads import Threads

logger = logging.getLogger(__name__)
_CANCEL_TIMEOUT_S = 30.0
_SAY_S = 0.25


class StateRegistry:
    """The users' pairs of functions.

    Args:
        lock: held for writing while a state is loaded.
    """

    def __init__(self, lock: StateDictLock) -> None:
        self._lock = lock
        self._load: dict[str, Callable[[Any], None]] = {}
        self._get: dict[str, Callable[[], Any]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._moving: set[str] = set()
        self._unguarded: list[torch.optim.Optimizer] = []
        self._layout: tuple[int, ParameterLayout] | None = None
        self._in_function = threading.local()
        self._unsteady = Unsteady()
        self._agreed_on: set[str] = set()
        self._frozen_for_rounds: str | None = None
        self._after_restore: list[Callable[[], None]] = []
        self._has_untold = False
        """Something that moves belongs to optimizers that are not guarded."""

    def register(
        self,
        key: str,
        load: Callable[[Any], None],
        get: Callable[[], Any],
        *,
        kept_still: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        trains_apart: bool = False,
        after_restore: Callable[[], None] | None = None,
    ) -> None:
        """Add a pair; `kept_still`: optimizer steps do not change it. Raises `ConfigError` where the key is taken.

        `optimizers`: whose state is in it, where they are not guarded. `trains_apart`: between two changes of it every group
        trains by itself; it is loaded after all others. `after_restore`: called when a restore is over.
        """
        if key in self._load:
            raise ConfigError(f"state dict functions are registered under {key!r} already", party=key)
        self._load[key] = load
        self._get[key] = get
        self._unguarded += optimizers
        self._after_restore += [] if after_restore is None else [after_restore]
        if trains_apart:
            self._agreed_on.add(key)
            self._frozen_for_rounds = self.frozen()
        if not kept_still:
            self._moving.add(key)
            self._has_untold = self._has_untold or bool(optimizers)

    @property
    def is_empty(self) -> bool:
        return not self._get

    @property
    def is_kept_still(self) -> bool:
        """Whether guarded optimizers change nothing of the state."""
        return not self._moving

    def capture(self) -> dict[str, Any]:
        """Call all `state_dict` functions. What they return refers to live tensors."""
        with self._noted("get"):
            return {key: get() for key, get in self._get.items()}

    @contextlib.contextmanager
    def _noted(self, kind: str) -> Iterator[None]:
        before, self._in_function.kind = self.in_function, kind
        try:
            yield
        finally:
            self._in_function.kind = before

    @property
    def in_function(self) -> str:
        """Which of the users' functions the calling thread is in: "get", "load", or "" for none."""
        return getattr(self._in_function, "kind", "")

    @property
    def knows_optimizers(self) -> bool:
        """Whether there are optimizers whose state is made where they have none yet."""
        return bool(self._optimizers or self._unguarded)

    @property
    def is_sharded(self) -> bool:
        """Whether there are parameters of which this process holds parts, as far as is known."""
        return self._layout is not None and self._layout[1].is_sharded

    def layout(self) -> ParameterLayout:
        """Return what has to be alike in all groups of the parameters that are here.

        Parameters are those of guarded optimizers; without one, all sharded tensors that are registered, but state of
        optimizers. On the training thread.

        Raises:
            UnsupportedValueError: what is here of a parameter is no box.
        """
        parameters = self._parameters()
        if self._layout is None or self._layout[0] != len(parameters):
            named = (
                [(f"parameter {number}", parameter) for number, parameter in enumerate(parameters)]
                if self.knows_optimizers
                else tensors_but_optimizer_state(self.capture())
            )
            self._layout = len(parameters), layout_of(named, only_sharded=not self.knows_optimizers)
        return self._layout[1]

    def frozen(self) -> str:
        """Say which parameters of the optimizers need no gradient now; empty where no optimizer is known.

        Groups that train apart exchange what needed one when that was registered, whatever they train later.
        """
        if self._frozen_for_rounds is not None:
            return self._frozen_for_rounds
        return frozen_in_words([parameter.requires_grad for parameter in self._parameters()])

    def _parameters(self) -> list[torch.Tensor]:
        return _parameters_of(self._known())

    def _known(self) -> list[torch.optim.Optimizer]:
        return with_inner([*self._optimizers, *self._unguarded])

    def capture_to_receive(self, *, beside_steps: bool = False, also_frozen: bool = False) -> dict[str, Any]:
        """As `capture`, as what a state is received for: what arrives takes the layout of the tensors that are here.

        Optimizer state that does not exist yet is there for it, where parameters are sharded. On the training thread, or while
        it waits; `beside_steps`: it does not, so guarded optimizers, which it may be stepping, are left alone.
        """
        if not beside_steps:
            self.layout()
        if not self.is_sharded:
            return self.capture()
        optimizers = with_inner(self._unguarded) if beside_steps else self._known()
        with with_optimizer_state(optimizers, also_frozen=also_frozen):
            return self.capture()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that changes what it owns under the write lock alone."""
        self._optimizers.append(optimizer)
        self._layout = None

    def capture_to_serve(self) -> StateToServe:
        """As `capture`, with copies of the small tensors that a forward pass may change while they are served.

        These are the ones that belong to no guarded optimizer: BatchNorm's running statistics, for example. Whatever changed
        without the lock while it was served before is copied as well.
        """
        held = hold_still(self.capture(), [] if self.is_kept_still else with_inner(self._optimizers), self._unsteady)
        return held if self._agreed_on or self.is_kept_still else held._replace(settings=settings_of(self._known()))

    def count_writes(self) -> list[Counted]:
        """Return the versions of the guarded optimizers' parameters. On the training thread."""
        return [counted for parameter in _parameters_of(self._optimizers) for counted in count_writes(parameter)]

    def num_bytes(self) -> int:
        """Return the size of what the optimizers own here."""
        return sum(part.nbytes for part in owned_by(self._known()).values())

    @property
    def is_used_by_loops(self) -> bool:
        """Whether a training loop uses the state between two quorums. Where groups train apart it is the outer loop's."""
        return not self.is_kept_still and not self._agreed_on

    def comparison_with(self, captured: dict[str, Any]) -> Callable[[object], Differences]:
        """Return what says how a state that is received differs from this one, which `capture_to_serve` has just returned.

        It is to be called before the next step of an optimizer ends, on any thread.
        """
        here = fixed(captured)
        return lambda received: compare_states(here, received, self._known())

    def leaves_to_compare(self) -> list[Leaf]:
        """Return what has to be equal in all groups of the state of now. On the training thread.

        Of groups that train apart it is what they agreed on, and nothing of the optimizers that they train with.
        """
        captured = self.capture()
        still = captured.keys() - self._moving
        if self._agreed_on:
            return leaves_to_compare({key: captured[key] for key in still}, (), still=still)
        return leaves_to_compare(captured, self._known(), still=still)

    def take_settings(self, settings: object) -> list[str]:
        """Give optimizers the settings of the source, and say what differed. On the training thread."""
        return take_settings(self._known(), settings)

    def not_returned(self, user: dict[str, Any]) -> Differences:
        """Say what the functions do not return of what has just been loaded, large tensors apart. On the training thread."""
        return not_returned(self.capture(), user)

    def hold_to_save(self, state: dict[str, Any], *, by_key: bool) -> StateHeld:
        """Return a state as it is to be saved while training goes on.

        What every group has its own of is what a forward pass may change, all that no optimizer owns (BatchNorm's running
        statistics), or, where the groups train apart between two rounds, all that moves.

        Args:
            state: as `capture` returned it, or a state dict of the caller's.
            by_key: it is the former.
        """
        if by_key and self.is_kept_still:
            return StateHeld(state, frozenset(), False)
        held = hold_to_save(state, with_inner(self._optimizers))
        if self._agreed_on:
            own = {key: held.state[key] for key in self._moving} if by_key else held.state
            held = held._replace(of_group=frozenset(map(id, tensors_in(own))))
        # Guarded optimizers leave the lock alone where all that is registered is kept still.
        return held._replace(changes_untold=held.changes_untold or self.is_kept_still or self._has_untold)

    def end_restore(self) -> None:
        """Tell those who want to know that a checkpoint was restored, or that the state is to come from others."""
        for tell in self._after_restore:
            tell()

    def check(self, user: object) -> dict[str, Any]:
        """Return what was received, if each registered key is in it and no other.

        Raises:
            StateMismatchError: it names the keys; nothing was loaded.
        """
        if not isinstance(user, dict) or set(user) != set(self._load):
            have = sorted(map(in_words, user)) if isinstance(user, dict) else type(user).__name__
            raise StateMismatchError(
                f"the source's state has the keys {have}, this replica registered {sorted(self._load)}; register the"
                " same state dict functions on all replicas",
            )
        return user

    def load(self, user: dict[str, Any]) -> None:
        """Call all `load_state_dict` functions: last those of what the groups agreed on, where they train apart.

        It is to be in the model then, whatever the others have loaded into it of one group's own. Optimizers that are known
        get their state in its own dtypes, which torch would cast to those of their parameters.

        Raises:
            StateDictLoadError: one of them raised; what is loaded now is undefined.
        """
        with self._lock.write(), self._noted("load"), dtypes_kept(self._known()):
            for key, load in sorted(self._load.items(), key=lambda pair: pair[0] in self._agreed_on):
                try:
                    load(user[key])
                except Exception as error:
                    raise StateDictLoadError.of(key, error) from error


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    parameters = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return list({id(parameter): parameter for parameter in parameters}.values())


def _tell_nobody(reach_s: float, does: Receives) -> None:
    """Nobody waits for what is received."""


class Healing:
    """One fetch at a time, on a thread of its own, from all sources that the quorum names.

    Args:
        transport: fetches.
        timeout: overall deadline of a fetch.
        rank: of this process in its replica group.
        world_size: of the replica group.
    """

    def __init__(self, transport: CheckpointTransport[Any], timeout: timedelta, *, rank: int, world_size: int) -> None:
        self._transport = transport
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._worker = Threads("torchft_ckpt-heal")
        self._fetch: Future[Any] | None = None
        self._wanted: QuorumFormed | StateLocated | None = None
        self._is_cancelled = False
        self._is_in_place = False
        self._differences: Differences | None = None
        self._reception = Reception()
        self._tell: Callable[[float, Receives], None] = _tell_nobody
        self.took_s = 0.0
        self.needs_local = False
        """What arrived without a state that is here could not be made: that has to be captured before the next one."""

    def start(
        self,
        wanted: QuorumFormed | StateLocated,
        local: dict[str, Any] | None,
        in_place: bool,
        timeout: timedelta | None = None,
        compare: Callable[[object], Differences] | None = None,
        on_end: Callable[[str], None] = lambda failure: None,
        tell: Callable[[float, Receives], None] = _tell_nobody,
    ) -> None:
        """Begin to fetch a state.

        Args:
            wanted: which, and who holds it.
            local: what the registered functions return here: what is equal in it is not fetched.
            in_place: receive into it; the training thread waits for `wait` before it does anything with it.
            timeout: instead of the one given to the constructor.
            compare: says what differs between what is here and what the registered functions returned there.
            on_end: called on the thread when the fetch is over, with the reason where it failed.
            tell: called on it a few times a second with the seconds that the transfer, or later the load, still takes; 0 at
                the end of each.
        """
        self.cancel()
        self._wanted = wanted
        self._is_cancelled = False
        self._is_in_place = in_place and local is not None and isinstance(self._transport, CheckpointTransport)
        limit = self._timeout if timeout is None else timeout
        self._differences = None
        self._tell = tell
        self._reception.begin()

        def fetch() -> Any:
            try:
                state = self._run(wanted, local, limit)
            except BaseException as error:
                on_end(str(error) or type(error).__name__)
                raise
            tell(0.0, Receives.TRANSFER)
            on_end("")
            if compare is not None:
                self._differences = compare(state.get("user") if isinstance(state, dict) else None)
            return state

        self._fetch = self._worker.submit(fetch)

    def has_arrived(self, within_s: float) -> bool:
        """Wait at most so long for the fetch; return whether it is over and did not fail."""
        fetch = self._fetch
        return fetch is not None and not wait([fetch], within_s).not_done and fetch.exception() is None

    def differences(self) -> Differences:
        """Return what was found to differ, where it was to be compared; call it after `wait`."""
        if self._differences is None:
            raise RuntimeError("internal error: nothing was to be compared")
        return self._differences

    def expected_s(self, num_bytes: int) -> float | None:
        """Return how long receiving a state takes; None: the transport does not tell."""
        tells = isinstance(self._transport, CheckpointTransport) and not self._transport.needs_process_group
        return self._reception.expected_s(num_bytes) if tells else None

    @property
    def load_s(self) -> float:
        """Seconds that loading took the last time."""
        return self._reception.load_s

    def _note(self, progress: TransferProgress) -> None:
        left_bytes = progress.total_bytes - progress.received_bytes - progress.skipped_bytes
        reach_s = self._reception.progress(
            left_bytes=left_bytes,
            done_bytes=progress.brought_bytes + progress.skipped_bytes,
            elapsed_s=progress.elapsed_s,
        )
        if left_bytes and not self._is_cancelled:
            self._tell(reach_s, Receives.TRANSFER)

    @contextlib.contextmanager
    def loading(self, does: Receives) -> Iterator[None]:
        """Tell how long loading still takes while the body, which loads what arrived, runs.

        Args:
            does: loads, and when.
        """
        started, is_over = time.monotonic(), threading.Event()

        def say() -> None:
            while not is_over.is_set():
                self._tell(self._reception.loading(time.monotonic() - started), does)
                is_over.wait(_SAY_S)

        said = self._worker.submit(say)
        try:
            yield
            self._reception.loaded(time.monotonic() - started)
        finally:
            is_over.set()
            said.result()
        self._tell(0.0, does)

    def wait(self) -> dict[str, Any]:
        """Return the received state, whole and of the right step; its own part is what a Manager says of itself.

        Raises:
            TransferError, StateFormatError: why it could not be had; a state of another name is refused.
        """
        if self._fetch is None or self._wanted is None:
            raise RuntimeError("internal error: no fetch was started")
        state = self._fetch.result()
        wanted = self._wanted.version
        own = state.get("torchft") if isinstance(state, dict) else None
        found = tuple(own.get(key) for key in ("step", "quorum_id", "epoch")) if isinstance(own, dict) else None
        if not isinstance(own, dict) or found != (wanted.step, wanted.quorum_id, wanted.epoch):
            raise SourceRefusedError(
                f"asked {self._source_name()} for {wanted}, got (step, quorum, epoch) {in_words(found)}"
            )
        batches = own.get("batches_committed", 0)
        if type(batches) is not int or not 0 <= batches < 2**63:
            raise StateFormatError(
                f"{self._source_name()} sent {wanted} with a number of committed batches that is none",
                self._source_name(),
            )
        return state

    def cancel(self) -> None:
        """Give up a fetch in progress; what it brings is thrown away. Any thread."""
        fetch = self._fetch
        if fetch is not None and not fetch.done():
            self._is_cancelled = True
            if isinstance(self._transport, CheckpointTransport):  # torchft's own transports cannot be cancelled
                self._transport.cancel_recv()

    def has_overwritten(self) -> bool:
        """Whether the last fetch has written to the state that is here, or may have: until it is loaded, it is torn.

        Waits for a fetch that was cancelled, some milliseconds as a rule.
        """
        fetch = self._fetch
        if fetch is None or not self._is_in_place:
            return False
        try:
            error = fetch.exception(timeout=_CANCEL_TIMEOUT_S)
        except (TimeoutError, FutureTimeoutError, CancelledError):
            return True
        return not isinstance(error, CheckpointError) or error.state_overwritten

    def withdraw(self) -> None:
        """Stop serving: the step is committed, and who has not loaded its state by now was left behind."""
        if isinstance(self._transport, CheckpointTransport):
            self._transport.withdraw_checkpoint()
        else:
            self._transport.disallow_checkpoint()

    def shutdown(self) -> None:
        """Cancel, and end the thread."""
        self.cancel()
        self._worker.shutdown(timeout_s=5.0)

    def _run(self, wanted: QuorumFormed | StateLocated, local: dict[str, Any] | None, limit: timedelta) -> Any:
        if self._is_cancelled or self._wanted is not wanted:
            raise TransferCancelledError("the step that this transfer was for is over")
        sources = [source for source in wanted.sources if any(source.checkpoint_addresses)]
        if not sources:
            raise SourceLostError(f"no source of {wanted.version} can be reached for this rank")
        names = ", ".join(source.replica_id for source in sources)
        step = wanted.version.step
        started = time.monotonic()
        logger.info("fetching step %d from %s", step, names)
        if isinstance(self._transport, CheckpointTransport):
            groups = [source.checkpoint_addresses for source in sources]
            try:
                state = self._fetch_state(
                    self._transport, groups, step, limit, None if local is None else {"user": local}
                )
            except StateMismatchError as error:
                if local is not None:
                    raise
                self.needs_local = True
                raise CheckpointError(
                    f"what is here was not captured before this step; it heals in the next: {error}"
                ) from error
        else:  # one of torchft's own
            first = sources[0]
            metadata = next(iter(first.checkpoint_addresses[self._rank : self._rank + 1]), "")
            if not metadata:
                raise SourceLostError(f"{first.replica_id} has no rank {self._rank}", party=first.replica_id)
            state = self._transport.recv_checkpoint(
                src_rank=first.replica_rank, metadata=metadata, step=step, timeout=limit
            )
        self.took_s = time.monotonic() - started
        logger.info("fetched step %d from %s in %.3f s", step, names, self.took_s)
        return state

    def _fetch_state(
        self,
        transport: CheckpointTransport[Any],
        groups: list[list[str]],
        step: int,
        limit: timedelta,
        local_state: dict[str, Any] | None,
    ) -> Any:
        """Fetch from the ranks of the same number, or, where their shards are not those of this rank, from all ranks."""
        until = time.monotonic() + limit.total_seconds()
        addresses = same_rank_peers(groups, self._rank, self._world_size)
        is_alike = bool(addresses)
        has_written = False
        with torn_where_it_raises(f"fetching step {step}", "local_state", lambda: has_written):
            while True:
                try:
                    if is_alike:
                        return transport.fetch_checkpoint(
                            addresses,
                            step,
                            limit,
                            local_state=local_state,
                            in_place=self._is_in_place,
                            on_progress=self._note,
                        )
                    return transport.fetch_sharded(
                        groups,
                        self._rank,
                        self._world_size,
                        step,
                        limit,
                        local_state=local_state,
                        in_place=self._is_in_place,
                        on_progress=self._note,
                    )
                except StateMismatchError as error:
                    # Of sources that differ an earlier one may have sent something.
                    has_written = has_written or error.state_overwritten
                    if is_alike and isinstance(error, LayoutMismatchError):
                        logger.info("re-sharding: %s", error)
                        is_alike = False
                    elif self._is_in_place and not has_written:
                        # A tensor of another shape: whether that can be loaded is for the user's function to say.
                        logger.info("not received in place: %s", error)
                        self._is_in_place = False
                    else:
                        raise
                limit = timedelta(seconds=max(until - time.monotonic(), 0.0))

    def _source_name(self) -> str:
        return self._wanted.sources[0].replica_id if self._wanted and self._wanted.sources else "the source"
