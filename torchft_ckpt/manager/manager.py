"""The training loop's one partner: it finds who trains together, reduces the gradients, and says whether a step counts.

This file is the public surface. `parts` builds what is behind it; `hooks` is what the wrappers of this package call.

Three threads meet in these. The *training thread* calls the public methods. The *quorum thread* waits for the quorum, begins to
serve or to fetch, and connects the process group, which may go on beside the forward pass. The *coordination thread* brings
messages to the `StepClient`. What the replica may do is decided by `core.coordination.replica` alone.

What becomes of an error:
- of another group, of the network, of a collective: the step is discarded, `should_commit` returns False, training goes on;
- of this group that no further step can mend (a rank gone, refused by the lighthouse): raised from the next call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.distributed import ReduceOp, Work
from torch.profiler import record_function

from torchft_ckpt import config
from torchft_ckpt.checkpointing import CheckpointTransport, StateDictLock
from torchft_ckpt.core.coordination.messages import OnReplicasDiffer
from torchft_ckpt.core.coordination.replica import ReplicaSettings, ReplicaView, StepWishes
from torchft_ckpt.errors import CheckpointError, ConfigError, CoordinationError, GroupBrokenError
from torchft_ckpt.events import Event
from torchft_ckpt.manager.collectives import ExceptionWithTraceback, first_of
from torchft_ckpt.manager.followers import G, S
from torchft_ckpt.manager.hooks import Hooks
from torchft_ckpt.manager.leaving import DEADLINE
from torchft_ckpt.manager.outcomes import ManagerStatistics
from torchft_ckpt.manager.parts import Parts
from torchft_ckpt.manager.rank_config import Timeouts, resolve_rank_config
from torchft_ckpt.manager.saving import IN_STEP
from torchft_ckpt.process_group.quantization import Quantization, find_codec
from torchft_ckpt.threads import end_at_exit

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WorldSizeMode(Enum):
    """The divisor of the gradients when there are more replica groups than `min_replica_size`."""

    DYNAMIC = 0
    """All replica groups that are there contribute; the divisor is their number."""
    FIXED_WITH_SPARES = 1
    """`min_replica_size` groups contribute; the others are spares, which train along and contribute zeros."""


class Manager:
    """Fault tolerance for one rank of one replica group; parameters and methods are torchft's.

    Where an argument is not given the environment is read (`torchft_ckpt.config` has the table), then the default taken.

    Args:
        pg: the process group across replica groups; the manager configures it.
        load_state_dict: loads what `state_dict` of another replica returned; None: `register_state_dict_fn` is used. A group
            that has neither trains as long as it need not heal; then it is refused, by name, and the others train on. It may get
            the very tensors that `state_dict` returned here, filled. If it writes to them before it has read them, that is found,
            and the state comes again in fresh memory.
        state_dict: returns the state to recover from: model, optimizer, whatever must be equal on all replicas.
        min_replica_size: the fewest contributing replica groups with which a step counts.
        use_async_quorum: find the quorum beside the forward pass. False: `start_quorum` returns when the quorum is there. A
            group that comes in loads its state in the same place with both: at the end of an iteration that does not count.
        timeout: of collectives and of the commit decision; 60 s.
        quorum_timeout: after so long without a quorum it is counted as one failed attempt; 60 s. While a quorum waits for a
            group that receives the state, that does not count.
        connect_timeout: to the lighthouse, the store and the group's manager service; 60 s.
        rank, world_size: inside this replica group.
        world_size_mode: see `WorldSizeMode`.
        store_addr, store_port: TCPStore at which the ranks of this replica group find each other; rank 0 hosts it where nobody
            does. Each group of several ranks has one of its own; a group of one uses none.
        lighthouse_addr: `HOST:PORT`; needed at rank 0.
        replica_id: name of this replica group, the same on all of its ranks and on no other group's; a restarted group should
            have the same, as it takes the place of the one before.
        port: of the manager service that rank 0 runs for the other ranks; 0 for any.
        hostname: address that peers reach this process at; default: `TORCHFT_CKPT_HOSTNAME`, else that of the interface named
            by `NCCL_SOCKET_IFNAME` (beside NCCL) or `GLOO_SOCKET_IFNAME`, else the one that routes to the lighthouse. What was
            chosen is used for all: default transport, Gloo, store and manager service.
        heartbeat_interval: 100 ms.
        checkpoint_transport: moves the state; default `HTTPTransport`. One that needs the process group, as torchft's
            `PGTransport` does, is refused.
        init_sync: make all replicas equal to one of them before the first step.
        max_retries: raise after more than so many discarded steps in a row; None: never.
        quorum_retries: attempts at a quorum after the first before `QuorumTimeoutError`; None: wait for ever, saying what
            for. (torchft gives up after the first; a job that waits for a node to come back should not end.)
        join_stall_limit: how long those who train may stand still, before they begin a step, for all that come in; 60 s. What was
            used comes back as a twentieth of the time that passes. Who needs more than is left waits outside, and is told until
            when. 0: only a group that the others cannot train without comes in, which no limit binds. If groups differ the least
            holds. A group that needs longer than a step to receive the state receives it outside of the quorum first, if a part
            of it stays as it is (frozen weights): then the others stand still only while it receives what has changed since.
            None: there is no limit, and they stand still for all of the state of this group.
        spare: this group does not train. It receives the state outside of the quorum, and again now and then (each spare takes
            a twentieth of its sources' time): it is in no collective, and nobody waits for it. When one of the groups that train
            is lost, this one takes its place, and its loop goes on. It stays when that one comes back.
        transfer_timeout: overall deadline of fetching the state; 10 min. It binds who receives it, not the others.
        token: shared secret of the job.
        job: its name at the lighthouse, which serves many jobs; the same in all replica groups; `default`. What starts all
            groups at once sets `TORCHFT_CKPT_JOB` to another name for each start.
        check_equal_every: compare all of the state after each so many committed steps; 0: never. All groups give the same. What
            groups hold is also compared when one has come in, or has loaded, and 4, 8, 16, ... steps after that, after a
            discarded step, in a job's first step, and in samples with each vote. Compared are parameters, the state and
            settings of optimizers that are wrapped or guarded, and all else that was equal when it was first compared after a
            step. Not compared are what differed then (BatchNorm's running statistics), arrays, states of Python's and numpy's
            generators, and what outer loops let differ.
        on_replicas_differ: what becomes of groups that were equal, and differ. "heal": those that are not of a strict majority,
            or without one not as the longest in the job, load the others' state before the next step. "warn" names them, and the
            first tensors or values, in the logs of the lighthouse and of the groups. "stop" discards the step and raises
            `ReplicasDifferError` in the groups that were compared. The group that would load the same for the third time in a row
            gets that, too.
        on_event: gets what happened (`torchft_ckpt.events`), in order, on the training thread: when the next step begins, before
            this group asks for it, in `finish`, and at last in `shutdown`. It may ask this Manager, or save. The other groups
            wait meanwhile, up to the lighthouse's join timeout (60 s) if they are more than half of the living groups. An
            `Exception` that it raises is logged once, and ends no step.

    Raises:
        ConfigError: an argument or variable cannot be used.
        LighthouseUnreachableError, AuthenticationError, ProtocolVersionError, RefusedError, AddressInUseError,
        GroupBrokenError: as their names say; nothing is left running.
    """

    @config.warns_of_removed
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
        join_stall_limit: timedelta | None = timedelta(seconds=60),
        spare: bool = False,
        transfer_timeout: timedelta | None = None,
        token: str | None = None,
        job: str | None = None,
        check_equal_every: int = 100,
        on_replicas_differ: Literal["warn", "heal", "stop"] = "heal",
        on_event: Callable[[Event], None] | None = None,
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
        stall_limit = config.not_negative(join_stall_limit, "join_stall_limit")
        retries = config.resolve(quorum_retries, config.QUORUM_RETRIES, -1, config.parse_count)
        self._replay = config.replay()
        if self._replay is not None:
            # Whatever the script says: one group, at the lighthouse that the command has started.
            min_replica_size, world_size_mode, spare, port = 1, WorldSizeMode.DYNAMIC, False, None
            lighthouse_addr = replica_id = job = token = hostname = None
        self._pg = pg
        self._owner = os.getpid()
        self._is_shut_down = False
        self._rank_config = rank_config = resolve_rank_config(
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
        if rank_config.host.is_chosen:
            pg.use_hostname(rank_config.host.address)
        self._parts = parts = Parts(
            pg,
            checkpoint_transport,
            rank_config,
            self._timeouts,
            ReplicaSettings(
                min_replica_size=min_replica_size,
                init_sync=init_sync,
                waits_for_quorum=not use_async_quorum,
                fixed_with_spares=world_size_mode is WorldSizeMode.FIXED_WITH_SPARES,
                join_stall_limit_s=None if stall_limit is None else stall_limit.total_seconds(),
                spare=spare,
                check_equal_every=check_equal_every,
                on_replicas_differ=OnReplicasDiffer(on_replicas_differ),
                connects_beside=getattr(pg, "connects_beside", False) is True,
                store_address=rank_config.store_address,
            ),
            use_async_quorum=use_async_quorum,
            max_retries=max_retries,
            quorum_retries=None if retries < 0 else retries,
            on_event=on_event,
            heartbeat_interval=heartbeat_interval,
        )
        self._client, self._registry, self._own = parts.client, parts.registry, parts.own
        self._steps, self._way_out, self._followers = parts.steps, parts.way_out, parts.followers
        if load_state_dict is not None and state_dict is not None:
            self._registry.register("default", load_state_dict, state_dict)
        self._client.owner = self
        self._hooks = Hooks(parts, self.start_quorum, self.load_state_dict)
        end_at_exit(self.shutdown)

    @property
    def hooks(self) -> Hooks:
        """For the wrappers of this package. A property, as a stand-in that `create_autospec(Manager)` makes has these only."""
        return self._hooks

    # ------------------------------------------------------------------------------------------- what is to be moved

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
        *,
        explicitly_locked: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        local_between_syncs: bool = False,
        after_restore: Callable[[], None] | None = None,
    ) -> None:
        """Add a pair of functions to the state that replicas heal from.

        All replicas must register the same keys, before their first step. Both are called on the training thread, or while it
        waits for a quorum; `state_dict` of a state that is explicitly locked on any thread between two of its changes. They
        must not
        communicate with other ranks: one rank may be asked for its state in a step in which another is not.

        Args:
            key: names the pair.
            load_state_dict: loads what `state_dict` of another replica returned.
            state_dict: returns the state.
            explicitly_locked: the state changes only between `disallow_state_dict_read` and `allow_state_dict_read`, by its
                owner, and not in the steps of optimizers. Where that holds for all that is registered, `guard_optimizer` costs
                nothing, and the state can be offered between two steps (`offer_state`).
            optimizers: whose state is in it, where they are neither wrapped nor guarded: where parameters are sharded, a
                replica that has none of it yet makes it before it receives.
            local_between_syncs: between two changes of this state every replica group trains by itself, as in an outer loop:
                what else is registered is each group's own, unless it is explicitly locked too, or moves with these alone. It is
                loaded after all others.
            after_restore: called on the training thread at the end of `Checkpointer.restore`, where that has loaded a
                checkpoint or found that other groups hold a newer state.

        Raises:
            ConfigError: the key is taken.
        """
        self._registry.register(
            key,
            load_state_dict,
            state_dict,
            explicitly_locked=explicitly_locked,
            optimizers=optimizers,
            local_between_syncs=local_between_syncs,
            after_restore=after_restore,
        )
        self._followers.find_outer()

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Deprecated by torchft: `register_state_dict_fn` with a key of its own."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def scheduler(self, scheduler: S, name: str = "scheduler") -> S:
        """Register a learning-rate scheduler, whose `step()` then does nothing where the step was discarded.

            scheduler = manager.scheduler(CosineAnnealingLR(optimizer, 1000))
            ...
            optimizer.step()
            scheduler.step()

        It moves once for each step of its optimizer that counts, a `ReduceLROnPlateau` too: `scheduler.step(metric)`. Call `step`
        after `optimizer.step()`, before the next `zero_grad` or save. These refuse a scheduler that has not followed: a group
        that comes in there would get the weights of one step with the learning rate of another. Such a group gets its state.

        The scheduler of an outer optimizer (DiLoCo) moves once for each step of that one that counts, within the round, and its
        own `step()` does nothing: a loop may call it after each inner step, or leave it out.

        What moves otherwise, once an epoch say, is not for this method: register it by `register_state_dict_fn`, and step it
        where `optimizer.step()` has returned True.

        Args:
            scheduler: of torch, or a class derived from its `LRScheduler`; of the optimizer or of the `Optimizer` that wraps it.
                Of several that are parts of one, give that one. With accelerate, leave it out of `accelerator.prepare`.
            name: under which its state is registered, as by `register_state_dict_fn`; each of several has its own.

        Returns:
            the same object. A copy of it follows nothing.

        Raises:
            ConfigError: the name is taken, it is given a second time, or it is no scheduler of torch. Later `start_quorum`,
                `hand_over` and `Checkpointer.save` raise it, where its `step()` is missing; and its `step()` does, where a plain
                loop would move it and here that would be wrong: before the first step, twice after one, or where its optimizer
                has not stepped.
        """
        return self._followers.scheduler(scheduler, name)

    def grad_scaler(self, scaler: G, name: str = "grad_scaler") -> G:
        """Register a `torch.amp.GradScaler`, whose scale then changes only in steps that count, as in all groups.

            scaler = manager.grad_scaler(torch.amp.GradScaler())
            ...
            scaler.step(optimizer)
            scaler.update()

        `scaler.step(optimizer)` returns what `Optimizer.step` returns. Where the averaged gradients have overflowed it returns
        False: the step counts, `current_step` goes on, and the weights stay. Where the step is discarded `scaler.update()` keeps
        the scale: the gradients were perhaps not averaged, and one group would have found an overflow that others have not. Call
        `update` before the next `zero_grad` or save, as `scheduler` says of `step`.

        A scaler that is not enabled stays as it is.

        Args:
            scaler: give its `unscale_` and its `step` the `Optimizer`; they refuse the optimizer in it.
            name: under which its state is registered, as by `register_state_dict_fn`.

        Returns:
            the same object. A copy of it follows nothing.

        Raises:
            ConfigError: as `scheduler`.
        """
        return self._followers.grad_scaler(scaler, name)

    @torch.compiler.disable
    def disallow_state_dict_read(self) -> None:
        """The state is about to change: take the write lock, once what is being served has been copied aside.

        For optimizers that `Optimizer` does not wrap, see `guard_optimizer`. May be called again by the thread that
        holds the lock.
        """
        self._parts.guard.begins_change()

    @torch.compiler.disable
    def allow_state_dict_read(self) -> None:
        """The state is whole again: give the write lock back. Without effect where it is not held."""
        self._parts.lock.release_write()

    def report_torn_state(self) -> None:
        """Say that the state is not the one that the step counter names, because a committed step could not be taken.

        This replica then contributes nothing and commits nothing until it has healed. `taking_step` calls it.
        """
        self._client.load_torn()

    @contextmanager
    def taking_step(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Around what takes a step that counts, of optimizers that are wrapped or guarded: `with manager.taking_step(): ...`.

        `Optimizer.step` and the integrations take theirs in it, `should_commit` included. Where it raises after the step was
        committed the state is torn (`report_torn_state`). The write lock, which the first optimizer took, is given back in any
        case. When it ends the step is taken, whichever optimizers have stepped; `optimizer`: as far as that one goes.
        """
        try:
            yield
        except BaseException:
            self._steps.broke_off()
            raise
        else:
            if optimizer is None:
                self._steps.took_all()
        finally:
            self.allow_state_dict_read()

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make each step of an optimizer take and give back the write lock, also where it raises.

        `Optimizer` does so for the one that it wraps. A script that steps a guarded one itself does so in `taking_step`.

        A step within a `state_dict` function is warned of: torch's `get_optimizer_state_dict` makes state by one where there is
        none, as before the first step. Optimizers that count their steps count it, which a plain loop does not.
        """
        self._parts.guard.guard(optimizer)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore what `state_dict` returned, together with the checkpoint that it was saved with.

        It says that this replica's state was restored on purpose: a job whose newest state is lost goes on from it.

        Raises:
            ConfigError: it is no manager's state; or that of a `StepLoader` of other samples than the one here.
        """
        step = self._own.take_saved(state_dict)
        self._registry.microbatches.check_restored(state_dict)
        self._followers.forget()
        self._client.restored(step)

    def state_dict(self) -> dict[str, int]:
        """Return what has to be saved with a checkpoint: the step and the batches committed.

        Until an optimizer begins to take a step that counts they are those of the step before, as the state is.

        Raises:
            CheckpointError: optimizers are taking a step, so the state is that of no step.
        """
        now = self._client.view()
        is_before = now.held != now.version
        if is_before and not now.held.proven:
            raise CheckpointError(f"the state is not to be saved: {IN_STEP}", self.replica_id())
        geometry = self._registry.microbatches.geometry()
        of_replay = geometry and geometry | self._own.known.saved()
        return self._own.saved(now.held.step, is_before=is_before) | of_replay

    # --------------------------------------------------------------------------------------------------------- quorum

    @torch.compiler.disable
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
        `use_async_quorum` later ones are found beside the forward pass, and the process group connects beside it. A group that
        lacks the newest state computes the iteration for itself alone, and gets the state in `should_commit`.

        A step that is open already goes on where nothing has happened in it, and the others notice nothing: a loop may begin a
        step at the end of an iteration and again at the beginning of the next one, or skip a batch. Otherwise the open step is
        abandoned, and the others discard it: where a collective was issued or an error reported in it, the user changed or
        restored the state meanwhile, froze or unfroze parameters, or the arguments are others (`timeout` excepted). One that
        was begun with `contributes=False` or `wait` is always abandoned.

        Args:
            allow_heal: False: load no state; a replica that lacks the newest one adds nothing, and commits nothing. All must pass
                the same.
            shrink_only: let nobody come in.
            timeout: instead of `quorum_timeout`.
            contributes: False: this replica did not train for this step. It adds nothing, is not counted, and takes the
                outcome; unless nobody contributes.
            patience: how long the way to this step took, where that is long. Members that live and have not asked are waited
                for as long again, and so are collectives and the decision.
            wait: for the quorum: True, False (and load nothing before the forward pass), or None: as `use_async_quorum` says.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
            GroupLeftError: it was asked to leave (see `leave_on`), and has left.
            QuorumTimeoutError: with `quorum_retries` set, no quorum in that many attempts.
            CheckpointError: see `should_commit`.
            ConfigError: a scheduler has not followed the last step (`scheduler`); no step was begun.
        """
        if self._replay is not None and not self._hooks.computes_by_microbatches:
            raise ConfigError(
                "only a loop of StepLoader is replayed: any other's steps depend on who was there", "StepLoader"
            )
        patience = patience or timedelta(0)
        wishes = StepWishes(
            allow_heal=allow_heal,
            shrink_only=shrink_only,
            contributes=contributes,
            patience_s=patience.total_seconds(),
            waits=wait,
        )
        limit = max(config.not_negative(timeout) or self._timeouts.quorum, patience)
        self._steps.start(wishes, limit)

    @torch.compiler.disable
    def ensure_step(self, *, is_training: bool = True) -> None:
        """Begin a step as the last one was begun, if none is open; on the training thread.

        `DistributedDataParallel` calls it before a forward pass with gradients. A loop may so call `zero_grad` after its forward
        pass, and its loss: what a group loads before it computes anything is there by then, what the loss averages belongs to
        the step, and `zero_grad` finds it open. It does nothing before there are an optimizer and a registered state; nor in a
        loop that clears its gradients first, if nothing is to be loaded and the last step counts. After one that was discarded
        a loop may leave `zero_grad` out: its gradients are cleared here.

        Args:
            is_training: False: the module is in eval mode. It may be trained all the same (frozen BatchNorm, LoRA), or evaluated
                without `no_grad`: a step begins only if gradients were cleared for it.

        Raises: as `start_quorum`.
        """
        if self.hooks.computes_by_microbatches or not (is_training or self._steps.is_deferred):
            return
        self.hooks.begin_deferred()
        wishes = self._steps.wishes_before_forward()
        if wishes is not None:
            self._steps.begins_by_forward()
            self.start_quorum(wishes.allow_heal, wishes.shrink_only, contributes=wishes.contributes)
        self._steps.note_forward()

    @torch.compiler.disable
    def wait_quorum(self) -> None:
        """Wait until the quorum is there and the process group is connected.

        Raises: as `start_quorum`.
        """
        self.hooks.begin_deferred(asks=True)
        self._steps.wait_quorum()

    # ---------------------------------------------------------------------------------------------------- collectives

    @torch.compiler.disable
    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | Quantization = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        """Reduce a tensor in place over the replica groups; by default average it over those that contribute.

        Waits for the quorum, not for the others. Never raises for what goes wrong on the way: the step is discarded then,
        and the tensor must not be used. A replica of the quorum that does not contribute (a spare of `FIXED_WITH_SPARES`) changes
        nothing: it adds zeros to a sum or an average, and the lowest or highest value to a maximum or minimum. In an iteration
        that a group computes alone the tensor stays as it is.

        Between `should_commit` and the next `start_quorum`, a metric say, it belongs to the step just decided: to its quorum
        and its divisor, also where it was discarded. What goes wrong then discards no step; `wait` returns False. All groups
        issue it: one that waits for others that have gone on is told within about half a second.

        Args:
            tensor: any shape; a floating point dtype for an average.
            should_quantize: send a byte an element: "int8" (which True means too) or "fp8", with a scale for each 512. All
                ranks get the same bits; how far they may be off is in `process_group/quantization.py`. A value that is not
                finite turns its block into NaNs. Exact where the process group has one member. The same on all ranks.
            reduce_op: `ReduceOp.AVG`, or any that the process group knows; AVG or SUM where it is quantised.

        Returns:
            work; its future completes with the tensor and never fails. Its `wait` is False where the tensor must not be used.

        Raises:
            ValueError: an average of integers; no such quantisation, or not of this reduction or dtype.
            Also as `wait_quorum`.
        """
        self.hooks.begin_deferred(has_computed=True)
        codec = find_codec(should_quantize)
        if (reduce_op == ReduceOp.AVG or codec is not None) and not torch.is_floating_point(tensor):
            what = "an average" if codec is None else "quantisation"
            raise ValueError(f"{what} needs a floating point tensor, got {tensor.dtype}")
        if codec is not None and reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ValueError(f"{codec.name} is for AVG and SUM, not for {reduce_op}")
        with record_function("torchft::manager::allreduce"):
            return self._steps.allreduce(tensor, codec, reduce_op)

    def report_error(self, e: Exception) -> None:
        """Say that this step went wrong and must not count. Any thread."""
        if not self._steps.keeps_error(e):
            self.hooks.begin_deferred()
            self._client.note_error(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step; after a lost connection, the one that says whose, once that is known."""
        return self._client.error()

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails: an error, or a wait beyond `timeout`, is this step's error and gives `default`."""
        return first_of(
            fut,
            default=default,
            timeout=timeout or self._timeouts.collective,
            schedule=self._client.schedule,
            on_error=self.report_error,
        )

    # --------------------------------------------------------------------------------------------------------- commit

    @torch.compiler.disable
    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End a step: return whether it counts, and the optimizer has to be stepped. `Optimizer.step` calls it.

        Call it once a step on the training thread of every rank, after the backward pass. All replica groups of the quorum get
        the same answer. It waits for the open collectives and for the decision. For a group that lacks the newest state the
        answer is False, and it returns when that state is loaded, for which the others wait before their next step, or when
        nobody is there who holds it. Called again before the next `start_quorum`, for a second optimizer say, it returns the
        same answer and counts nothing.

        Args:
            timeout: how long to wait for the decision, instead of `timeout` of the constructor.

        Raises:
            GroupBrokenError, RefusedError, GroupLeftError, ReplicasDifferError: this group cannot go on.
            MaxRetriesExceededError: with `max_retries` set.
            QuorumTimeoutError: with `quorum_retries` set, nobody has given the newest state in that many attempts.
            StateDictLoadError: a `load_state_dict` function raised, or for the second time in a row `state_dict` did not return
                what it was given; this replica's state is undefined until it heals.
            StateMismatchError: the source's state is not one that this replica can load.
            ConfigError: it is called again, and something was averaged since the decision. That may be gradients, which the
                decision is not about; this replica's state is undefined then until it heals.
        """
        self.hooks.begin_deferred()
        with record_function("torchft::manager::should_commit"):
            return self._steps.commit(config.not_negative(timeout) or self._timeouts.collective)

    # --------------------------------------------------------------------------------------------- outside of quorums

    @property
    def is_behind(self) -> bool:
        """Whether this replica's state is not whole, has no name yet, or is older than one that is known to exist."""
        return self._client.view().is_behind

    def catch_up(self, timeout: timedelta | None = None) -> bool:
        """Get the newest state from the others between two steps, without a quorum; call it on the training thread.

        They have to offer it (`offer_state`). All ranks of this group get the same state. A step that is open is abandoned.
        Tried again, with a line in the log, where sources are lost or have gone on meanwhile.

        Args:
            timeout: instead of `transfer_timeout`.

        Returns:
            whether this replica holds the newest state now. If not, nobody is known to hold one that could be had: ask for a
            quorum.

        Raises:
            TransferTimeoutError: it could not be had in time.
            Also as `should_commit`.
        """
        return self._parts.between_steps.catch_up(config.not_negative(timeout) or self._timeouts.transfer)

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
            ConfigError: a scheduler has not followed the last step.
        """
        self._followers.check("the state is to be handed over")
        return self._parts.between_steps.hand_over(config.not_negative(timeout) or self._timeouts.transfer)

    def take_over(self, timeout: timedelta | None = None) -> bool:
        """Get the state that another group hands over (`hand_over`), on whatever layout this one has, before the first step.

        As `catch_up` otherwise. A quorum without that group is formed when it has left. False: nobody has handed a state over
        in time, or not until it was here.
        """
        return self._parts.between_steps.catch_up(config.not_negative(timeout) or self._timeouts.transfer, moving=True)

    def newest_step_of_peers(self, timeout: timedelta | None = None) -> int | None:
        """Ask for the newest step that another living replica group is known to hold; None: none does, or nobody answered.

        All ranks of this group call it, on the training thread, between two steps; a step that is open is abandoned. A state
        that has never been in a quorum has no name, and is known to nobody.

        Args:
            timeout: instead of `connect_timeout`.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        return self._parts.between_steps.newest_step_of_peers(config.not_negative(timeout) or self._timeouts.connect)

    def offer_state(self) -> None:
        """Serve the state of now to whoever catches up, until it changes; call it on the training thread after each change.

        It does so where all that is registered is explicitly locked, and has a name. Nothing is copied or computed until
        somebody asks.
        """
        self._parts.between_steps.offer_state()

    # ------------------------------------------------------------------------------------------------ what it is now

    @torch.compiler.disable
    def current_step(self) -> int:
        """Return the number of committed steps that this replica's state holds."""
        return self._client.view().version.step

    def quorum_step(self) -> int:
        """Return the committed steps in the state that the open quorum trains from, whether this replica holds it or not.

        Waits for the quorum.
        """
        if self._steps.has_quorum:
            self.wait_quorum()
        now = self._client.view()
        return (now.quorum or now).version.step

    def last_step_counted(self) -> bool:
        """Return what `should_commit` returned last, and so `Optimizer.step`; False before the first step is decided.

        For loops that do not see it, because a trainer drops what `step` returns. It waits for nothing, and stays as it is until
        the next decision. A step that overflowed counts, if all groups found that (`grad_scaler`). Where `should_commit` has
        raised it is as before. In an outer loop a step is a round, and `loop.round_counted()` says when it is applied.
        """
        return self._steps.has_counted

    def batches_committed(self) -> int:
        """Return the batches that went into committed steps, over all replica groups: 5 groups in 2 steps are 10."""
        return self._own.batches_committed

    def is_warming_up(self) -> bool:
        """Return whether this group computes an iteration for itself alone, as it lacks the newest state: nothing of it counts.

        A loop may leave out checks of the loss, logs and evaluation then. Waits for nothing, so ask after `start_quorum` has
        returned.
        """
        return self._client.view().warms_up

    def participating_rank(self) -> int | None:
        """Return this group's rank among those that contribute, None where it does not. Waits for the quorum."""
        self.hooks.begin_deferred(asks=True)
        if not self._steps.has_quorum:
            return None
        self.wait_quorum()
        return self._client.view().participating_rank

    @property
    def speaks(self) -> bool:
        """Whether this group speaks for the job: what all groups would write to one place, checkpoints say, it writes.

        That is the first of the groups that contributed to the last step that counts (`participating_rank` 0), as soon as the one
        that spoke before is known not to write any more: it has voted in a step since, or is gone. So it is True at one group at
        most, from the end of a step to its vote in one in which another group is the first. An exception is a group that is cut
        off from the lighthouse, or whose process stands still, for longer than the lighthouse waits for a sign of life: it is
        taken for dead and may write all the same. Any thread; the same on all ranks of a group between two steps.
        """
        return self._client.view().speaks

    def num_participants(self) -> int:
        """Return how many replica groups contribute to this step. Waits for the quorum."""
        self.hooks.begin_deferred(asks=True)
        if not self._steps.has_quorum:
            return 0
        self.wait_quorum()
        return self._client.view().num_participants

    def is_participating(self) -> bool:
        """Return whether this replica contributes to this step."""
        self.hooks.begin_deferred(asks=True)
        return self._client.view().participating_rank is not None

    @property
    def group_rank(self) -> int:
        """This rank's number in its replica group."""
        return self._rank_config.group_rank

    @property
    def group_world_size(self) -> int:
        """The number of ranks in this rank's replica group."""
        return self._rank_config.group_world_size

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
        return self._parts.lock

    def view(self) -> ReplicaView:
        """Return which state this replica holds and what it is in the job, all of it at one moment. Waits for nothing."""
        return self._client.view()

    def replica_id(self) -> str:
        """Return the name of this incarnation of the replica group."""
        return self._client.replica_id

    def statistics(self) -> ManagerStatistics:
        """Return what happened so far."""
        return self._parts.statistics()

    def __repr__(self) -> str:
        return f"Manager(replica_id={self.replica_id()!r}, rank={self._rank_config.group_rank}, step={self.current_step()})"

    def finish(self) -> bool:
        """Say that the job is over for this replica group: it has made its last step. Call it before `shutdown`.

        All ranks of the group call it, on the training thread. The job is finished at step N when a group that holds the newest
        step N has said so, and no two living groups that hold N go on. A group that begins a step afterwards gets a
        `JobFinishedError`: it came late, or it would train on from N alone. Where a group has finished itself, to begin another
        step takes that back. A lighthouse that is restarted has forgotten it.

        Returns:
            whether the job is finished now. False, with a warning, where the lighthouse did not answer within
            `connect_timeout`, or not all ranks of the group called.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        is_finished = self._parts.between_steps.finish(self._timeouts.connect)
        self._parts.events.deliver()
        return is_finished

    # -------------------------------------------------------------------------------------------------------- leaving

    def leave_on(self, signal: int, save: Callable[[], object] | None = None, deadline: timedelta = DEADLINE) -> None:
        """Leave the job when a signal comes, so that the other replica groups lose nothing. Call it on the main thread.

        A signal at one rank is enough. The group makes its step to the end, with the others, and all of its ranks leave after it:
        `should_leave` is True from then on. Where the others do not come to a step the group leaves without it. In an outer loop
        a step is a round; where none is being exchanged the group leaves between two inner steps, within a few seconds.

        `python -m torchft_ckpt drain GROUP` asks for the same from outside, also where `leave_on` was not called.

        Where it is called for several signals, `save` and `deadline` are those of the first signal that comes to this rank. Where
        another rank or `drain` asked the group, they are those of the last call.

        Args:
            signal: as `signal.SIGTERM`. Further signals change nothing. A handler that was there is called too; that of Ctrl-C
                from the second signal on.
            save: called on the training thread when the group leaves, in the first `should_leave` that is True, or in
                `start_quorum`; not where this group does not hold the newest state. If it returns a `Future`, that is waited for.
                A `Checkpointer.save` in it writes a whole checkpoint by this group alone; by all groups where all of them leave
                after this step. What it raises is logged.
            deadline: so long after the signal the group goes as it is, whatever hangs: calls of this Manager then raise
                `GroupLeftError`, and it is raised on the main thread, wherever that is in Python; not once more where a call has
                raised it there.

        Raises:
            ConfigError: not on the main thread; the signal cannot be handled; the deadline is not positive.
        """
        self._way_out.leave_on(signal, save, deadline)

    def should_leave(self) -> bool:
        """Return whether this replica group has left, as it was asked to: end the training loop, then call `shutdown`.

        Call it between two steps, on the training thread of every rank. The first call that returns True saves, says that the
        group leaves, and waits until all of its ranks have done so. All ranks see it after the same step. Without this call
        the next `start_quorum` does the same, and raises.
        """
        return self._way_out.should_leave()

    @property
    def is_leaving(self) -> bool:
        """Whether this group has made its last step, because it was asked to leave."""
        return self._client.view().is_leaving

    def shutdown(self, wait: bool = True, *, finished: bool = False) -> None:
        """Leave the quorum at once; end threads, transport and process group. May be called twice.

        In a forked child (a data loader's worker, say) it does nothing: all of this is the parent's.

        Args:
            wait: return when threads and sockets are gone.
            finished: call `finish` before, unless this group has left.
        """
        if self._is_shut_down or os.getpid() != self._owner:
            return
        if finished and not self._client.has_left:
            try:
                self.finish()
            except CoordinationError as error:  # it is to be shut down in any case
                logger.warning("%s could not say that it has finished: %s", self.replica_id(), error)
        self._way_out.shutdown()
        self._client.end(GroupBrokenError(f"{self.replica_id()} was shut down", self.replica_id()))
        self._client.link.shutdown("it was shut down")
        self._pg.abort()
        self._steps.shutdown(5.0 if wait else 0.0)
        self._parts.transport.shutdown(wait=wait)
        self._pg.shutdown()
        self._is_shut_down = True  # not before: an interrupt in the middle leaves the rest to the process's end
        self._parts.end_events()
