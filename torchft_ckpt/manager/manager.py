"""The training loop's one partner: it finds who trains together, reduces the gradients, and says whether a step counts.

Three threads meet here. The *training thread* calls the public methods. The *quorum thread* waits for the quorum, connects
the process group and starts serving or fetching, beside the forward pass. The *coordination thread* brings messages to the
`Conversation`. What the replica may do is decided by `core.replica` alone.

What becomes of an error:
- of another group, of the network, of a collective: the step is discarded, `should_commit` returns False, training goes on;
- of this group that no further step can mend (a rank gone, refused by the lighthouse): raised from the next call.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch
from torch.distributed import ReduceOp, Work

from torchft_ckpt import config
from torchft_ckpt.checkpointing import CheckpointTransport, HTTPTransport, StateDictLock
from torchft_ckpt.checkpointing.state.versions import Counted, is_changed
from torchft_ckpt.coordination import GroupService, RankSession
from torchft_ckpt.core.discards import DiscardRun
from torchft_ckpt.core.messages import (
    CommitVote,
    JoinProgress,
    OnReplicasDiffer,
    Outcome,
    QuorumFormed,
    Receives,
    Role,
    StateArrived,
    StateVersion,
    clip,
    name_some,
)
from torchft_ckpt.core.optimizers import SharedStep
from torchft_ckpt.core.replica import Comparison, ReplicaSettings, ReplicaState, StepPlan, StepWishes
from torchft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    GroupBrokenError,
    MaxRetriesExceededError,
    NoQuorumError,
    ProcessGroupAbortedError,
    ProcessGroupError,
    StateDictLoadError,
    StateMismatchError,
    UnsupportedValueError,
)
from torchft_ckpt.manager.catching_up import StandingOffer, await_holder, catch_up
from torchft_ckpt.manager.checking import EqualityCheck
from torchft_ckpt.manager.clearing import Clearing, Issued
from torchft_ckpt.manager.collectives import Collectives, ExceptionWithTraceback, done_work, fill_with_nothing, first_of
from torchft_ckpt.manager.conversation import Conversation
from torchft_ckpt.manager.gathering import Gathering, gather
from torchft_ckpt.manager.guarding import guard_steps
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.launch import Timeouts, resolve_launch
from torchft_ckpt.manager.over_group import agree_who_sends, needs_process_group
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.manager.still import StateToServe
from torchft_ckpt.process_group.quantization import Quantization, find_codec
from torchft_ckpt.threads import Threads, end_at_exit

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


TOO_FEW_LOG_S = 10.0


class WorldSizeMode(Enum):
    """What the gradients are divided by when there are more replica groups than `min_replica_size`."""

    DYNAMIC = 0
    """All replica groups that are there contribute; the divisor is their number."""
    FIXED_WITH_SPARES = 1
    """`min_replica_size` groups contribute; the others are spares, which train along and contribute zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatistics:
    """What happened so far in this process. Durations in seconds."""

    step: int
    quorum_id: int
    num_committed: int
    num_discarded: int
    num_left_behind: int
    num_healed: int
    last_heal_s: float
    num_corrected: int
    """Times that the state was loaded again after healing, because what came out of a step differed from the sources'."""


@dataclass(slots=True)
class _Late:
    """The collectives between one vote and the next step."""

    count: int = 0
    has_failed: bool | None = None
    """Whether one of them has failed, as it was when the next step began; None: it has not begun."""


class Manager:
    """Fault tolerance for one rank of one replica group; parameters and methods are torchft's.

    Where an argument is not given the environment is read (`torchft_ckpt.config` has the table), then the default taken.

    Args:
        pg: the process group across replica groups; the manager configures it.
        load_state_dict: loads what `state_dict` of another replica returned; None: `register_state_dict_fn` is used. A group
            that has neither trains as long as it need not heal; then it is refused, by name, and the others train on.
        state_dict: returns the state to recover from: model, optimizer, whatever must be equal on all replicas.
        min_replica_size: the fewest contributing replica groups with which a step counts.
        use_async_quorum: find the quorum, and heal, beside the forward pass. A replica that heals so contributes nothing
            to that step, nor to the next, at whose beginning it compares its state with that of the others. False:
            `start_quorum` returns when quorum and state are there.
        timeout: of collectives and of the commit decision; 60 s.
        quorum_timeout: after so long without a quorum it is counted as one failed attempt; 60 s.
        connect_timeout: to the lighthouse, the store and the group's manager service; 60 s.
        rank, world_size: inside this replica group.
        world_size_mode: see `WorldSizeMode`.
        store_addr, store_port: TCPStore at which the ranks of this replica group find each other; rank 0 hosts it where nobody
            does. Each group of several ranks has one of its own; a group of one uses none.
        lighthouse_addr: `HOST:PORT`; needed at rank 0.
        replica_id: name of this replica group, the same on all of its ranks and on no other group's; a restarted group should
            have the same, as it takes the place of the one before.
        port: of the manager service that rank 0 runs for the other ranks; 0 for any.
        hostname: address that peers reach this process at; default: `TORCHFT_CKPT_HOSTNAME`, else that of the interface named by
            `NCCL_SOCKET_IFNAME` (beside NCCL) or `GLOO_SOCKET_IFNAME`, else the one that routes to the lighthouse. What was
            chosen is used for all: default transport, Gloo, store and manager service.
        heartbeat_interval: 100 ms.
        checkpoint_transport: moves the state; default `HTTPTransport`. One that needs the process group, as torchft's
            `PGTransport` does, is used when that is connected, within `timeout`, and all groups wait until the state is through.
        init_sync: make all replicas equal to one of them before the first step.
        max_retries: raise after more than so many discarded steps in a row; None: never.
        quorum_retries: attempts at a quorum after the first before `QuorumTimeoutError`; None: wait for ever, saying what
            for. (torchft gives up after the first; a job that waits for a node to come back should not end.)
        join_budget: how long healthy replica groups always wait for one that joins, beyond their own step; 5 s.
        join_stall_limit: how long they may stand still for all that join, if these say that they need it; 60 s. What was used
            comes back as a twentieth of the time that passes. Who needs more than is left waits outside, and is told until
            when; None: there is no limit. Where groups differ the least holds.
        warm_up: where this group comes into a running job, let its first iteration be its own: outside of the quorum, averaging
            leaves what is averaged as it is and `should_commit` is False, so that nobody waits while kernels are compiled.
        heal_in_place: receive straight into the tensors that the registered `state_dict` functions return, where the training
            thread waits for the state anyhow. `load_state_dict` then gets those tensors, filled; False where it could not
            load a tensor from itself.
        transfer_timeout: overall deadline of fetching the state; 10 min. It binds the joiner, not the others.
        token: shared secret of the job.
        job: its name at the lighthouse, which serves many jobs; the same in all replica groups; `default`. What starts all
            groups at once sets `TORCHFT_CKPT_JOB` to another name for each start.
        check_equal_every: compare the states of the replica groups after each so many committed steps; 0: never. All groups
            give the same. Compared are parameters, the state and settings of optimizers that are wrapped or guarded, and plain
            values of what is registered, between groups that hold that step. Not compared are other tensors and arrays
            (BatchNorm's running statistics), states of random number generators, and what outer loops let differ.
        on_replicas_differ: what becomes of groups that differ. "warn" names them, and the first tensors or values, in
            the logs of the lighthouse and of the groups. "heal" makes a minority load the others' state too, where a strict
            majority of the compared groups is equal. "stop" discards the step and raises `ReplicasDifferError` in all groups.

    Raises:
        ConfigError: an argument or variable cannot be used.
        LighthouseUnreachableError, AuthenticationError, ProtocolVersionError, RefusedError, AddressInUseError,
        GroupBrokenError: as their names say; nothing is left running.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta | None = None,
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int | None = None,
        *,
        join_budget: timedelta | None = None,
        join_stall_limit: timedelta | None = timedelta(seconds=60),
        warm_up: bool = True,
        heal_in_place: bool = True,
        transfer_timeout: timedelta | None = None,
        token: str | None = None,
        job: str | None = None,
        check_equal_every: int = 0,
        on_replicas_differ: Literal["warn", "heal", "stop"] = "warn",
    ) -> None:
        if min_replica_size < 1:
            raise ConfigError(f"min_replica_size={min_replica_size}: at least one has to train", "min_replica_size")
        if (load_state_dict is None) != (state_dict is None):
            raise ConfigError("load_state_dict and state_dict belong together: pass both or neither", "state_dict")
        if check_equal_every < 0:
            raise ConfigError(f"check_equal_every={check_equal_every}: 0 means never", "check_equal_every")
        if on_replicas_differ not in (policies := [policy.value for policy in OnReplicasDiffer]):
            raise ConfigError(f"on_replicas_differ={on_replicas_differ!r} is none of {policies}", "on_replicas_differ")
        seconds = config.parse_seconds
        self._timeouts = Timeouts(
            collective=config.resolve(timeout, config.TIMEOUT, timedelta(seconds=60), seconds),
            quorum=config.resolve(quorum_timeout, config.QUORUM_TIMEOUT, timedelta(seconds=60), seconds),
            connect=config.resolve(connect_timeout, config.CONNECT_TIMEOUT, timedelta(seconds=60), seconds),
            transfer=config.not_negative(transfer_timeout, "transfer_timeout") or timedelta(minutes=10),
        )
        budget = config.resolve(join_budget, config.JOIN_BUDGET, timedelta(seconds=5), seconds)
        stall_limit = config.not_negative(join_stall_limit, "join_stall_limit")
        stall_limit_s = None if stall_limit is None else stall_limit.total_seconds()
        retries = config.resolve(quorum_retries, config.QUORUM_RETRIES, -1, config.parse_count)
        self._quorum_retries = None if retries < 0 else retries
        self._max_retries = max_retries
        self._use_async_quorum = use_async_quorum
        self._launch = resolve_launch(
            rank=rank,
            world_size=world_size,
            store_addr=store_addr,
            store_port=store_port,
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            port=port,
            hostname=hostname,
            job=job,
            token=token,
            connect_timeout=self._timeouts.connect,
            beside_nccl="nccl" in pg.getBackendName().lower(),
        )
        if self._launch.host.is_chosen:
            pg.use_hostname(self._launch.host.address)
        self._pg = pg
        self._replica = ReplicaState(
            ReplicaSettings(
                min_replica_size=min_replica_size,
                init_sync=init_sync,
                heal_inline=not use_async_quorum,
                fixed_with_spares=world_size_mode is WorldSizeMode.FIXED_WITH_SPARES,
                join_budget_s=budget.total_seconds(),
                join_stall_limit_s=stall_limit_s,
                warm_up=warm_up,
                check_equal_every=check_equal_every,
                on_replicas_differ=OnReplicasDiffer(on_replicas_differ),
            )
        )
        self._talk = Conversation(
            self._replica,
            self._launch.replica_id,
            job=self._launch.job,
            abort=pg.abort,
            cancel=lambda: self._healing.cancel(),
            tell_leaves=lambda wanted: self._link.send(self._check.answer(wanted)),
        )
        self._quorum_future: Future[None] | None = None
        self._last_wishes = StepWishes(allow_heal=True, shrink_only=False)
        self._has_computed = False
        """A forward pass was computed in the open step: what it left is not of a state that is loaded from now on."""
        self._asked_with = "", ""
        """Layout and frozen parameters, as the open step was asked for with."""
        self._step_started_at = 0.0
        self._counted: list[Counted] = []
        """The versions of parameters when the step began, where its state may have to be captured later."""
        self._is_load_pending = False
        self._load_failure: StateMismatchError | StateDictLoadError | None = None
        """Of a load before the forward pass, to be raised at the vote."""
        self._vote: CommitVote | None = None
        self._is_committed: bool | None = None
        """How the step was decided; None: it is open."""
        self._sharing = SharedStep()
        self._late = _Late()
        self._batches_committed = 0
        self._commit_failures = 0
        self._discards = DiscardRun()
        self._counts = {Outcome.COMMIT: 0, Outcome.DISCARD: 0, Outcome.LEFT_BEHIND: 0}
        self._num_healed = 0
        self._num_corrected = 0
        self._too_few_since: float | None = None
        self._too_few_said_at: float | None = None
        self._is_shut_down = False
        self._owner = os.getpid()
        self._has_warned_of_steps = False

        self._state_dict_lock = (
            checkpoint_transport.lock
            if isinstance(checkpoint_transport, HTTPTransport)
            else StateDictLock(self._timeouts.collective)
        )
        self._registry = StateRegistry(self._state_dict_lock)
        self._check = EqualityCheck(self._state_dict_lock)
        if load_state_dict is not None and state_dict is not None:
            self._registry.register("default", load_state_dict, state_dict)
        self._transport: CheckpointTransport[Any] = checkpoint_transport or HTTPTransport(
            timeout=self._timeouts.collective,
            num_chunks=0,
            hostname=self._launch.host,
            token=self._launch.token or None,
            lock=self._state_dict_lock,
        )
        logger.info(
            "%s of job %s serves its state at %s", self._launch.replica_id, self._launch.job, self._transport.metadata()
        )
        self._moves_over_group = needs_process_group(self._transport)
        if not isinstance(self._transport, CheckpointTransport):
            logger.warning(
                "%s moves its state by %s.%s, which is not of this library: where it is torchft's it unpickles what it receives,"
                " which executes what a peer sends; and all groups wait until a state is through. HTTPTransport does neither",
                self._launch.replica_id,
                type(self._transport).__module__,
                type(self._transport).__qualname__,
            )
        self._worker = Threads("torchft_ckpt-quorum")
        self._heal_in_place = heal_in_place
        self._healing = Healing(
            self._transport,
            self._timeouts.transfer,
            rank=self._launch.group_rank,
            world_size=self._launch.group_world_size,
        )
        self._offer = StandingOffer(self._transport, self._registry)
        self._link: GroupService | RankSession
        try:
            self._link = self._connect(heartbeat_interval)
        except BaseException:  # an interrupt too: nobody else could end them
            self._stop_threads(wait=True)
            if checkpoint_transport is None:
                self._transport.shutdown()
            raise
        store_address = self._link.store_address()
        self._store_prepared = pg.prepare_store(store_address) if store_address else None
        self._clearing = Clearing(pg, name=lambda: self._talk.replica_id, ask=self._ask_to_start)
        self._has_warned_of_none = False
        self._collectives = Collectives(
            pg,
            self._clearing,
            on_error=self._talk.note_collective_error,
            schedule=self._link.schedule,
            on_stall=self._report_stall,
            on_wait=self._report_wait,
        )
        end_at_exit(self.shutdown)

    def _connect(self, heartbeat_interval: timedelta) -> GroupService | RankSession:
        launch, group_store = self._launch, self._launch.group_store
        if launch.group_rank == 0 or group_store is None:
            service = GroupService(
                world_size=launch.group_world_size,
                lighthouse_addr=launch.lighthouse_addr,
                hello=lambda: self._talk.hello(launch.group_world_size),
                on_message=self._talk.hear,
                on_refused=self._talk.end,
                hostname=launch.host.address,
                port=launch.manager_port,
                job=launch.job,
                token=launch.token,
                replica_id=launch.replica_id,
                heartbeat_interval=heartbeat_interval,
                connect_timeout=self._timeouts.connect,
            )
            if group_store is not None:
                try:
                    group_store.announce(service.address)
                except BaseException:
                    service.shutdown("the other ranks of its group cannot find it")
                    raise
            return service
        rank_0 = group_store.find_rank_0(launch.name)
        self._talk.replica_id = rank_0.replica_id
        return RankSession(
            address=rank_0.manager_address,
            group_rank=launch.group_rank,
            on_message=self._talk.hear,
            token=launch.token,
            replica_id=rank_0.replica_id,
            heartbeat_interval=heartbeat_interval,
            connect_timeout=self._timeouts.connect,
        )

    # ------------------------------------------------------------------------------------------- what is to be moved

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
        *,
        kept_still: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        trains_apart: bool = False,
        after_restore: Callable[[], None] | None = None,
    ) -> None:
        """Add a pair of functions to the state that replicas heal from.

        All replicas must register the same keys, before their first step. Both are called on the training thread, or while it
        waits for a quorum; `state_dict` of a state that is kept still on any thread between two of its changes. They must not
        communicate with other ranks: one rank may be asked for its state in a step in which another is not.

        Args:
            key: names the pair.
            load_state_dict: loads what `state_dict` of another replica returned.
            state_dict: returns the state.
            kept_still: the state changes only between `disallow_state_dict_read` and `allow_state_dict_read`, by its owner,
                and not in the steps of optimizers. Where that holds for all that is registered, `guard_optimizer` costs
                nothing, and the state can be offered between two steps (`offer_state`).
            optimizers: whose state is in it, where they are neither wrapped nor guarded: where parameters are sharded, a replica
                that has none of it yet makes it before it receives.
            trains_apart: between two changes of this state every replica group trains by itself, as in an outer loop: what
                else is registered is each group's own, unless it is kept still too. It is loaded after all others.
            after_restore: called on the training thread at the end of `Checkpointer.restore`, where that has loaded a checkpoint
                or found that other groups hold a newer state.

        Raises:
            ConfigError: the key is taken.
        """
        self._registry.register(
            key,
            load_state_dict,
            state_dict,
            kept_still=kept_still,
            optimizers=optimizers,
            trains_apart=trains_apart,
            after_restore=after_restore,
        )

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Deprecated by torchft: `register_state_dict_fn` with a key of its own."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def disallow_state_dict_read(self) -> None:
        """The state is about to change: take the write lock, once what is being served has been copied aside.

        For optimizers that `Optimizer` does not wrap, see `guard_optimizer`. May be called again by the thread that
        holds the lock.
        """
        self._talk.state_changes()
        self._offer.end()
        self._transport.disallow_checkpoint()
        self._state_dict_lock.acquire_write()

    def allow_state_dict_read(self) -> None:
        """The state is whole again: give the write lock back. Without effect where it is not held."""
        self._state_dict_lock.release_write()

    def report_torn_state(self) -> None:
        """Say that the state is not the one that the step counter names, because a committed step could not be taken.

        This replica then contributes nothing and commits nothing until it has healed. `Optimizer` calls it.
        """
        self._talk.load_torn()

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make each step of an optimizer take and give back the write lock, also where it raises.

        `Optimizer` does so for the one that it wraps. Where a step raised, call `report_torn_state` if the script is to go on.

        A step within a `state_dict` function is warned of: torch's `get_optimizer_state_dict` makes state by one where there is
        none, as before the first step. Optimizers that count their steps count it, which a plain loop does not.
        """
        self._registry.guard(optimizer)
        guard_steps(optimizer, self._enter_optimizer_step, self._leave_optimizer_step)

    def _enter_optimizer_step(self) -> None:
        if self._registry.in_function == "get" and not self._has_warned_of_steps:
            self._has_warned_of_steps = True
            logger.warning(
                "%s: a state_dict function steps the optimizer, as torch's get_optimizer_state_dict does where there is no"
                " state yet: Adam then counts one step more than in a loop that does not; return optimizer.state_dict() instead",
                self.replica_id(),
            )
        if not self._registry.is_kept_still and self._registry.in_function != "load":
            self.disallow_state_dict_read()

    def _leave_optimizer_step(self) -> None:
        if self._registry.in_function != "load":  # there the lock is held for all of it
            self.allow_state_dict_read()

    @property
    def is_in_state_dict_fn(self) -> bool:
        """Whether the calling thread is in one of the registered functions."""
        return bool(self._registry.in_function)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore what `state_dict` returned, together with the checkpoint that it was saved with.

        It says that this replica's state was restored on purpose: a job whose newest state is lost goes on from it.

        Raises:
            ConfigError: it is no manager's state.
        """
        try:
            step, batches = int(state_dict["step"]), int(state_dict["batches_committed"])
        except (KeyError, TypeError, ValueError) as error:
            message = f"this is no Manager's state dict (keys step, batches_committed): {state_dict!r}"
            raise ConfigError(message, party="state_dict") from error
        if step < 0 or batches < 0:
            raise ConfigError(f"a Manager's state dict holds no negative counts: {state_dict!r}", party="state_dict")
        self._talk.restored(step)
        self._batches_committed = batches

    def state_dict(self) -> dict[str, int]:
        """Return what has to be saved with a checkpoint: the step and the batches committed."""
        return {"step": self.current_step(), "batches_committed": self._batches_committed}

    # --------------------------------------------------------------------------------------------------------- quorum

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
        *,
        contributes: bool = True,
        patience: timedelta | None = None,
        wait: bool | None = None,
    ) -> None:
        """Begin a step: find who trains together. `Optimizer.zero_grad` calls it.

        Call it before the forward pass, on the training thread, when all that is registered as state is of the step (a
        learning-rate schedule, say): it may be handed to others from now on. The first quorum of a process is waited for; with
        `use_async_quorum` later ones are found beside the forward pass.

        A step that is open already goes on where nothing has happened in it, and the others notice nothing: a loop may begin a
        step at the end of an iteration and again at the beginning of the next one, or skip a batch. Otherwise the open step is
        abandoned, and the others discard it: where a collective was issued or an error reported in it, the user changed or
        restored the state meanwhile, froze or unfroze parameters, or the arguments are others (`timeout` excepted). One that
        was begun with `contributes=False` or `wait` is always abandoned.

        Args:
            allow_heal: whether a replica that is behind may heal in this step; all must pass the same.
            shrink_only: let nobody join.
            timeout: instead of `quorum_timeout`.
            contributes: False: this replica did not train for this step. It adds nothing, is not counted, and takes the
                outcome, as one that joins; unless nobody contributes.
            patience: how long the way to this step took, where that is long. Members that live and have not asked are waited
                for as long again, and so are collectives and the decision.
            wait: for the quorum: True, False (and never heal before it), or None: as `use_async_quorum` says.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
            QuorumTimeoutError: with `quorum_retries` set, no quorum in that many attempts.
            CheckpointError: see `should_commit`.
        """
        patience_s = patience.total_seconds() if patience is not None else 0.0
        wishes = StepWishes(
            allow_heal=allow_heal,
            shrink_only=shrink_only,
            contributes=contributes,
            patience_s=patience_s,
            waits=wait,
        )
        self._last_wishes = wishes
        if self._may_keep_step(wishes):
            self._settle(has_to_wait=self._talk.wants()[0])
            return
        self._leave_step()
        if self._store_prepared is not None:
            # Who asks is waited for, so what may take long comes before asking.
            self._store_prepared.wait(self._timeouts.connect.total_seconds())
            self._store_prepared = None
        self._step_started_at = time.monotonic()
        has_to_wait, has_to_capture = self._talk.wants()
        is_wished_for = False
        if isinstance(self._transport, HTTPTransport):
            self._transport.note_step(self.current_step())
            is_wished_for = self._transport.is_wished_for(self.current_step())
        has_to_wait = has_to_wait if wait is None else wait
        has_to_capture = has_to_capture or is_wished_for
        can_capture_later = (not self._use_async_quorum and wait is not False) or self._registry.is_kept_still
        layout = self._registry.layout()
        is_sharded = layout.is_sharded
        # What arrives for sharded tensors takes its layout from those that are here, and named tuples and enums their classes.
        has_to_capture = has_to_capture or ((is_sharded or self._healing.needs_local) and self.is_behind)
        captures = has_to_capture and not can_capture_later
        if self._replica.is_checked and contributes:
            self._check.begin(self._replica.version, self._registry.leaves_to_compare())
        else:
            self._check.forget()
        # First, as a state_dict function may refresh tensors that it has handed out before: what is served is captured last.
        receiving = self._registry.capture_to_receive() if captures and is_sharded and self.is_behind else None
        captured = self._registry.capture_to_serve() if captures else None
        self._counted = [] if captured or can_capture_later else self._registry.count_writes()
        if captured is not None and receiving is None:
            receiving = captured.state
        request = self._talk.begin(
            allow_heal=allow_heal,
            shrink_only=shrink_only,
            can_serve=captured is not None or can_capture_later,
            store_address=self._launch.store_address,
            contributes=contributes,
            patience_s=patience_s,
            waits=wait,
            compares=self._registry.is_used_by_loops,
            reach_s=self._healing.expected_s(self._registry.num_bytes()) if self.is_behind else None,
            load_s=self._healing.load_s,
            is_first_of_kind=self._sharing.is_first_of_kind,
        )
        self._sharing.is_first_of_kind = False
        self._asked_with = layout.digest, self._registry.frozen()
        request = msgspec.structs.replace(
            request,
            checkpoint_addresses=[self._transport.metadata()],
            layout=layout.digest,
            layout_text=layout.text if self._launch.group_rank == 0 else None,
            frozen=self._asked_with[1],
            can_load=not self._registry.is_empty,
            num_collectives=self._clearing.count,
        )
        self._link.send(request)
        limit = max(config.not_negative(timeout) or self._timeouts.quorum, patience or timedelta(0))
        self._quorum_future = self._worker.submit(
            lambda: self._run_quorum(
                captured,
                receiving,
                limit,
                trainer_waits=has_to_wait,
                may_receive_in_place=not self._has_computed,
                is_wished_for=is_wished_for,
            )
        )
        self._settle(has_to_wait)

    def ensure_step(self) -> None:
        """Begin a step as the last one was begun where a state may have to be loaded first; on the training thread.

        `DistributedDataParallel` calls it before a forward pass of training. A loop may so call `zero_grad` after its forward
        pass: what a group loads before it computes anything is there by then, and `zero_grad` finds the step open. It does
        nothing where a step is open, before there are an optimizer and a registered state, and where nothing is to be loaded.

        Raises: as `start_quorum`.
        """
        last = self._last_wishes
        is_outer = last.patience_s or last.waits is not None  # an outer loop begins its rounds itself
        is_ready = self._registry.knows_optimizers and not self._registry.is_empty
        may_begin = is_ready and not is_outer and not self._sharing.is_half_taken
        if may_begin and self._replica.begins_with_load and not self._replica.is_in_step:
            self.start_quorum(last.allow_heal, last.shrink_only, contributes=last.contributes)
        self._has_computed = self._has_computed or self._replica.is_in_step

    def begins_step(self, optimizer: object) -> bool:
        """An optimizer clears its gradients; return whether a step has to begin with that. `Optimizer.zero_grad` asks.

        Several that are wrapped share a step: the rule is in `core.optimizers`.
        """
        return self._sharing.clears(optimizer, is_decided=self._replica.is_between_steps)

    def takes_step(self, optimizer: object) -> None:
        """An optimizer is about to ask whether it has to step. `Optimizer.step` calls it.

        Raises:
            ConfigError: it steps again before all that share its last step have stepped.
        """
        if not self._sharing.steps(optimizer):
            raise ConfigError(
                "an optimizer steps again, and another one that cleared its gradients in the same step has not stepped yet: step"
                " all of them once in a step, and call zero_grad of those only that step in it"
            )

    def _settle(self, has_to_wait: bool) -> None:
        """Do what has to be done before the forward pass: wait for the quorum, load what is to be loaded before it."""
        if has_to_wait:
            self.wait_quorum()
            if self._has_computed:
                return  # what it computed is not of the state that arrives, which is loaded at the vote
            plan = self._talk.plan()
            if not self._is_load_pending or plan is None:
                return
            if plan.load_before_forward:
                self._load(before_forward=True)
            elif self._has_arrived(plan):
                self._load_in_time()

    def _load_in_time(self) -> None:
        """Load before the forward pass what could be loaded beside it.

        What fails is left for the vote: an error before the collectives would break them for all.
        """
        try:
            self._load(before_forward=True, is_required=False)
        except Exception as error:  # noqa: BLE001 - raised, or reported, at the vote
            self._is_load_pending = True
            if isinstance(error, StateMismatchError | StateDictLoadError):
                self._load_failure = error
            logger.info("%s does not load its state before this step is computed: %s", self.replica_id(), error)

    def _has_arrived(self, plan: StepPlan) -> bool:
        """Wait for the transfer as long as the plan says; return whether all ranks of this group load it now."""
        if self._launch.group_world_size == 1 or plan.compare:
            return self._healing.has_arrived(plan.transfer_wait_s)
        return self._talk.loads_before_forward(plan.formed, plan.transfer_wait_s, self._link.send)

    def _may_keep_step(self, wishes: StepWishes) -> bool:
        """Whether the step that is asked for can be the one that is open."""
        future = self._quorum_future
        if future is None:
            return False
        is_there = future.done()
        if is_there and future.exception() is not None:
            return False
        may_keep = self._talk.may_keep_step(
            wishes,
            has_reduced=is_there and self._clearing.count > 0,  # there is none before the quorum is there
            is_loading=self._is_load_pending or not is_there,
        )
        return may_keep and self._asked_with == (self._registry.layout().digest, self._registry.frozen())

    def _leave_step(self) -> None:
        """Abandon the step that is open, if there is one. What was issued after the decision ends first."""
        self._join_quorum_thread()
        self._vote = self._is_committed = None
        self._load_failure = None
        if self._collectives.has_open():
            # They must not end in the middle of the next one.
            if not self._replica.is_between_steps:
                self._talk.note_error(ProcessGroupAbortedError("the step was abandoned", self.replica_id()))
                self._pg.abort()
            self._collectives.wait_all()
        if self._late.count:
            self._ask_device()
        self._late.has_failed, self._late = self._talk.has_failed(), _Late()
        if self._is_load_pending:
            self._healing.cancel()
            if self._healing.has_overwritten():
                self._talk.load_torn()
            self._is_load_pending = False

    def wait_quorum(self) -> None:
        """Wait until the quorum is there and the process group is connected.

        Raises: as `start_quorum`.
        """
        if self._quorum_future is None:
            raise NoQuorumError(
                "there is no quorum before the first start_quorum (Optimizer.zero_grad calls it)", "manager"
            )
        self._quorum_future.result()

    def _join_quorum_thread(self) -> None:
        future, self._quorum_future = self._quorum_future, None
        if future is not None:
            future.exception()  # it was raised from wait_quorum already, or its step was abandoned

    def _run_quorum(
        self,
        captured: StateToServe | None,
        receiving: dict[str, Any] | None,
        limit: timedelta,
        *,
        trainer_waits: bool,
        may_receive_in_place: bool,
        is_wished_for: bool,
    ) -> None:
        """On the quorum thread."""
        plan = self._talk.await_plan(limit, self._quorum_retries, self._link.waiting_for)
        formed = plan.formed
        budget_s = formed.join_budget_s
        self._collectives.begin_step(
            None if budget_s is None else max(budget_s, formed.patience_s), is_new_quorum=plan.configure
        )
        if self._moves_over_group:
            self._move_over_group(plan, captured, receiving, trainer_waits=trainer_waits)
            return
        if plan.serve:
            self._serve(formed, captured, formed.destinations)
        elif is_wished_for and formed.role is Role.HEALTHY and not plan.load:
            self._serve(formed, captured, formed.destinations)  # to whoever looks at this job from outside
        self._start_healing(plan, captured, receiving, trainer_waits, may_receive_in_place=may_receive_in_place)
        if plan.configure:
            self._configure(formed)

    def _start_healing(
        self,
        plan: StepPlan,
        captured: StateToServe | None,
        receiving: dict[str, Any] | None,
        trainer_waits: bool,
        *,
        may_receive_in_place: bool,
        timeout: timedelta | None = None,
    ) -> None:
        formed = plan.formed

        def tell(reach_s: float, does: Receives) -> None:
            quorum_id, step = formed.quorum_id, formed.version.step
            self._link.send(JoinProgress(quorum_id=quorum_id, step=step, reach_s=reach_s, does=does))

        if plan.load:
            if trainer_waits:
                receiving = self._registry.capture_to_receive(also_frozen=formed.role is Role.LEARNER)
            elif self._registry.is_kept_still:
                receiving = self._registry.capture_to_receive(beside_steps=True)
            if receiving is None and self._registry.is_sharded:
                # It learnt only now that it is behind; the training thread may be in its forward pass.
                self.report_error(
                    CheckpointError("its shards were not captured before this step; it heals in the next")
                )
                self._say_fetched(formed, "its shards were not captured before this step")
            else:
                self._is_load_pending = True
                in_place = self._heal_in_place and trainer_waits and may_receive_in_place and plan.load_before_forward
                if plan.compare:
                    compare = self._registry.comparison_with((captured or self._registry.capture_to_serve()).state)
                    self._say_fetched(formed)
                    self._healing.start(formed, receiving, in_place, timeout, compare=compare, tell=tell)
                else:
                    self._healing.start(
                        formed,
                        receiving,
                        in_place,
                        timeout,
                        on_end=lambda failure: self._say_fetched(formed, failure),
                        tell=tell,
                    )
        else:
            if formed.role in (Role.JOINER, Role.INLINE) and self._launch.group_world_size > 1:
                tell(0.0, Receives.TRANSFER)
            self._say_fetched(formed)

    def _move_over_group(
        self,
        plan: StepPlan,
        captured: StateToServe | None,
        receiving: dict[str, Any] | None,
        *,
        trainer_waits: bool,
    ) -> None:
        """Connect, then serve and receive by a transport that uses the process group. On the quorum thread, to the end."""
        formed, limit = plan.formed, self._timeouts.collective
        if plan.configure:
            self._configure(formed)
        registry = self._registry
        can_receive = receiving is not None or trainer_waits or registry.is_kept_still or not registry.is_sharded
        can_receive = can_receive and formed.replica_rank < formed.replica_world_size
        try:
            destinations = agree_who_sends(self._pg, formed, limit, wants=plan.load and can_receive)
        except (ProcessGroupError, RuntimeError) as error:
            self._talk.note_collective_error(error)
            destinations, can_receive = [], False
        if destinations:
            self._serve(formed, captured, destinations)
        if plan.load and not can_receive:
            why = "its state cannot be received over the process group in this step"
            self.report_error(CheckpointError(f"{why}; it heals in a later one"))
            self._say_fetched(formed, why)
            return
        self._start_healing(plan, captured, receiving, trainer_waits, may_receive_in_place=False, timeout=limit)
        self._healing.has_arrived(limit.total_seconds())  # or not: then it is found at the vote

    def _say_fetched(self, formed: QuorumFormed, failure: str = "") -> None:
        """Tell the other ranks of this group that its state is here, or why it will not be: all of them load it, or none."""
        if self._launch.group_world_size > 1 and formed.role is not Role.HEALTHY:
            self._link.send(StateArrived(request_id=formed.request_id, failure=clip(failure)))

    def _serve(self, formed: QuorumFormed, captured: StateToServe | None, destinations: Sequence[int]) -> None:
        if self._offer.is_of(formed.version):
            return
        if captured is None:
            # In synchronous mode the training thread waits for us. Otherwise it may be in its forward pass; the lighthouse
            # asks for this only where nobody else could serve.
            captured = self._registry.capture_to_serve()
            if is_changed(self._counted):
                logger.warning(
                    "%s cannot serve step %d: a parameter was written to in place since zero_grad, without the write side of the "
                    "state dict lock",
                    self.replica_id(),
                    formed.version.step,
                )
                return
        versions = {"versions": captured.versions} if isinstance(self._transport, HTTPTransport) else {}
        try:
            self._transport.send_checkpoint(
                dst_ranks=list(destinations),
                step=formed.version.step,
                state_dict={
                    "user": captured.state,
                    "torchft": {**self._own_state(formed.version), "settings": list(captured.settings)},
                },
                timeout=self._timeouts.collective if self._moves_over_group else self._timeouts.transfer,
                **versions,
            )
        except Exception as error:  # whatever a transport raises, it is the joiner's loss: this replica's step goes on
            if isinstance(error, UnsupportedValueError) and formed.names_state:
                raise  # but a job whose state cannot be moved should say so when it starts
            logger.exception("%s cannot serve step %d", self.replica_id(), formed.version.step)

    def _own_state(self, version: StateVersion) -> dict[str, int | str]:
        return {
            "step": version.step,
            "batches_committed": self._batches_committed,
            "quorum_id": version.quorum_id,
            "epoch": version.epoch,
        }

    def _configure(self, formed: QuorumFormed) -> None:
        launch = self._launch
        prefix = f"torchft_ckpt/{formed.epoch}/{formed.quorum_id}/{launch.group_rank}"
        try:
            self._pg.configure(
                f"{formed.store_address}/{prefix}",
                self.replica_id(),
                formed.replica_rank,
                formed.replica_world_size,
                formed.quorum_id,
                launch.group_rank,
                launch.group_world_size,
            )
        except (ProcessGroupError, RuntimeError) as error:
            why = self._replica.error or error  # where the quorum broke meanwhile, that is why
            logger.warning("%s cannot connect quorum %d: %s", self.replica_id(), formed.quorum_id, why)
            self._talk.note_collective_error(error)
        else:
            self._talk.configured(formed)
            if formed.standby_store_address:
                self._pg.prepare_store(formed.standby_store_address)

    # ---------------------------------------------------------------------------------------------------- collectives

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | Quantization = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        """Reduce a tensor in place over the replica groups; by default average it over those that contribute.

        Waits for the quorum, not for the others. Never raises for what goes wrong on the way: the step is discarded then,
        and the tensor must not be used. A replica that does not contribute (healing, spare) changes nothing: it adds zeros to a
        sum or an average, and the lowest or highest value to a maximum or minimum.

        Between `should_commit` and the next `start_quorum`, a metric say, it belongs to the step just decided: to its quorum and
        its divisor, also where it was discarded. What goes wrong then discards no step; `wait` returns False. All groups issue
        it: one that waits for others that have gone on is told within about half a second.

        Args:
            tensor: any shape; a floating point dtype for an average.
            should_quantize: send a byte an element: "int8" (which True means too) or "fp8", with a scale for each 512. All
                ranks get the same bits; how far they may be off is in `process_group/quantized.py`. A value that is not
                finite turns its block into NaNs. Exact where the process group has one member. The same on all ranks.
            reduce_op: `ReduceOp.AVG`, or any that the process group knows; AVG or SUM where it is quantised.

        Returns:
            work; its future completes with the tensor and never fails. Its `wait` is False where the tensor must not be used.

        Raises:
            ValueError: an average of integers; no such quantisation, or not of this reduction or dtype.
            Also as `wait_quorum`.
        """
        codec = find_codec(should_quantize)
        if (reduce_op == ReduceOp.AVG or codec is not None) and not torch.is_floating_point(tensor):
            what = "an average" if codec is None else "quantisation"
            raise ValueError(f"{what} needs a floating point tensor, got {tensor.dtype}")
        if codec is not None and reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ValueError(f"{codec.name} is for AVG and SUM, not for {reduce_op}")
        if self._talk.error() is None:
            self.wait_quorum()
        late = self._late if self._talk.is_voted_on() else None
        if late is not None:
            late.count += 1
        if self._talk.skips_collective():
            return done_work(tensor, lambda: True)
        if not self.is_participating():
            fill_with_nothing(tensor, reduce_op)
        is_average = reduce_op == ReduceOp.AVG
        return self._collectives.allreduce(
            tensor,
            op=ReduceOp.SUM if is_average else reduce_op,
            divisor=self.num_participants() if is_average else None,
            timeout=self._at_least_patience(self._timeouts.collective) + self._join_wait(),
            failed=self._talk.has_failed if late is None else lambda: self._has_failed(late),
            codec=codec,
        )

    def _has_failed(self, late: _Late) -> bool:
        """Whether a collective that no vote follows has failed, which the device may know only when it is done."""
        if late.has_failed is None:
            self._ask_device()
            return self._talk.has_failed()
        return late.has_failed

    def _ask_device(self, *, synchronize: bool = True) -> None:
        """Note what has gone wrong on the device or in the process group."""
        if synchronize and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        error = self._pg.errored()
        if error is not None:
            self._talk.note_collective_error(error)

    def report_error(self, e: Exception) -> None:
        """Say that this step went wrong and must not count. Any thread."""
        self._talk.note_error(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step; after a lost connection, the one that says whose, once that is known."""
        return self._talk.error()

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails: an error, or a wait beyond `timeout`, is this step's error and gives `default`."""
        return first_of(
            fut,
            default=default,
            timeout=timeout or self._timeouts.collective,
            schedule=self._link.schedule,
            on_error=self.report_error,
        )

    def _report_stall(self) -> None:
        report = self._talk.note_stall()
        if report is not None:
            self._link.send(report)

    def _report_wait(self, issued: Issued, *, deviates: bool = False) -> bool:
        """Tell the lighthouse; returns whether a step is open, in which it answers."""
        report = self._talk.note_wait(issued, deviates=deviates)
        if report is not None:
            self._link.send(report)
        return report is not None

    def _ask_to_start(self, issued: Issued, timeout: timedelta) -> None:
        is_open = self._report_wait(issued, deviates=True)
        self._talk.await_clearance(issued, timeout if is_open else timedelta(0))

    # --------------------------------------------------------------------------------------------------------- commit

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End a step: return whether it counts, and the optimizer has to be stepped. `Optimizer.step` calls it.

        Call it once a step on the training thread of every rank, after the backward pass. All replica groups get the same
        answer, but for those that heal and are not ready in time. It waits for the open collectives, for the state where
        this replica heals, and for the decision. Called again before the next `start_quorum`, for a second optimizer say, it
        returns the same answer and counts nothing.

        Args:
            timeout: how long to wait for the decision, instead of `timeout` of the constructor.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
            MaxRetriesExceededError: with `max_retries` set.
            StateDictLoadError: a `load_state_dict` function raised; this replica's state is undefined until it heals.
            StateMismatchError: the source's state is not one that this replica can load.
            ConfigError: it is called again, and something was averaged since the decision. That may be gradients, which the
                decision is not about; this replica's state is undefined then until it heals.
        """
        self.wait_quorum()
        if self._is_committed is not None:
            return self._ask_again()
        vote = self._vote or self._cast_vote(synchronize=True)
        limit = self._at_least_patience(config.not_negative(timeout) or self._timeouts.collective)
        limit += self._join_wait()
        if self._replica.is_learner:
            outcome, reason = self._talk.learned()
        else:
            outcome, reason = self._talk.await_decision(vote, limit, self._link.send)
        self._is_committed = outcome is Outcome.COMMIT
        self._finish_step(vote, outcome, reason)
        return self._is_committed

    def _ask_again(self) -> bool:
        if self._late.count and self._is_committed:
            step = self.current_step() - 1
            self._talk.load_torn()  # the first optimizer has taken this step, the others have not
            raise ConfigError(
                f"step {step} was decided when its first optimizer stepped, and {self._late.count} collectives were issued since,"
                " which no vote is about: do all backward passes of a step before the first optimizer steps, and average a metric"
                " when all have stepped; or call zero_grad of one after the others have stepped, which begins a step of its own"
            )
        return bool(self._is_committed)

    def cast_vote(self) -> None:
        """Vote on the step already, if all of its collectives are done; `should_commit` then only asks for the decision.

        For loops that go on training beside the exchange: nobody waits then for the slowest to come and take what is decided.
        Call it on any thread, when the results of the collectives are there and before `should_commit`. A replica that has a
        state to load votes in `should_commit`, where it is loaded.

        Raises: as `wait_quorum`.
        """
        self.wait_quorum()
        if not self._is_load_pending and self._vote is None:
            # The caller's stream has waited; the device may be busy with the next step.
            self._cast_vote(synchronize=False)

    def _cast_vote(self, *, synchronize: bool) -> CommitVote:
        self._collectives.wait_all()
        self._ask_device(synchronize=synchronize)
        if self._is_load_pending:
            try:
                self._load(before_forward=False)
            except Exception as error:
                # Without a vote the others would learn of it by the next request, and may still be in the last collective then.
                self.report_error(error)
                self._send_vote()
                raise
        return self._send_vote()

    def _send_vote(self) -> CommitVote:
        digest = "" if self._talk.has_failed() else self._check.digest()
        vote = self._vote = self._talk.vote(*self._clearing.vote(), digest)
        if not self._replica.is_learner:
            self._link.send(vote)
        return vote

    def _join_wait(self) -> timedelta:
        """Return how much longer this step may take because replica groups join in it."""
        formed = self._replica.quorum
        return timedelta(seconds=0.0 if formed is None else formed.join_wait_s)

    def _at_least_patience(self, limit: timedelta) -> timedelta:
        """Members may be as far apart as their ways to this step were long."""
        formed = self._replica.quorum
        return limit if formed is None else max(limit, timedelta(seconds=formed.patience_s))

    def _load(self, before_forward: bool, *, is_required: bool = True) -> None:
        """Wait for the state and load it; a transfer that fails costs this replica the step and no more.

        Where it is not required yet, it raises what a transport raises.
        """
        plan = self._talk.plan()
        if plan is None:
            return
        self._is_load_pending = False
        failure, self._load_failure = self._load_failure, None
        if failure is not None:
            raise failure
        if plan.compare:
            self._take_comparison(plan.formed, before_forward)
            return
        try:
            self._take_state(as_group=self._launch.group_world_size > 1, before_forward=before_forward)
        except (StateMismatchError, StateDictLoadError):
            raise
        except Exception as error:
            if not is_required:
                raise
            # Whatever a transport raises: not healed yet, and no more.
            logger.warning("%s: healing to step %d failed: %s", self.replica_id(), plan.formed.version.step, error)
            self.report_error(error)
            return
        self._talk.loaded(plan.formed, before_forward=before_forward)
        logger.info("%s healed to step %d", self.replica_id(), plan.formed.version.step)

    def _take_comparison(self, formed: QuorumFormed, before_forward: bool) -> None:
        """Wait for what came out of the step before, compared with the sources' state, and load theirs where it differs.

        Where it cannot be compared this replica goes along, and tries again at the next quorum.
        """
        step, sources = formed.version.step, ", ".join(source.replica_id for source in formed.sources)
        try:
            state = self._wait_for_state()
            found = self._healing.differences()
        except (StateMismatchError, StateDictLoadError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transport raises: not compared yet, and no more
            message = "%s could not compare its state with that of %s at step %d, contributes nothing yet: %s"
            logger.warning(message, self.replica_id(), sources, step, error)
            return
        if found.comparison is not Comparison.EQUAL:
            self._healing.withdraw()  # what this replica may have served under that name
            self._load_received(state, before_forward)
            self._num_corrected += 1
        is_exact = self._talk.compared(found.comparison, before_forward=before_forward)
        if found.comparison is not Comparison.EQUAL:
            logger.warning(
                "%s came to another state of step %d than %s: its training loop used what was here before it healed, or has"
                " something of its own. %s differed. It has loaded theirs %s",
                self.replica_id(),
                step,
                sources,
                found,
                "before this step is computed" if before_forward else "while this step was computed",
            )
        if is_exact:
            logger.info(
                "%s is bit-equal to %s at step %d and contributes from the next step on",
                self.replica_id(),
                sources,
                step,
            )
        elif not before_forward:
            logger.warning(
                "%s contributes nothing yet, and compares its state again at the next step, for longer; if this repeats itself,"
                " give a longer join_budget",
                self.replica_id(),
            )

    def _take_state(self, *, as_group: bool = False, before_forward: bool = False) -> None:
        """Wait for what is fetched, and load it; where that leaves a torn state it is said to be torn.

        `as_group`: load it where all ranks of this group have it, and only there.

        Raises:
            StateDictLoadError, StateMismatchError: it cannot be loaded here.
            Whatever a transport raises.
        """
        self._load_received(self._wait_for_state(as_group), before_forward)
        self._num_healed += 1

    def _wait_for_state(self, as_group: bool = False) -> dict[str, Any]:
        try:
            state = self._healing.wait()
            self._registry.check(state.get("user"))
            if as_group:
                self._talk.await_loading(self._timeouts.transfer)
        except BaseException:
            self._healing.cancel()
            if self._healing.has_overwritten():
                self._talk.load_torn()
            raise
        return state

    def _load_received(self, state: dict[str, Any], before_forward: bool) -> None:
        if self._offer.end():
            self._transport.disallow_checkpoint()
        try:
            with self._healing.loading(Receives.LOAD_FIRST if before_forward else Receives.LOAD):
                self._registry.load(state["user"])
            self._take_own(state["torchft"])
            found = self._registry.not_returned(state["user"])
        except BaseException:  # weights without the counters and settings that belong to them are no state either
            self._talk.load_torn()
            raise
        if found.paths:
            logger.warning(
                "%s: after load_state_dict, state_dict does not return what was loaded (%s): what it returns is stale, or was not"
                " loaded. A step that depends on that comes to another state than the other replica groups; set it in"
                " load_state_dict, as a scheduler's learning rate in optimizer.param_groups",
                self.replica_id(),
                found,
            )

    def _take_own(self, own: dict[str, Any]) -> None:
        """Take what the source's Manager says of itself; `Healing.wait` has checked the count."""
        self._batches_committed = own.get("batches_committed", 0)
        settings = self._registry.take_settings(own.get("settings"))
        if settings:
            logger.warning(
                "%s: load_state_dict did not set what the source's optimizers are set to (%s); it is set now. state_dict returns"
                " stale settings, or none: a step with them comes to another state than that of the other replica groups",
                self.replica_id(),
                name_some(settings),
            )

    # --------------------------------------------------------------------------------------------- outside of quorums

    @property
    def is_behind(self) -> bool:
        """Whether this replica's state is not whole, has no name yet, or is older than one that is known to exist."""
        return self._talk.is_behind()

    @property
    def is_restored(self) -> bool:
        """Whether this replica's state was restored on purpose (`load_state_dict`), and no quorum has named it since."""
        return self._replica.restored

    def catch_up(self, timeout: timedelta | None = None) -> bool:
        """Get the newest state from the others between two steps, without a quorum; call it on the training thread.

        They have to offer it (`offer_state`). All ranks of this group get the same state. A step that is open is abandoned. Tried
        again, with a line in the log, where sources are lost or have gone on meanwhile.

        Args:
            timeout: instead of `transfer_timeout`.

        Returns:
            whether this replica holds the newest state now. If not, nobody is known to hold one that could be had: ask for a
            quorum.

        Raises:
            TransferTimeoutError: it could not be had in time.
            Also as `should_commit`.
        """
        self._leave_step()
        return self._catch_up(timeout, moving=False)

    def _catch_up(self, timeout: timedelta | None, *, moving: bool) -> bool:
        if self._moves_over_group:
            return False  # there is no process group outside of quorums
        return catch_up(
            self._talk,
            self._registry,
            self._healing,
            send=self._link.send,
            take_state=self._take_state,
            limit=config.not_negative(timeout) or self._timeouts.transfer,
            may_receive_in_place=self._heal_in_place,
            moving=moving,
        )

    def hand_over(self, timeout: timedelta | None = None) -> bool:
        """Stand still between two steps until another group holds the state of now; call it on the training thread.

        For a job that goes on in another layout: groups whose ranks hold other parts of the tensors cannot train together, but
        one can take over from the other (`take_over`). All ranks of this group call it, and then leave (`shutdown`).

        Args:
            timeout: how long to wait for somebody to take it, instead of `transfer_timeout`.

        Returns:
            whether a group that did not hold the state at the beginning holds it now.

        Raises:
            UnsupportedValueError: the state holds something that cannot be carried.
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        self._leave_step()
        version = self._replica.version
        if not version.proven or self.is_behind:
            return False
        self._offer.open(version, self._own_state(version), self.replica_id(), moving=True)
        limit = config.not_negative(timeout) or self._timeouts.transfer
        return await_holder(self._talk, send=self._link.send, limit=limit)

    def take_over(self, timeout: timedelta | None = None) -> bool:
        """Get the state that another group hands over (`hand_over`), on whatever layout this one has, before the first step.

        As `catch_up` otherwise. A quorum without that group is formed when it has left.
        """
        self._leave_step()
        return self._catch_up(timeout, moving=True)

    def newest_step_of_peers(self, timeout: timedelta | None = None) -> int | None:
        """Ask for the newest step that another living replica group is known to hold; None: none does, or nobody answered.

        All ranks of this group call it, on the training thread, between two steps; a step that is open is abandoned. A state
        that has never been in a quorum has no name, and is known to nobody.

        Args:
            timeout: instead of `connect_timeout`.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        self._leave_step()
        until = time.monotonic() + (config.not_negative(timeout) or self._timeouts.connect).total_seconds()
        located = self._talk.locate(self._link.send, until)
        return located.version.step if located is not None and located.sources else None

    def gather(self, timeout: timedelta | None = None) -> Gathering | None:
        """Meet the groups that start without a state as this one does, to look for one together, before the first step.

        All ranks of this group call it, on the training thread. No state is named by it and no step is open after it. See
        `Gathering` for what it says where others hold a state already.

        Args:
            timeout: instead of `quorum_timeout`.

        Returns:
            who is here; None where they did not come together in time, or their store cannot be reached: look alone then.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        self._leave_step()
        return gather(
            self._talk,
            self._launch,
            send=self._link.send,
            waiting_for=self._link.waiting_for,
            address=self._transport.metadata(),
            limit=config.not_negative(timeout) or self._timeouts.quorum,
        )

    def offer_state(self) -> None:
        """Serve the state of now to whoever catches up, until it changes; call it on the training thread after each change.

        It does so where all that is registered is kept still, and has a name. Nothing is copied or computed until
        somebody asks.
        """
        version = self._replica.version
        if version.proven and not self.is_behind:
            self._offer.open(version, self._own_state(version), self.replica_id())

    def _finish_step(self, vote: CommitVote, outcome: Outcome, reason: str) -> None:
        formed = self._replica.quorum
        self._clearing.decided(committed=outcome is Outcome.COMMIT)
        self._has_computed = False
        if outcome is Outcome.COMMIT:
            self._batches_committed += self.num_participants()
            self._commit_failures = 0
            self._warn_if_nothing_was_averaged(vote)
            self._healing.withdraw()
        elif not self._replica.warms_up:
            self._commit_failures += 1
        self._counts[outcome] += 1
        if formed is not None:
            why = "" if outcome is Outcome.COMMIT else f" reason={reason!r}"
            logger.info(
                "step=%d quorum=%d participants=%d/%d verdict=%s heal=%s took=%.3fs%s",
                vote.step,
                vote.quorum_id,
                self.num_participants(),
                formed.replica_world_size,
                outcome.value,
                "yes" if formed.role in (Role.JOINER, Role.INLINE) else "no",
                time.monotonic() - self._step_started_at,
                why,
            )
        self._warn_if_too_few(vote)
        self._warn_of_discards(outcome, reason)
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise MaxRetriesExceededError(
                f"{self._commit_failures} steps in a row were discarded, max_retries is {self._max_retries};"
                f" the last, step {vote.step}, because of: {reason}"
            )

    def _warn_if_nothing_was_averaged(self, vote: CommitVote) -> None:
        if vote.num_collectives == 0 and self.num_participants() > 1 and not self._has_warned_of_none:
            self._has_warned_of_none = True
            logger.warning(
                "%s: step %d was committed by %d replica groups, and none of them averaged anything: their weights drift apart."
                " Wrap the model in DistributedDataParallel, call set_all_reduce_hook, or average gradients by allreduce",
                self.replica_id(),
                vote.step,
                self.num_participants(),
            )

    def _warn_of_discards(self, outcome: Outcome, reason: str) -> None:
        """Say once that steps are discarded again and again for one cause, and what would help."""
        if outcome is Outcome.COMMIT:
            self._discards.committed()
        elif self._too_few_since is None and not self._replica.is_learner:
            warning = self._discards.discarded(reason)
            if warning is not None:
                logger.warning("%s: %s", self.replica_id(), warning)

    def _warn_if_too_few(self, vote: CommitVote) -> None:
        """Say now and then that steps are discarded for want of replica groups, and for how long already."""
        now = time.monotonic()
        if self.num_participants() >= self._replica.settings.min_replica_size:
            self._too_few_since = self._too_few_said_at = None
            return
        self._too_few_since = since = self._too_few_since or now
        if self._too_few_said_at is None or now - self._too_few_said_at >= TOO_FEW_LOG_S:
            self._too_few_said_at = now
            logger.warning(
                "%s discards its steps, for %.1f s now: %s; waiting for more replica groups",
                self.replica_id(),
                now - since,
                vote.reason,
            )

    # ------------------------------------------------------------------------------------------------ what it is now

    def current_step(self) -> int:
        """Return the number of committed steps that this replica's state holds."""
        return self._replica.version.step

    def quorum_step(self) -> int:
        """Return the committed steps in the state that the open quorum trains from, whether this replica holds it or not.

        Waits for the quorum.
        """
        if self._quorum_future is not None:
            self.wait_quorum()
        formed = self._replica.quorum
        return formed.version.step if formed is not None else self.current_step()

    def batches_committed(self) -> int:
        """Return the batches that went into committed steps, over all replica groups: 5 groups in 2 steps are 10."""
        return self._batches_committed

    def participating_rank(self) -> int | None:
        """Return this group's rank among those that contribute, None where it does not. Waits for the quorum."""
        if self._quorum_future is None:
            return None
        self.wait_quorum()
        return self._replica.participating_rank

    def num_participants(self) -> int:
        """Return how many replica groups contribute to this step. Waits for the quorum."""
        if self._quorum_future is None:
            return 0
        self.wait_quorum()
        return self._replica.num_participants

    def is_participating(self) -> bool:
        """Return whether this replica contributes to this step."""
        return self._replica.participating_rank is not None

    def is_counted(self) -> bool:
        """Return whether the open quorum counts this group among those that contribute; the same for all ranks of a group.

        A rank that could not load what it has to hold does not participate then (`is_participating`).
        """
        formed = self._replica.quorum
        return formed is not None and formed.contributor_rank is not None

    @property
    def has_live_state(self) -> bool:
        """Whether state is registered that the steps of optimizers change."""
        return not self._registry.is_kept_still

    @property
    def group_rank(self) -> int:
        """This rank's number in its replica group."""
        return self._launch.group_rank

    @property
    def group_world_size(self) -> int:
        """How many ranks its replica group has."""
        return self._launch.group_world_size

    @property
    def state_dict_lock(self) -> StateDictLock:
        """The lock under which the state is changed.

        The steps of guarded optimizers take it by themselves. Whoever else changes the state, as an evaluation with averaged
        weights does, holds `state_dict_lock.write()` around each change, or calls `disallow_state_dict_read` before and
        `allow_state_dict_read` after it: what is being served or saved is copied aside first. Without it, a change by torch's
        operations in place is found, and the save or the transfer fails by the tensor's name. Not found, and then in what is
        saved and sent, is one through `x.data`, as many implementations of averaged weights make it, through numpy or another
        view of the bytes, to an inference tensor, or to DTensors by `torch._foreach_*`.
        """
        return self._state_dict_lock

    @property
    def transport(self) -> CheckpointTransport[Any]:
        """What moves the state."""
        return self._transport

    def replica_id(self) -> str:
        """Return the name of this incarnation of the replica group."""
        return self._talk.replica_id

    def statistics(self) -> ManagerStatistics:
        """Return what happened so far."""
        formed = self._replica.quorum
        return ManagerStatistics(
            step=self.current_step(),
            quorum_id=formed.quorum_id if formed else 0,
            num_committed=self._counts[Outcome.COMMIT],
            num_discarded=self._counts[Outcome.DISCARD],
            num_left_behind=self._counts[Outcome.LEFT_BEHIND],
            num_healed=self._num_healed,
            last_heal_s=self._healing.took_s,
            num_corrected=self._num_corrected,
        )

    def __repr__(self) -> str:
        return f"Manager(replica_id={self.replica_id()!r}, rank={self._launch.group_rank}, step={self.current_step()})"

    def finish(self) -> bool:
        """Say that the job is over for this replica group: it has made its last step. Call it before `shutdown`.

        All ranks of the group call it, on the training thread. The job is finished at step N when a group that holds the newest
        step N has said so and no living group that holds N goes on; a group that comes later with less gets a
        `JobFinishedError`. To begin another step afterwards takes it back. A lighthouse that is restarted has forgotten it.

        Returns:
            whether the job is finished now. False, with a warning, where the lighthouse did not answer within `connect_timeout`,
            or not all ranks of the group called.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        self._leave_step()
        limit_s = self._timeouts.connect.total_seconds()
        located = self._talk.locate(self._link.send, time.monotonic() + limit_s, has_finished=True)
        if located is None:
            logger.warning(
                "%s has finished, and the lighthouse did not answer within %g s (%s): a group that comes late waits",
                self.replica_id(),
                limit_s,
                self._link.waiting_for(),
            )
            return False
        step = self.current_step()
        ends = "the job is finished" if located.is_finished else "other groups train on, or have not said so yet"
        logger.info("%s of job %s has finished at step %d: %s", self.replica_id(), self._launch.job, step, ends)
        return located.is_finished

    def shutdown(self, wait: bool = True, *, finished: bool = False) -> None:
        """Leave the quorum at once; end threads, transport and process group. May be called twice.

        In a forked child (a data loader's worker, say) it does nothing: all of this is the parent's.

        Args:
            wait: return when threads and sockets are gone.
            finished: call `finish` before.
        """
        if self._is_shut_down or os.getpid() != self._owner:
            return
        if finished:
            try:
                self.finish()
            except CoordinationError as error:  # it is to be shut down in any case
                logger.warning("%s could not say that it has finished: %s", self.replica_id(), error)
        self._talk.end(GroupBrokenError(f"{self.replica_id()} was shut down", self.replica_id()))
        self._link.shutdown("it was shut down")
        self._pg.abort()
        self._stop_threads(wait)
        self._transport.shutdown(wait=wait)
        self._pg.shutdown()
        self._is_shut_down = True  # not before: an interrupt in the middle leaves the rest to the process's end

    def _stop_threads(self, wait: bool) -> None:
        self._worker.shutdown(timeout_s=5.0 if wait else 0.0)
        self._healing.shutdown()
        self._check.shutdown(timeout_s=5.0 if wait else 0.0)
