"""Replica groups of scripts that train with accelerate, as diffusers' and the `no_trainer` scripts of transformers do.

Each group runs the script, with `FaultTolerantAccelerator` for its `Accelerator`. One optimizer step is one step of the job:

    the loader gives the first batch of a step   `start_quorum`: what the loop does before it asks for that batch, after
                                                 `zero_grad` too, belongs to the step before
    the last backward pass                       the accumulated gradients are averaged over the groups
    optimizer.step                               asks whether the step counts, and steps if it does. Several optimizers share
                                                 the answer

**An iteration goes by without a step** if its step was discarded, if it is the first one of a group that has come back, or if the
others went on without it. `sync_gradients` is False then, as within an accumulation. So what a loop does only after an optimizer
step (an average of the weights, a checkpoint, a count) it does not do, and the schedule stays.

**The place in the data is state**, as of the end of each step: a group that comes back goes on where the job is, in the same
order and epoch, and its epochs end with those of the others. What a step that did not count has read is read again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from torchft_ckpt.ddp import DistributedDataParallel, GradientAverage, PureDistributedDataParallel
from torchft_ckpt.errors import ConfigError, JobFinishedError
from torchft_ckpt.optimizer import OptimizerWrapper

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)

KEY = "accelerate"
"""Names what the accelerator trains among all that is registered with the Manager."""


class FaultTolerantAccelerator(Accelerator):
    """An `Accelerator` that makes its script one replica group of a job.

    It registers with the manager what `prepare` and `register_for_checkpointing` are given. `save_state` writes the job's step
    and place in the data as well, and `load_state` takes them. All groups have the same arguments, and data sets of one size.
    Several optimizers step one after the other, after all backward passes of a step, and all of them in each step.

    `num_processes` counts the processes of all groups, and schedules step so often for each step, as accelerate has it. The
    first loader that is prepared, and each that shuffles, is divided among all of them. All others are read whole by each group.

    One group speaks for the job. From the first step on `is_main_process` is True in that one alone, and `save_state`, `save`,
    `save_model`, `log` and the trackers write there alone. Checkpoints that accelerate names have the job's step in their name.

    A group that comes when the others have made the last step gets no batch. Its loops end, and it speaks for nobody.

    Args:
        manager: of this rank, without state functions of its own for what the accelerator prepares.
        group: the number of this group; else the environment's `REPLICA_GROUP_ID`.
        num_groups: among so many groups the data are divided; else the environment's `NUM_REPLICA_GROUPS`.
        kwargs: of `Accelerator`.

    Raises:
        ConfigError: something would leave the groups apart; the message says why. Also from `prepare` and `backward`.
        What `Manager.start_quorum` raises, from the iteration over a loader; what `Manager.should_commit` does, from
        `optimizer.step`.
    """

    def __init__(
        self, manager: Manager, *, group: int | None = None, num_groups: int | None = None, **kwargs: Any
    ) -> None:
        self._manager = manager
        self._group = _number("group", "REPLICA_GROUP_ID", group)
        self._num_groups = _number("num_groups", "NUM_REPLICA_GROUPS", num_groups)
        self._is_whole = False
        """A loader is prepared that each group reads whole."""
        self._loaders: list[JobLoader] = []
        self._average = GradientAverage(manager, self._parameters)
        self._trackers_wanted: Callable[[], None] = lambda: None
        self.is_in_step = False
        """Whether a step is open: the batches that come next are for it as well."""
        self._to_step: set[int] = set()
        """The prepared optimizers that have yet to take the step that was begun last, by id."""
        self.num_begun = 0
        """So many steps have begun in this process, or were begun too late."""
        self._is_warm = False
        """An iteration was computed in this process."""
        self._found_step: int | None = None
        """The step of the others, before that."""
        self._finished_at: int | None = None
        self._has_skipped = self._has_warned = False
        super().__init__(**kwargs)
        self._refuse()
        self.dataloader_config.dispatch_batches = False  # its default would read all of an iterable in each group
        manager.register_state_dict_fn(KEY, self._load_prepared, self._prepared)
        super().register_for_checkpointing(manager)

    def _refuse(self) -> None:
        kind, ranks, processes = self.distributed_type, self._manager.group_world_size, self.state.num_processes
        kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        found = {
            "group": self._group < self._num_groups or f"it is {self._group} of {self._num_groups}, counted from 0",
            kind.value: kind in kinds or "its groups are of plain processes",
            "num_processes": ranks == processes
            or f"the group has {ranks} ranks, and accelerate works with {processes} processes: all would train on the same"
            " data. On CPUs cpu=True makes accelerate use torchrun's processes",
            "even_batches": self.even_batches or "without it groups would have epochs of different lengths",
            "dispatch_batches": not self.dispatch_batches or "all groups would read the same batches",
            "use_stateful_dataloader": not self.use_stateful_dataloader or "the place in the data is state of the job",
        }
        for party, why in found.items():
            if isinstance(why, str):
                raise ConfigError(f"FaultTolerantAccelerator cannot train so ({party}): {why}", party=party)

    # ------------------------------------------------------------------------------------------ what a script may ask

    @property
    def job_step(self) -> int:
        """The committed steps of the job: what a script counts in `completed_steps`. Before the first: as the others know it."""
        manager = self._manager
        if self._finished_at is not None:
            return self._finished_at
        if not self.num_begun:
            if self._found_step is None:
                self._found_step = manager.newest_step_of_peers() or 0
            return max(self._found_step, manager.current_step())
        return manager.quorum_step() if manager.is_warming_up() else manager.current_step()

    @property
    def job_epoch(self) -> int:
        """The epoch of the first prepared loader in which the job is: where a script's loop over epochs begins."""
        return self._loaders[0].epoch_at(self.job_step) if self._loaders else 0

    @property
    def state_step(self) -> int:
        """The step of the state that is here."""
        return self._manager.current_step()

    @property
    def is_over(self) -> bool:
        """Whether the others have made the job's last step without this group."""
        return self._finished_at is not None

    @property
    def is_main_process(self) -> bool:
        """True for one process of the job. Before its first step: for one of each group, which makes directories, say."""
        return bool(super().is_main_process) and (self._speaks or not self.num_begun)

    @property
    def is_local_main_process(self) -> bool:
        """As `is_main_process`. Before the first step: in the first group alone, so that there is one progress bar."""
        return bool(super().is_local_main_process) and self._speaks

    @property
    def _speaks(self) -> bool:
        return (self._manager.speaks and not self.is_over) if self.num_begun else self._group == 0

    @property
    def num_processes(self) -> int:
        return int(self.state.num_processes) * (1 if self._is_whole else self._num_groups)

    @property
    def process_index(self) -> int:
        index = int(self.state.process_index)
        return index if self._is_whole else self._group * int(self.state.num_processes) + index

    # ------------------------------------------------------------------------------------------------ what is prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data_loader, JobLoader):
            return data_loader
        self._refuse()  # what a script has set meanwhile
        if isinstance(getattr(data_loader.batch_sampler, "sampler", None), JobSampler):
            raise ConfigError(
                "this loader was prepared before: use what `prepare` has returned", party="train_dataloader"
            )
        is_read_on = isinstance(data_loader.dataset, IterableDataset)
        is_trained_on = not self._dataloaders or (not is_read_on and isinstance(data_loader.sampler, RandomSampler))
        is_known = is_trained_on and not is_read_on and type(data_loader.batch_sampler) is BatchSampler
        if is_known:
            seed = broadcast(torch.tensor([torch.initial_seed() % 2**62], device=self.device))
            sampler = JobSampler(data_loader.batch_sampler.sampler, int(seed.item()))
            data_loader.batch_sampler.sampler = sampler
        self._is_whole = not is_trained_on
        try:
            loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        finally:
            self._is_whole = False
        if not is_trained_on:
            return loader
        if not is_known:
            logger.warning(
                "%s: if this group comes back it begins its data anew, and in an order of its own: an IterableDataset or a batch"
                " sampler of one's own (%s) cannot go on where the job is",
                self._manager.replica_id(),
                type(data_loader.dataset if is_read_on else data_loader.batch_sampler).__name__,
            )
            return loader
        job_loader = JobLoader(loader, sampler, self)
        self._loaders.append(job_loader)
        super().register_for_checkpointing(job_loader)
        return job_loader

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: groups would have epochs of different lengths."""
        raise ConfigError(
            "join_uneven_inputs knows nothing of groups: all of them make the same steps", "join_uneven_inputs"
        )

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Of a loader that is trained on, return the loader itself: it goes on where the job is, as `load_state` says."""
        return dataloader if isinstance(dataloader, JobLoader) else super().skip_first_batches(dataloader, num_batches)

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, DistributedDataParallel | PureDistributedDataParallel):
            raise ConfigError(
                f"prepare the model itself, not {type(model).__name__}: FaultTolerantAccelerator averages its gradients",
                party="model",
            )
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        prepared = super().prepare_model(model, *args, **kwargs)
        if is_new:
            prepared.register_forward_pre_hook(self._forward_begins)
        return prepared

    @torch.compiler.disable
    def _forward_begins(self, module: torch.nn.Module, inputs: object) -> None:
        """Begin a step in a loop that has its batches from elsewhere."""
        if not (module.training and torch.is_grad_enabled() and self._optimizers) or self.is_in_step:
            return
        if self._loaders and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: a step begins by a forward pass, and not by the loader that is divided among the groups, which is the first"
                " one that is prepared, and each that shuffles: its batch may be that of all groups, and its place is no state",
                self._manager.replica_id(),
            )
        self.begin_step()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, OptimizerWrapper):
            raise ConfigError(
                "prepare the optimizer itself, not torchft_ckpt.Optimizer: FaultTolerantAccelerator asks whether its steps count",
                party="optimizer",
            )
        prepared: AcceleratedOptimizer = super().prepare_optimizer(optimizer, device_placement)
        self._manager.guard_optimizer(optimizer)
        steps, clears = prepared.step, prepared.zero_grad

        def step(self_: object, closure: object = None) -> bool:
            if closure is not None:
                raise ConfigError("optimizers that use closures are not supported", party="closure")
            return self._take_step(prepared, steps)

        def zero_grad(self_: object, *args: Any, **kwargs: Any) -> None:
            if self.sync_gradients:  # what was averaged is of no step
                self._average.forget()
            clears(*args, **kwargs)

        # Schedules want methods.
        prepared.step, prepared.zero_grad = types.MethodType(step, prepared), types.MethodType(zero_grad, prepared)
        return prepared

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        is_new = not getattr(scheduler, "_is_accelerate_prepared", False)
        prepared = super().prepare_scheduler(scheduler)
        if is_new:
            steps = prepared.step

            def step(*args: Any, **kwargs: Any) -> None:
                follows = prepared.step_with_optimizer and not prepared.split_batches and self.sync_gradients
                for _ in range(0 if self._has_skipped else self._num_groups if follows else 1):
                    steps(*args, **kwargs)

            prepared.step = step
        return prepared

    def _trained(self) -> dict[str, list[Any]]:
        """Return what is trained, by kind."""
        return {
            "models": [self.unwrap_model(model) for model in self._models],
            "optimizers": [optimizer.optimizer for optimizer in self._optimizers],
            "schedulers": [scheduler.scheduler for scheduler in self._schedulers],
            "scaler": [] if self.scaler is None else [self.scaler],
            "custom": [
                one for one in self._custom_objects if one is not self._manager and not isinstance(one, JobLoader)
            ],
            "loaders": [*self._loaders],
        }

    def _prepared(self) -> dict[str, Any]:
        return {kind: [one.state_dict() for one in those] for kind, those in self._trained().items()}

    def _load_prepared(self, state: dict[str, Any]) -> None:
        trained = self._trained()
        for kind, those in trained.items():
            if len(those) != len(state[kind]):
                raise ConfigError(
                    f"this group has prepared {len(those)} {kind}, and another one {len(state[kind])}: give all groups the same"
                    " script and arguments",
                    party=kind,
                )
        for kind, those in trained.items():
            for one, values in zip(those, state[kind], strict=True):
                one.load_state_dict(values)

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self) -> None:
        """Begin a step of the job, unless one is open. It has the newest state then, but in the first iteration of a process that
        lacks it: that warms up alone, and counts for nothing.

        Nothing begins if the job is over.

        Raises:
            ConfigError: not all optimizers have taken the last step.
            Also as `Manager.start_quorum`.
        """
        if self.is_in_step or self.is_over:
            return
        if self._to_step:
            raise ConfigError(
                f"{len(self._to_step)} of {len(self._optimizers)} optimizers have not taken the last step, and the next one"
                " begins: do all backward passes of a step before the first optimizer steps, and step all of them in each."
                " Optimizers that take turns need a loop of your own, and torchft_ckpt.Optimizer around each",
                party="optimizer",
            )
        self.num_begun += 1
        manager = self._manager
        with self._over_at_end():
            for prepared in self._optimizers:  # all of them share the step that the first one begins
                if manager.hooks.begins_step(prepared.optimizer):
                    manager.start_quorum()
            while self._is_warm and manager.is_warming_up():
                manager.should_commit()  # nothing is computed, so the state is loaded here
                manager.start_quorum()
        self.is_in_step = True
        self._average.forget()
        if self._has_skipped:
            self._has_skipped = False
            self.gradient_state._set_sync_gradients(True)  # a loop without `accumulate` does not set it

    @contextlib.contextmanager
    def _over_at_end(self) -> Iterator[None]:
        """The lighthouse may say in it that the job is over: this group gets no more batches."""
        try:
            yield
        except JobFinishedError as finished:
            logger.info("%s gets no more batches: %s", self._manager.replica_id(), finished)
            self._finished_at = finished.step

    @property
    def trains(self) -> bool:
        """Whether the batches that come next are trained on: else they are looked at."""
        return bool(self._optimizers) and torch.is_grad_enabled() and any(model.training for model in self._models)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if not (self.is_in_step or self.is_over):
            raise ConfigError(
                "a backward pass comes before its step has begun: take the batch from a prepared loader, or compute the forward"
                " pass by a prepared model in train mode",
                party="backward",
            )
        self._average.put_back()  # of the loss before, in the same step
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            with self._over_at_end():  # as it may be heard only now
                self._average.take()

    def _take_step(self, prepared: AcceleratedOptimizer, steps: Callable[[], None]) -> bool:
        """Let an optimizer step if the gradients count; return whether they do. Nothing happens within an accumulation."""
        if not self.sync_gradients:
            return False
        if not (self.is_in_step or self.is_over or id(prepared) in self._to_step):
            raise ConfigError("the optimizer steps, and no step has begun", party="optimizer")
        manager, counts = self._manager, False
        with manager.taking_step(prepared.optimizer):
            if self.is_in_step and not self.is_over:
                for one in self._optimizers:  # if the step does not count the others do not ask
                    manager.hooks.takes_step(one.optimizer)
            with self._over_at_end():
                counts = not self.is_over and manager.should_commit()
            prepared._is_overflow = not counts  # the schedule stays then
            if self.is_in_step:
                self.is_in_step, self._is_warm = False, True
                self._to_step = {id(one) for one in self._optimizers}
                for loader in self._loaders:
                    loader.ended(counts=counts)
            if counts:
                self._to_step.discard(id(prepared))
                steps()
                manager.hooks.took_step(prepared.optimizer)
        self._average.forget()
        if not counts:
            for one in self._optimizers:
                if self.scaler is not None:  # it unscales gradients once in a step
                    self.scaler._per_optimizer_states.pop(id(one.optimizer), None)
                one.optimizer.zero_grad()
            self._has_skipped, self._to_step = True, set()
            self.gradient_state._set_sync_gradients(False)
        return counts

    # ------------------------------------------------------------------------------------------------- what it writes

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if not self._speaks:
            return None
        naming = self.project_configuration
        if not naming.automatic_checkpoint_naming:
            return super().save_state(output_dir, *args, **kwargs)
        naming.iteration = self.job_step
        path = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{naming.iteration}")
        # Who has written it may have died in that, or the job has gone back.
        naming.automatic_checkpoint_naming = not os.path.exists(path)
        try:
            return super().save_state(path, *args, **kwargs)
        finally:
            naming.automatic_checkpoint_naming = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self._speaks:
            super().save(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self._speaks:
            super().save_model(*args, **kwargs)

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """A tracker starts where and when its group first writes."""
        start = super().init_trackers
        self._trackers_wanted = lambda: start(*args, **kwargs)

    def _start_trackers(self) -> None:
        start, self._trackers_wanted = self._trackers_wanted, lambda: None
        start()

    def get_tracker(self, *args: Any, **kwargs: Any) -> Any:
        """Return what may be kept: it asks at each call whether its group speaks, and does nothing otherwise."""
        find = super().get_tracker

        def found() -> Any:
            self._start_trackers()
            return find(*args, **kwargs)

        return JobTracker(lambda: found() if self._speaks else None)

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self._speaks:
            self._start_trackers()
            super().log(*args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        self._loaders.clear()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Say that this group has made its last step (`Manager.finish`), and end the trackers."""
        if self.num_begun and not self.is_over:
            self._manager.finish()
        super().end_training()


class JobTracker:
    """A tracker, in the group that speaks; in the others its methods do nothing.

    Args:
        find: returns the tracker, or None in the others.
    """

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        tracker = self._find()
        return (lambda *args, **kwargs: None) if tracker is None else getattr(tracker, name)


class JobSampler(Sampler[Any]):
    """A sampler whose order follows from a seed and the epoch, as that of the groups must. It is read whole when it begins.

    Nobody but a `JobLoader` reads it: another loader would not move the place in the data.

    Args:
        sampler: of any kind that has a length.
        seed: that it has while no other one is loaded.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self.seed = seed
        self.num_readers = 0
        """`JobLoader`s that are being iterated."""
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is read next."""
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if not self.num_readers:
            raise ConfigError(
                "what a prepared loader reads is read without it, and its place in the data would stay: call"
                " accelerator.skip_first_batches, say, not accelerate.skip_first_batches",
                party="train_dataloader",
            )
        seed, others = (self.seed + self._epoch) % 2**63, random.getstate()
        generator = getattr(self._sampler, "generator", None)
        if generator is not None:
            generator.manual_seed(seed)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random.seed(seed)
                order = [*self._sampler]
        finally:
            random.setstate(others)
        return iter(order)


class JobLoader:
    """The batches of a prepared loader, from where the job is to the end of its epoch. It has all that the loader has.

    Its place and the seed of its order are state: those of the end of the last step that counted.

    Args:
        loader: with a length, as accelerate prepares it.
        sampler: of it.
        accelerator: begins a step of the job before the first batch of each is given.
    """

    def __init__(self, loader: Any, sampler: JobSampler, accelerator: FaultTolerantAccelerator) -> None:
        self._loader, self._sampler, self._accelerator = loader, sampler, accelerator
        self._place = (0, 0)
        """The epoch, and the batch in it, that come after the last step that counted."""
        self._cursor: tuple[int, int] | None = None
        """Those that come after what was given last; None: nothing was given since that step."""
        self._epoch_of_loop: int | None = None
        """The epoch that the script's loop is in."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, int]:
        epoch, batch = self._place
        return {"epoch": epoch, "batch": batch, "seed": self._sampler.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place, self._cursor = (state["epoch"], state["batch"]), None
        self._sampler.seed = state["seed"]

    def ended(self, *, counts: bool) -> None:
        """A step is over. If it counts, what comes after the batches that were given for it is the place now."""
        if self._cursor is not None and counts:
            epoch, batch = self._cursor
            self._place = (epoch, batch) if batch < len(self) else (epoch + 1, 0)
        self._cursor = None

    def epoch_at(self, step: int) -> int:
        """Return the epoch in which a step of the job is: known for the step of the state here, else reckoned."""
        accelerator = self._accelerator
        if step == accelerator.state_step:
            return self._place[0]
        accumulated, length = accelerator.gradient_accumulation_steps, max(1, len(self))
        is_whole = accelerator.gradient_state.sync_with_dataloader
        return step // math.ceil(length / accumulated) if is_whole else step * accumulated // length

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        self._sampler.num_readers += 1
        try:
            yield from self._batches() if accelerator.trains else self._loader
        finally:
            self._sampler.num_readers -= 1

    def _batches(self) -> Iterator[Any]:
        accelerator, length = self._accelerator, len(self)
        self._epoch_of_loop = (
            self.epoch_at(accelerator.job_step) if self._epoch_of_loop is None else self._epoch_of_loop + 1
        )
        source: Any = self._loader
        batches: Iterator[Any] | None = None
        at, num_begun = (-1, 0, 0), -1  # epoch, batch and seed of what comes next; the steps that had begun by then
        try:
            while True:
                if self._place[0] <= self._epoch_of_loop:  # else this epoch is over, be it that others have made it
                    accelerator.begin_step()
                if accelerator.is_over or not accelerator.is_in_step:
                    return
                if num_begun == accelerator.num_begun and at[1] >= length:
                    return
                if num_begun != accelerator.num_begun:  # a load may have changed the place, or the step not counted
                    if self._place[0] > self._epoch_of_loop:
                        return  # the step goes on with the first batch of another epoch
                    num_begun = accelerator.num_begun
                    if batches is None or at != (*self._place, self._sampler.seed):
                        _leave(source, batches)
                        at = (*self._place, self._sampler.seed)
                        self._loader.iteration = at[0]
                        self._sampler.set_epoch(at[0])
                        source = skip_first_batches(self._loader, at[1]) if at[1] else self._loader
                        batches = iter(source)
                assert batches is not None
                given = next(batches)
                at = at[0], at[1] + 1, at[2]
                self._cursor = at[:2]
                yield given
        finally:
            _leave(source, batches)


def _leave(source: Any, batches: Any) -> None:
    if batches is not None:
        batches.close()
        source.end()


def _number(name: str, variable: str, given: int | None) -> int:
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text.isdecimal():
        raise ConfigError(
            f"FaultTolerantAccelerator needs {name}: pass it, or set {variable}, which is {text!r}. `torchft_ckpt run` sets it",
            party=name,
        )
    return int(text)
