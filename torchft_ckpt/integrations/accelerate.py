"""Replica groups of scripts that train with accelerate, as diffusers' and the `no_trainer` scripts of transformers do.

Each group runs the script, with `FaultTolerantAccelerator` for its `Accelerator`. One optimizer step is one step of the job:

    the loader gives the first batch of a step   `start_quorum`: what the loop does before it asks for that batch, after
                                                 `zero_grad` too, belongs to the step before
    the last backward pass                       the accumulated gradients are averaged over the groups, once
    optimizer.step                               asks whether the step counts, and steps if it does

**A discarded step is tried again within the same iteration**, with the same batches: the group's own gradients are averaged
and clipped once more, in another step of the job.

**An iteration goes by without a step** only if its gradients are not of the state that the job trains from: it is the first one
of a group that has come back, or the others went on without it. `sync_gradients` is False then, as within an accumulation. So
what a loop does only after an optimizer step (an average of the weights, a checkpoint, a count) it does not do, and the schedule
stays.

**The batches are those of the job's step.** What the loader gives follows from the step alone: a group that comes back goes on
where the job is, in the same epoch, and its epochs end with those of the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset, RandomSampler

from torchft_ckpt.ddp import DistributedDataParallel, GradientAverage, PureDistributedDataParallel
from torchft_ckpt.errors import ConfigError, JobFinishedError
from torchft_ckpt.integrations.retried_step import RetriedStep
from torchft_ckpt.optimizer import OptimizerWrapper

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)

KEY = "accelerate"
"""Names what the accelerator trains among all that is registered with the Manager."""


class FaultTolerantAccelerator(Accelerator):
    """An `Accelerator` that makes its script one replica group of a job.

    It registers with the manager what `prepare` and `register_for_checkpointing` are given. `save_state` writes the job's step
    as well, and `load_state` takes it. All groups have the same arguments, data sets of one size, and one optimizer.

    The first loader that is prepared, and each that shuffles, is divided among the groups, besides the processes of a group. All
    others are read whole by each group.

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
        self._is_dividing = False
        self._job_loaders: list[JobLoader] = []
        self._average: GradientAverage | None = None
        self._trackers_wanted: Callable[[], None] | None = None
        self._step_of_job = RetriedStep(manager)
        self._has_begun = False
        """A step of the job has begun in this process, or it was too late for one."""
        self._is_warm = False
        """An iteration was computed in this process."""
        self._found_step: int | None = None
        """The step of the others, before that."""
        self._finished_at: int | None = None
        self._counted_to: int | None = None
        """The step to which the last iteration came; None: it did not count, or there was none."""
        self._has_skipped = self._is_accumulating = self._has_averaged = self._is_redoing = False
        self._redone: list[Callable[[], object]] = []
        """What the loop has done with the averaged gradients of the open step, such as to clip them."""
        super().__init__(**kwargs)
        self._refuse()
        self.dataloader_config.use_seedable_sampler = True  # else nobody can go to an epoch's order at once
        manager.register_state_dict_fn(KEY, self._load_prepared, self._prepared)
        super().register_for_checkpointing(manager)

    def _refuse(self) -> None:
        kind, ranks = self.distributed_type, self._manager.group_world_size
        reasons = {
            kind.value: "its groups are of plain processes"
            if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
            else "",
            "num_processes": f"the group has {ranks} ranks, and accelerate works with {self.num_processes} processes: all would"
            " train on the same data. On CPUs cpu=True makes accelerate use torchrun's processes"
            if ranks != self.num_processes
            else "",
            "even_batches": "" if self.even_batches else "without it groups would have epochs of different lengths",
            "dispatch_batches": "all groups would read the same batches" if self.dispatch_batches else "",
            "use_stateful_dataloader": "the batches follow from the job's step" if self.use_stateful_dataloader else "",
        }
        for party, why in reasons.items():
            if why:
                raise ConfigError(f"FaultTolerantAccelerator cannot train so ({party}): {why}", party=party)

    # ------------------------------------------------------------------------------------------ what a script may ask

    @property
    def job_step(self) -> int:
        """The committed steps of the job: what a script counts in `completed_steps`. Before the first: as the others know it."""
        manager = self._manager
        if self._finished_at is not None:
            return self._finished_at
        if not self._has_begun:
            if self._found_step is None:
                self._found_step = manager.newest_step_of_peers() or 0
            return max(self._found_step, manager.current_step())
        return manager.quorum_step() if manager.is_warming_up() else manager.current_step()

    @property
    def job_epoch(self) -> int:
        """The epoch of the first prepared loader in which the job is: where a script's loop over epochs begins."""
        return self._job_loaders[0].locate(self.job_step)[0] if self._job_loaders else 0

    @property
    def is_over(self) -> bool:
        """Whether the job had ended before this group could make a step."""
        return self._finished_at is not None

    @property
    def is_main_process(self) -> bool:
        """True for one process of the job. Before its first step: for one of each group, which makes directories, say."""
        return bool(super().is_main_process) and (self._speaks or not self._has_begun)

    @property
    def is_local_main_process(self) -> bool:
        """As `is_main_process`. Before the first step: in the first group alone, so that there is one progress bar."""
        return bool(super().is_local_main_process) and self._speaks

    @property
    def _speaks(self) -> bool:
        return self._manager.speaks if self._has_begun else self._group == 0

    @property
    def num_processes(self) -> int:
        return int(super().num_processes) * (self._num_groups if self._is_dividing else 1)

    @property
    def process_index(self) -> int:
        index = int(super().process_index)
        return self._group * int(super().num_processes) + index if self._is_dividing else index

    # ------------------------------------------------------------------------------------------------ what is prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data_loader, JobLoader):
            return data_loader
        is_trained_on = not self._dataloaders or isinstance(data_loader.sampler, RandomSampler)
        self._is_dividing = is_trained_on and not getattr(data_loader, "_is_accelerate_prepared", False)
        try:
            loader = super().prepare_data_loader(data_loader, *args, **kwargs)
            if not self._is_dividing:
                return loader
        finally:
            self._is_dividing = False
        if isinstance(data_loader.dataset, IterableDataset):
            logger.warning(
                "%s: if this group comes back it begins its data anew: an IterableDataset cannot go on where the job is",
                self._manager.replica_id(),
            )
            return loader
        self._job_loaders.append(JobLoader(loader, self))
        return self._job_loaders[-1]

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
        if module.training and torch.is_grad_enabled() and self._optimizers:
            self.begin_step()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, OptimizerWrapper) or self._optimizers:
            raise ConfigError(
                "FaultTolerantAccelerator takes one optimizer, which is not torchft_ckpt.Optimizer: give it the parameters of all"
                " models, or wrap each of several in torchft_ckpt.Optimizer, in a loop of your own",
                party="optimizer",
            )
        prepared: AcceleratedOptimizer = super().prepare_optimizer(optimizer, device_placement)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._average = GradientAverage(self._manager, torch.nn.ParameterList(parameters))
        self._manager.guard_optimizer(optimizer)
        steps = prepared.step

        def step(closure: object = None) -> bool:
            if closure is not None:
                raise ConfigError("optimizers that use closures are not supported", party="closure")
            return self._take_step(prepared, steps)

        prepared.step = step
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        is_new = not getattr(scheduler, "_is_accelerate_prepared", False)
        prepared = super().prepare_scheduler(scheduler)
        if is_new:
            steps = prepared.step
            prepared.step = lambda *args, **kwargs: None if self._has_skipped else steps(*args, **kwargs)
        return prepared

    def _trained(self) -> dict[str, list[Any]]:
        """Return what is trained, by kind."""
        return {
            "models": [self.unwrap_model(model) for model in self._models],
            "optimizers": [optimizer.optimizer for optimizer in self._optimizers],
            "schedulers": [scheduler.scheduler for scheduler in self._schedulers],
            "scaler": [] if self.scaler is None else [self.scaler],
            "custom": [one for one in self._custom_objects if one is not self._manager],
            "samplers": [_Seed(loader.get_sampler()) for loader in self._job_loaders],
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

    def begin_step(self) -> bool:
        """Begin a step of the job, unless one is open; return whether one begins. It has the newest state then, but in the first
        iteration of a process that lacks it: that warms up alone, and counts for nothing.

        Raises:
            JobFinishedError: the job is over. Also as `Manager.start_quorum`.
        """
        if self._step_of_job.is_open:
            return False
        self._has_begun = True
        manager = self._manager
        manager.start_quorum()
        while self._is_warm and manager.is_warming_up():
            manager.should_commit()  # nothing is computed, so the state is loaded here
            manager.start_quorum()
        self._step_of_job.begins()
        self._redone, self._has_averaged = [], False
        if self._has_skipped:
            self._has_skipped = False
            self.gradient_state._set_sync_gradients(True)  # a loop without `accumulate` does not set it
        return True

    @property
    def is_in_step(self) -> bool:
        """Whether a step is open: the batches that come next are for it as well."""
        return self._step_of_job.is_open

    def is_in_place(self) -> bool:
        """Whether what comes next of the data is for the step that is open, or next."""
        return self._counted_to == self._manager.current_step()

    def note_over(self, finished: JobFinishedError) -> None:
        """The lighthouse says that the job is over."""
        logger.info("%s gets no more batches: %s", self._manager.replica_id(), finished)
        self._finished_at = finished.step

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        with super().accumulate(*models):
            self._is_accumulating = True
            try:
                yield
            finally:
                self._is_accumulating = False

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if not self.is_in_step:
            raise ConfigError(
                "a backward pass comes before its step has begun: take the batch from a prepared loader, or compute the forward"
                " pass by a prepared model in train mode",
                party="backward",
            )
        super().backward(loss, **kwargs)
        if self._is_accumulating:  # else it may be followed by others
            self._average_once()

    def _average_once(self) -> None:
        """Average what the backward passes of the step have accumulated, after the last of them."""
        if self._average is not None and self.is_in_step and self.sync_gradients and not self._has_averaged:
            self._has_averaged = True
            self._average.take()

    def _of_averages(self, call: Callable[[], Any]) -> Any:
        """Do something with averaged gradients; it is done again if the step is tried again."""
        self._average_once()
        if self._is_redoing or not self._has_averaged:
            return call()
        self._redone.append(call)
        return self._redo([call])

    def _redo(self, calls: list[Callable[[], Any]]) -> Any:
        self._is_redoing = True  # what they call is done by them
        try:
            return [call() for call in calls][-1] if calls else None
        finally:
            self._is_redoing = False

    def unscale_gradients(self, optimizer: Any = None) -> None:
        unscale = super().unscale_gradients
        self._of_averages(lambda: unscale(optimizer))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        clip, clipped = super().clip_grad_norm_, [*parameters]
        return self._of_averages(lambda: clip(clipped, max_norm, norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        clip, clipped = super().clip_grad_value_, [*parameters]
        self._of_averages(lambda: clip(clipped, clip_value))

    def _take_step(self, prepared: AcceleratedOptimizer, steps: Callable[[], None]) -> bool:
        """Let an optimizer step if the gradients count; return whether they do. Nothing happens within an accumulation."""
        if not self.sync_gradients:
            return False
        if not self.is_in_step:
            raise ConfigError("the optimizer steps, and no step has begun", party="optimizer")
        average, optimizer = self._average, prepared.optimizer
        assert average is not None

        def forget_scaling() -> None:
            if self.scaler is not None:  # it unscales gradients once in a step
                self.scaler._per_optimizer_states.pop(id(optimizer), None)

        def again() -> None:
            average.again()
            forget_scaling()
            self._redo(self._redone)

        self._average_once()
        with self._manager.taking_step():
            try:
                counts = self._step_of_job.vote(again)
            finally:
                average.forget()
            prepared._is_overflow = not counts  # the schedule stays then
            if counts:
                steps()
        self._is_warm = True
        self._counted_to = self._manager.current_step() if counts else None
        if not counts:
            forget_scaling()
            optimizer.zero_grad()
            self._has_skipped = True
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
        start, self._trackers_wanted = self._trackers_wanted, None
        if start is not None:
            start()

    def get_tracker(self, *args: Any, **kwargs: Any) -> Any:
        if self._speaks:
            self._start_trackers()
        return super().get_tracker(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self._speaks:
            self._start_trackers()
            super().log(*args, **kwargs)

    def end_training(self) -> None:
        """Say that this group has made its last step (`Manager.finish`), and end the trackers."""
        if self._has_begun and not self.is_over:
            self._manager.finish()
        super().end_training()


class _Seed:
    """The seed of a sampler, as state: groups draw from one order."""

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler if isinstance(sampler, SeedableRandomSampler) else None

    def state_dict(self) -> dict[str, int | None]:
        return {"seed": None if self._sampler is None else self._sampler.initial_seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._sampler is not None:
            self._sampler.initial_seed = state["seed"]


class JobLoader:
    """The batches of a prepared loader, from where the job is to the end of its epoch. It has all that the loader has.

    Args:
        loader: with a length, as accelerate prepares it.
        accelerator: begins a step of the job before the first batch of each is given.
    """

    def __init__(self, loader: Any, accelerator: FaultTolerantAccelerator) -> None:
        self._loader, self._accelerator = loader, accelerator
        self._next: tuple[int, int] | None = None
        """The epoch and the batch in it that come after what was given last."""
        self._epoch_of_loop: int | None = None
        """The epoch that the loop believes to be in, if it began with that of the job."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def locate(self, step: int) -> tuple[int, int]:
        """Return the epoch in which the batches of a step are, and how many of its batches come before them."""
        accumulated, length = self._accelerator.gradient_accumulation_steps, len(self._loader)
        if not self._accelerator.gradient_state.sync_with_dataloader:
            return divmod(step * accumulated, max(1, length))
        epoch, steps = divmod(step, max(1, math.ceil(length / accumulated)))
        return epoch, steps * accumulated

    def __iter__(self) -> Iterator[Any]:
        accelerator, length = self._accelerator, len(self._loader)
        if not torch.is_grad_enabled():
            yield from self._loader
            return
        at = self._next if self._next is not None and accelerator.is_in_place() else None
        epoch, index = at or self.locate(accelerator.job_step)
        if index >= length:
            epoch, index = epoch + 1, 0
        self._epoch_of_loop = epoch if self._epoch_of_loop is None else self._epoch_of_loop + 1
        if epoch > self._epoch_of_loop:
            return  # the job has made this one meanwhile
        source, batches = self._loader, None
        try:
            while not accelerator.is_over:
                if index >= length and (accelerator.is_in_step or accelerator.is_in_place()):
                    break
                try:
                    begins = accelerator.begin_step()
                except JobFinishedError as finished:
                    accelerator.note_over(finished)
                    return
                if begins and (at is None or not accelerator.is_in_place()):
                    place = self.locate(accelerator.job_step)
                    if place[0] != epoch:
                        return  # the step goes on with the first batch of another epoch
                    if place[1] != index:
                        _leave(source, batches)
                        batches, index = None, place[1]
                if batches is None:
                    self._loader.iteration = epoch
                    source = skip_first_batches(self._loader, index) if index else self._loader
                    batches = iter(source)
                batch = next(batches)
                index += 1
                at = self._next = epoch, index
                yield batch
            if batches is not None:
                next(batches, None)  # it does something at its end
                batches = None
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
