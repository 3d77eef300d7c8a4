"""Replica groups of Lightning's `Trainer`, by its `strategy`.

Each group runs a Trainer of its own. One step of Lightning's optimizer is one step of the job:

    before a batch   the first of those that are accumulated: `start_quorum`, before the batch is read and any hook hears of it
    optimizer_step   the last forward and backward pass (Lightning's closure); average over the groups what is accumulated; vote;
                     where the step counts: `on_before_optimizer_step`, clipping and `optimizer.step`

**`optimizer_step` returns when a step counts.** In a discarded one nothing has happened, so this group's own gradients are
averaged again in the next one. Lightning takes each call for a step, and goes by it with schedules, callbacks, logs and data: so
its `global_step` is the job's.

**A state is what Lightning would write into a checkpoint**, checkpoint hooks and callbacks included, and the place in the data. A
group that comes back computes its first gradients for itself alone. It loads the state in the vote on them, which ends no step.
It leaves that batch then (`_StateLoaded`), and Lightning's loop begins with the first batch of the place: all hooks see the job's
step, state and batch. What they have changed before is overwritten, as far as it is state.

**No path travels.** `ModelCheckpoint` removes what its state names. Names below its `dirpath` travel; a group takes those of
checkpoints in its own.

**Callbacks of Lightning's** are right in all groups, or refused by name when `fit` begins.

**SIGTERM** is `Manager.leave_on`'s, where that was called: Lightning does not end the loop, and the next step is not begun. Else
Lightning ends the loop after the batch, and the process with status 143.

**One group speaks for the job** (`Manager.speaks`). To Lightning it alone has rank zero, from the end of a step on. One that does
not speak any more falls silent before it votes.

**With `global_batch_size` steps are exact** (`StepLoader`): a batch of Lightning's stands for a step, and `optimizer_step` calls
Lightning's closure for each microbatch. What `training_step` logs is kept back, and logged as its mean when the step counts.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import logging
import os
import signal
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader

from torchft_ckpt.core.training.discards import pauses_s
from torchft_ckpt.data import DistributedSampler
from torchft_ckpt.ddp import GradientAverage
from torchft_ckpt.errors import ConfigError, StateFormatError
from torchft_ckpt.exact.feeding import StandIn, feed

if TYPE_CHECKING:
    from torchft_ckpt.exact import Step, StepLoader
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)

KEY = "lightning"
"""Names Lightning's state among all that is registered with the Manager, and the Manager's in a checkpoint of Lightning's."""
_PLACE, _SUMS = "torchft_ckpt_place", "torchft_ckpt_sums"
_IN_STEP, _LOSS = "training_step.", "."
"""What Lightning puts before the name of what `training_step` logs; and a name that nobody logs."""
_NOT_STATE = ("epoch", "global_step", "loops")
"""Of what is in a checkpoint: the place of the loops, which is said by `_PLACE` as of the beginning of a step."""
_REFUSED: dict[type, str] = {
    BaseFinetuning: "it gives the optimizer more parameters in some epoch, and a group that comes back begins without them",
    BatchSizeFinder: "each group would train steps of its own, and find another batch size; find it before the job",
    LearningRateFinder: "each group would train steps of its own, and find another rate; find it before the job",
    ModelPruning: "it gives the parameters other names, and a group that comes back begins with the old ones",
    SpikeDetection: "it judges by the losses of one group, and cannot load what it has saved",
}
"""Callbacks of Lightning's that cannot be used, and why."""


class _StateLoaded(Exception):
    """The gradients that were voted on are of another state than the one that is here: the batch is left for that one's."""


class _ReplicaGroup(Strategy):
    """What both strategies have: put it before the strategy of Lightning's that trains a group."""

    _manager: Manager
    _average: GradientAverage | None = None
    _speaks = False
    _is_dumping = False
    """What is collected is for other groups, not for a checkpoint."""
    _place: dict[str, Any] | None = None
    """Where loops and data were when the open step began; None between two steps."""
    _has_moved = False
    """`_place` was loaded, and the loops are elsewhere yet."""
    _global_batch_size: int | None = None
    _steps: StepLoader | None = None  # steps are not exact
    _step: Step | None = None
    _microbatch: Any = None
    _sums: Mapping[str, list[torch.Tensor]] = MappingProxyType({})
    """Of an epoch's logged values, which were loaded, and are not in Lightning's results yet."""
    _zero_grad: Callable[..., Any]
    """Lightning's, which makes what clears gradients: with exact steps it is called once a batch."""

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ------------------------------------------------------------------------------------------------ training begins

    def setup_environment(self) -> None:
        """As the strategy does it. No group speaks before the end of the first step."""
        super().setup_environment()
        if getattr(self, "world_size", 1) != self._manager.group_world_size:
            raise ConfigError(
                f"Lightning trains {getattr(self, 'world_size', 1)} ranks, and the Manager knows of"
                f" {self._manager.group_world_size}: start each rank by torchrun or `torchft-ckpt run`, which tell both",
                party="world_size",
            )
        self._tell_rank_zero()
        for callback in self._trainer.callbacks if self._trainer.state.fn == TrainerFn.FITTING else ():
            for kind, why in _REFUSED.items():
                if isinstance(callback, kind):
                    name = type(callback).__name__
                    raise ConfigError(f"{type(self).__name__} does not go with the callback {name}: {why}", party=name)

    def setup(self, trainer: Any) -> None:
        """As the strategy does it; then register what Lightning trains with the manager."""
        super().setup(trainer)
        trainer._signal_connector._sigterm_notifier_fn = self._on_sigterm  # Lightning makes a handler of it after this
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None and self.model is not None
        if self._average is not None:
            raise ConfigError(
                f"{type(self).__name__} serves one fit: make a Manager and a strategy for each", "strategy"
            )
        if not self.lightning_module.automatic_optimization:
            raise ConfigError(
                f"{type(self).__name__} needs automatic optimization: with manual optimization nobody says which of several"
                " optimizer steps are one step of the job",
                party="automatic_optimization",
            )
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ConfigError("LBFGS evaluates its closure several times: it cannot be used", party="LBFGS")
        if self._global_batch_size is not None and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError("fp16 does not go with global_batch_size; use bf16", party="precision")
        self._average = GradientAverage(self._manager, self.model.parameters)
        self._begin_before_batches(trainer.fit_loop.epoch_loop)
        for optimizer in self.optimizers:
            self._manager.guard_optimizer(optimizer)
        self._manager.register_state_dict_fn(KEY, self._load, self._state)

    def process_dataloader(self, dataloader: object) -> object:
        """Give stand-ins for the steps, if these are exact; else warn if all groups would train on the same batches."""
        size, trains = self._global_batch_size, self._trainer.training
        if trains and size is not None:
            if self._steps is not None:
                raise _one_loader()
            ranks = getattr(self, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
            seed, part = int(os.environ.get("PL_GLOBAL_SEED", "0")), (ranks["rank"], ranks["num_replicas"])
            by = [one for one in self._trainer.callbacks if isinstance(one, GradientAccumulationScheduler)]
            most = max([self._trainer.accumulate_grad_batches, *(num for one in by for num in one.scheduling.values())])
            self._steps, dataloader = feed(self._manager, dataloader, size, accumulates=most, seed=seed, part=part)
        if self._steps is not None and trains:
            automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
            self._zero_grad, automatic._make_zero_grad_fn = automatic._make_zero_grad_fn, lambda *_: None
            return super().process_dataloader(dataloader)
        if (
            self._trainer.training
            and isinstance(dataloader, DataLoader)
            and not isinstance(dataloader.dataset, torch.utils.data.IterableDataset)
            and not isinstance(dataloader.sampler, DistributedSampler)
        ):
            logger.warning(
                "the training data has a %s: it divides nothing between the replica groups; use torchft_ckpt.DistributedSampler",
                type(dataloader.sampler).__name__,
            )
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Refuse data whose place nobody knows."""
        super().on_train_start()
        if isinstance(self._trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ConfigError(
                "training_step(dataloader_iter) cannot be used: a group that returns could not go on with the data where it was",
                party="dataloader_iter",
            )
        if self._steps is not None and not isinstance(self._trainer.train_dataloader, DataLoader):
            raise _one_loader()

    def on_train_end(self) -> None:
        """Tell the job that this group has made its last step."""
        super().on_train_end()
        self._manager.finish()

    # ------------------------------------------------------------------------------------------------------- SIGTERM

    def _on_sigterm(self, number: int, frame: object) -> None:
        """In place of Lightning's own handler, which begins with a collective that other ranks may not come to.

        Lightning calls the handler that was there before after this one.
        """
        if not self._manager.hooks.leaves_on(number):
            self._trainer._signal_connector.received_sigterm = True

    def on_exception(self, exception: BaseException) -> None:
        """As the strategy does it. What SIGTERM ends has not ended well: who started the group is to know."""
        super().on_exception(exception)
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + signal.SIGTERM

    # ------------------------------------------------------------------------------------------------------- one step

    def _begin_before_batches(self, loop: Any) -> None:
        """Have a step begin before the first batch is read of those that are accumulated."""
        advance = loop.advance

        def advance_in_step(data_fetcher: Any) -> None:
            # Where it has just resumed, it may only end a validation, or pass one over.
            may_validate = loop.restarting and loop._should_check_val_fx(data_fetcher)
            trains = not may_validate or not (loop.val_loop.restarted_mid_evaluation or loop.restarted_on_last)
            if trains and loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0:
                self._begin_step()
            module = self._trainer.lightning_module
            in_hook = module._current_fx_name
            while True:
                try:
                    advance(data_fetcher)
                    return
                except _StateLoaded:
                    module._current_fx_name, loop.restarting = in_hook, False
                    self._begin_step()

        loop.advance = advance_in_step

    def _begin_step(self) -> None:
        if not self._has_moved:
            self._place = self._place_now()
        self._manager.start_quorum()
        if self._has_moved:
            self._take_place()
        self._step = None if self._steps is None else next(iter(self._steps))

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As the strategy does it, with the module's hooks; what stands for a step is nothing that they know."""
        return batch if isinstance(batch, StandIn) else super().batch_to_device(batch, *args, **kwargs)

    def _compute(self, closure: Callable[[], Any]) -> None:
        """Compute the microbatches of the open step, and take the mean of their gradients over the groups."""
        assert self._step is not None
        trainer, results, logged = self._trainer, self._trainer._results, dict[str, Any]()
        log = results.update_metrics

        def keep(key: str, value: Any, size: int) -> None:
            if isinstance(value, torch.Tensor):
                logged[key.removeprefix(_IN_STEP)] = value.clone()
            else:
                log(key, value, size)

        results.update_metrics = keep
        try:
            for microbatch in self._step:
                logged.clear()
                batch = trainer.precision_plugin.convert_input(microbatch)
                batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
                self._microbatch = self.batch_to_device(batch, dataloader_idx=0)
                loss = closure()
                self._step.log(**{**logged, _LOSS: loss.detach().clone()})
        finally:
            del results.update_metrics
            self._microbatch = None

    def _log_means(self, closure: Any) -> torch.Tensor:
        """Log the means of what was logged in a step that counts, over the ranks of this group too; return that of the losses."""
        assert self._step is not None
        results, means = self._trainer._results, self._step.means
        for key in self._sums.keys() & results.keys():
            for name, summed in zip(("value", "cumulated_batch_size"), self._sums[key], strict=False):
                setattr(results[key], name, summed.to(self.root_device))
        self._sums = {key: sums for key, sums in self._sums.items() if key not in results}
        loss: torch.Tensor = self.reduce(torch.tensor(means.pop(_LOSS), device=self.root_device))
        for name in sorted(means):  # as all ranks do
            key = name if name in results else _IN_STEP + name
            if key not in results:  # who has computed no microbatch yet does not know how to log it
                continue
            mean = torch.tensor(means[name], device=self.root_device)
            mean = mean if results[key].meta.sync.rank_zero_only else self.reduce(mean)
            results.update_metrics(key, mean, self._global_batch_size)
        closure._result = ClosureResult(loss)
        return loss

    def _sums_of_epoch(self) -> dict[str, list[torch.Tensor]]:
        """Return what Lightning has summed in this epoch of what is logged in exact steps, for who comes in."""
        results = {} if self._steps is None else self._trainer.fit_loop.epoch_loop._results
        return {
            key: [one.value, one.cumulated_batch_size] if one.meta.is_mean_reduction else [one.value]
            for key, one in results.items()
            if one.is_tensor and one.meta.on_epoch
        } | {**self._sums}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._steps is not None:
            if self._microbatch is None:
                raise ConfigError(
                    "with global_batch_size training_step is called for the microbatches of a step alone: not by"
                    " StochasticWeightAveraging for BatchNorm, nor by an optimizer_step of the module's that makes no step",
                    party="training_step",
                )
            args = self._microbatch, *args[1:]
        output = super().training_step(*args, **kwargs)
        if output is None:
            raise ConfigError(
                "training_step returned None: all groups make the same steps; return a loss that is multiplied by zero",
                party="training_step",
            )
        return output

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the last gradients, and step the optimizer with their average, in a step of the job that counts.

        Raises:
            Also as `Manager.start_quorum` and `Manager.should_commit`, and what Lightning's hooks and the optimizer raise.
        """
        assert self._average is not None
        module: Any = model or self.lightning_module
        pauses = pauses_s()
        if self._steps is None:
            result = closure()
            self._average.take()
        else:
            self._zero_grad(0, optimizer)()
            self._compute(closure)
        while not self._vote():
            if not self._has_moved:
                time.sleep(next(pauses))  # where groups are missing
                self._manager.start_quorum()
            if self._has_moved:
                self._average.forget()
                raise _StateLoaded
            if self._steps is None:
                self._average.again()
            else:
                self._step = next(iter(self._steps))
                self._compute(closure)
        self._average.forget()
        if self._steps is not None:
            result = self._log_means(closure)
        with self._manager.taking_step():
            # Hooks, unscaling and clipping see the averages.
            result = self.precision_plugin.optimizer_step(optimizer, model=module, closure=lambda: result, **kwargs)
        self._place = None
        if self._manager.speaks != self._speaks:
            self._fall_silent() if self._speaks else self._speak()
        return result

    def _vote(self) -> bool:
        if self._speaks and self._manager.participating_rank() != 0:
            self._fall_silent()
        return self._manager.should_commit()

    # ------------------------------------------------------------------------------------------------ the state that moves

    def _state(self) -> dict[str, Any]:
        trainer, place = self._trainer, self._place
        if place is None:
            raise ConfigError(
                "what Lightning trains cannot be saved or handed over between two steps, as its loops are on their way from one"
                " to the other: use Lightning's checkpoints",
                party=KEY,
            )
        self._is_dumping = True
        try:
            state: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self._is_dumping = False
        given = [trainer.lightning_module, *([trainer.datamodule] if trainer.datamodule is not None else [])]
        for name in (*_NOT_STATE, *(name for one in given for name in _hyper_parameters(one))):
            state.pop(name, None)
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                state["callbacks"].pop(callback.state_key, None)  # each group has a clock of its own
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in state["callbacks"]:
                values = _renamed(state["callbacks"][callback.state_key], partial(_name_below, callback), callback)
                values.pop("current_score", None)  # it returns that, and does not load it
                state["callbacks"][callback.state_key] = {**values, "dirpath": ""}
        return {**state, _PLACE: place, _SUMS: self._sums_of_epoch()}

    def _load(self, state: dict[str, Any]) -> None:
        """Do what Lightning does with a checkpoint when it resumes, but for the loops, which run."""
        trainer, module = self._trainer, self.lightning_module
        assert module is not None
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = state = dict(state)
        place = state.pop(_PLACE)
        if not _is_of_numbers(place):  # they are in the names of checkpoints, too
            raise StateFormatError(
                "the place in the data that came with a state is not one of numbers alone", party=KEY
            )
        self._place, self._sums = place, state.pop(_SUMS)
        self._has_moved = True
        state["callbacks"] = callbacks = dict(state["callbacks"])
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in callbacks:
                taken = _renamed(callbacks[callback.state_key], partial(_path_below, callback), callback)
                callbacks[callback.state_key] = {**taken, "dirpath": callback.dirpath}
        try:
            connector.restore_datamodule()
            call._call_lightning_module_hook(trainer, "on_load_checkpoint", state)
            module.load_state_dict(state["state_dict"], strict=module.strict_loading)
            connector.restore_callbacks()
            for callback in trainer.callbacks:
                if isinstance(callback, StochasticWeightAveraging):
                    self._end_load(callback)
            connector.restore_precision_plugin_state()
            for optimizer, values in zip(self.optimizers, state["optimizer_states"], strict=True):
                optimizer.load_state_dict(values)
            connector.restore_lr_schedulers()
        finally:
            connector._loaded_checkpoint = {}

    def _end_load(self, averaging: StochasticWeightAveraging) -> None:
        """Do now what this callback keeps from a load until training, or an epoch, begins.

        Its schedule takes the place of the other one before the state of schedules and optimizer is loaded.
        """
        if averaging._scheduler_state is None:  # no epoch of those that it averages has begun
            return
        epochs = self._trainer.fit_loop.epoch_progress.current
        is_in, epochs.completed = epochs.completed, averaging._latest_update_epoch
        try:
            averaging.on_train_epoch_start(self._trainer, self._trainer.lightning_module)
        finally:
            epochs.completed = is_in
        assert averaging._swa_scheduler is not None
        averaging._swa_scheduler.load_state_dict(averaging._scheduler_state)
        averaging.n_averaged = torch.tensor(averaging._init_n_averaged, device=self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As the strategy does it for a checkpoint; for other groups the tensors themselves, as ranks may not talk then."""
        if self._is_dumping:
            assert self.lightning_module is not None
            return self.lightning_module.state_dict()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Likewise."""
        return optimizer.state_dict() if self._is_dumping else super().optimizer_state(optimizer)

    # --------------------------------------------------------------------------------------------- the place in the data

    def _trackers(self) -> dict[str, Any]:
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        return {
            "epoch": fit.epoch_progress,
            "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
        }

    def _place_now(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "progress": {name: tracker.state_dict() for name, tracker in self._trackers().items()},
            "num_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "accumulate": trainer.accumulate_grad_batches,
            "saved_at": {one.state_key: one._last_global_step_saved for one in self._checkpoint_callbacks()},
        }

    def _checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [callback for callback in self._trainer.callbacks if isinstance(callback, ModelCheckpoint)]

    def _take_place(self) -> None:
        """Make the loops' progress what was loaded, and read up to there."""
        place, self._has_moved = copy.deepcopy(self._place), False
        assert place is not None
        loop = self._trainer.fit_loop
        progress, epochs, fetcher = loop.epoch_loop.batch_progress, loop.epoch_progress, loop._data_fetcher
        was_at = epochs.current.processed, progress.current.ready
        self._trainer.accumulate_grad_batches = place["accumulate"]
        loop.epoch_loop._batches_that_stepped = place["num_stepped"]
        for name, tracker in self._trackers().items():
            tracker.load_state_dict(place["progress"][name])
        for callback in self._checkpoint_callbacks():  # its own state does not say so, and it would save the step again
            callback._last_global_step_saved = place["saved_at"][callback.state_key]
        epoch, wanted = is_at = epochs.current.processed, progress.current.ready
        if is_at != was_at:
            logger.info("%s goes on with batch %d of epoch %d", self._manager.replica_id(), wanted, epoch)
        num_fetched = was_at[1]
        if epoch != was_at[0] or wanted < num_fetched:
            for loader in loop._combined_loader.flattened:
                _set_sampler_epoch(loader, epoch)
            iter(fetcher)
            num_fetched = 0
        while num_fetched < wanted and next(fetcher, None) is not None:
            num_fetched += 1
        progress.is_last_batch = fetcher.done

    # ------------------------------------------------------------------------------------- one group speaks for the job

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the rank that writes checkpoints and logs for the job."""
        strategy: Any = super()
        return self._speaks and bool(strategy.is_global_zero)

    def _tell_rank_zero(self) -> None:
        """Loggers and messages of Lightning's ask a global variable."""
        told: Any = rank_zero_only
        told.rank = 0 if self.is_global_zero else max(1, getattr(self, "global_rank", 0))

    def _speak(self) -> None:
        self._speaks = True
        self._tell_rank_zero()
        if not self.is_global_zero:
            return
        trainer = self._trainer
        if self._manager.current_step() > 1:
            for one in trainer.loggers:
                if isinstance(one, CSVLogger):
                    one._experiment = _ContinuedMetrics(one.log_dir)
        if trainer.enable_autolog_hparams:
            _log_hyperparams(trainer)
        if (bar := trainer.progress_bar_callback) is not None:
            bar.enable()
            bar.on_train_start(trainer, self.lightning_module)
            bar.on_train_epoch_start(trainer, self.lightning_module)

    def _fall_silent(self) -> None:
        was_zero, trainer = self.is_global_zero, self._trainer
        if was_zero:
            for one in trainer.loggers:
                one.save()
        self._speaks = False
        self._tell_rank_zero()
        if was_zero and (bar := trainer.progress_bar_callback) is not None:
            bar.disable()
            bar.teardown(trainer, self.lightning_module, "fit")
            bar.on_train_start(trainer, self.lightning_module)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide alike in all groups, between two steps: to stop early, to keep a checkpoint, that a file is there.

        Where a group is lost meanwhile this one decides alone.
        """
        if self._manager.num_participants() > 0:  # else there was no step yet
            votes = torch.tensor([float(decision)], device=self.root_device)
            work = self._manager.allreduce(votes, reduce_op=ReduceOp.MIN if all else ReduceOp.MAX)
            decision = bool(votes.item()) if work.wait() else decision
        return bool(super().reduce_boolean_decision(decision, all))  # the ranks of this group alike in any case

    def resume_from(self, dirpath: str | os.PathLike[str]) -> str | None:
        """Return the checkpoint to give `fit(ckpt_path=...)`; None: train from what is here, or from what others hold.

        None if another group holds a state of the job: the state comes from there. Otherwise the checkpoint in `dirpath` that was
        written last and is whole, by its time. If the lighthouse does not answer within the manager's `connect_timeout` it is as
        if there were no other group: the state of those that there are wins later.

        All ranks of the group call it before `fit`, on the training thread, and see the same directory.

        Args:
            dirpath: of `ModelCheckpoint`, on a file system of this machine.

        Raises:
            ConfigError: `dirpath` is a URL.
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        if "://" in os.fspath(dirpath):
            message = (
                f"resume_from looks into directories, and {dirpath} is a URL; name the checkpoint by fit(ckpt_path=...)"
            )
            raise ConfigError(message, party="dirpath")
        if self._manager.newest_step_of_peers() is not None:
            return None
        newest = max(((_written_at(path), str(path)) for path in Path(dirpath).glob("*.ckpt")), default=(-1, ""))
        if newest[0] < 0:
            return None
        logger.info("resumes from %s, if no other group holds a newer state", newest[1])
        return newest[1]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint, if this group speaks for the job. All ranks of a group call it."""
        if self._speaks:
            super().save_checkpoint({**checkpoint, KEY: self._manager.state_dict()}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. Where training resumes from it, the job does."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn == TrainerFn.FITTING:
            plain = {"step": checkpoint["global_step"], "batches_committed": 0}
            self._manager.load_state_dict(checkpoint.get(KEY, plain))
        return checkpoint


class FaultToleranceStrategy(_ReplicaGroup, SingleDeviceStrategy):
    """Makes a `Trainer` of one process a replica group of a job: `Trainer(strategy=FaultToleranceStrategy(manager))`.

    Gradients are averaged over the groups, before Lightning clips them. It registers with the manager what Lightning would write
    into a checkpoint. All groups have the same arguments of the Trainer, data of the same length, and loggers and checkpoints in
    the same place: the group that speaks for the job writes there. `fit` raises `JobFinishedError` in a group that comes when the
    others have made the last step; at its end it calls `Manager.finish`. It serves one `fit`.

    Args:
        manager: of this rank, with no state functions of its own for what Lightning trains.
        device: default: the first GPU, or the CPU where there is none.
        global_batch_size: samples in a step, whoever is there: steps are exact, as with `StepLoader`. The loader's batches are
            its microbatches, and all groups have the same data set. One without access by index trains as without this, and a
            warning says so.
        kwargs: of `SingleDeviceStrategy`.

    Raises:
        ConfigError: the group has several ranks, see `FaultToleranceModelParallelStrategy`. From `fit`: the module optimizes
            manually, or with LBFGS, takes `dataloader_iter`, or its `training_step` returned None.
    """

    def __init__(
        self,
        manager: Manager,
        device: torch.device | str | None = None,
        *,
        global_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if manager.group_world_size != 1:
            raise ConfigError(
                f"this group has {manager.group_world_size} ranks, and FaultToleranceStrategy trains one process:"
                " use FaultToleranceModelParallelStrategy",
                party="world_size",
            )
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"), **kwargs)
        self._manager, self._global_batch_size = manager, global_batch_size


class FaultToleranceModelParallelStrategy(_ReplicaGroup, ModelParallelStrategy):
    """Makes a `Trainer` of several ranks, by FSDP2 or tensor parallelism, a replica group of a job. torchrun starts its ranks.

    As `FaultToleranceStrategy` otherwise. Groups that train together have the same number of ranks and the same meshes: rank i of
    each averages its shards with rank i of the others.

    Args:
        manager: of this rank.
        global_batch_size: see `FaultToleranceStrategy`. A microbatch is one batch of each rank that reads other samples.
        kwargs: of `ModelParallelStrategy`.
    """

    def __init__(self, manager: Manager, *, global_batch_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._manager, self._global_batch_size = manager, global_batch_size


def _one_loader() -> ConfigError:
    return ConfigError(
        "global_batch_size goes with one data loader: no list or dict of them, and no reload_dataloaders_every_n_epochs",
        party="train_dataloaders",
    )


def _written_at(checkpoint: Path) -> int:
    """Return when Lightning has written a checkpoint, in ns; -1: it is not whole.

    A file ends with the list of what is in it. In a folder, which may have been overwritten in place, `meta.pt` comes last.
    """
    is_file = not checkpoint.is_dir()
    last = checkpoint if is_file else checkpoint / _METADATA_FILENAME
    try:
        parts = [] if is_file else [checkpoint / ".metadata", *checkpoint.iterdir()]
        written_at = last.stat().st_mtime_ns
        if not last.is_file() or any(part.stat().st_mtime_ns > written_at for part in parts):
            return -1  # one of another kind may be read for ever
        zipfile.ZipFile(last).close()
    except (OSError, zipfile.BadZipFile):
        return -1
    return written_at


def _is_of_numbers(place: object) -> bool:
    return all(map(_is_of_numbers, place.values())) if isinstance(place, dict) else isinstance(place, int)


def _name_below(callback: ModelCheckpoint, path: str) -> str:
    above = os.path.join(callback.dirpath or "", "")
    return path[len(above) :] if above and path.startswith(above) else ""


def _path_below(callback: ModelCheckpoint, name: object) -> str:
    """Return the path of a checkpoint in the callback's directory, empty if it is none: the callback removes what it names."""
    ours, parts = str(callback.dirpath or ""), name.split("/") if isinstance(name, str) else []
    if any(part in ("", ".", "..") or {*":\\\0"} & {*part} for part in parts):
        return ""
    real = os.path.join(os.path.realpath(ours.removeprefix("file://")), *parts)
    leads_elsewhere = _is_local_file_protocol(ours) and os.path.realpath(real) != real
    is_one = ours and parts and parts[-1].endswith(callback.FILE_EXTENSION) and not leads_elsewhere
    return os.path.join(ours, *parts) if is_one else ""


def _renamed(values: dict[str, Any], renamed: Callable[[Any], str], callback: ModelCheckpoint) -> dict[str, Any]:
    """Return the state of a ModelCheckpoint with other paths; where one is empty there is none."""
    scores = {renamed(path): score for path, score in values["best_k_models"].items()}
    scores.pop("", None)
    paths = {key: renamed(values[key]) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
    worst = (max if callback.mode == "min" else min)(scores, key=scores.__getitem__, default="")
    if paths["kth_best_model_path"] not in scores:
        paths |= {"kth_best_model_path": worst, "kth_value": scores.get(worst, values["kth_value"])}
    return {**values, **paths, "best_k_models": scores}


class _ContinuedMetrics(ExperimentWriter):
    """CSVLogger's writer that goes on in the file of the group that spoke before. Lightning's own begins by removing it."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])  # none: that group died before it wrote a line

    def _check_log_dir_exists(self) -> None:
        """Leave what is there."""


def _hyper_parameters(module: Any) -> Iterator[str]:
    """The keys of what a module or datamodule was made with: all groups were given it, and it may be anything."""
    for name in ("NAME", "KEY", "TYPE"):
        with contextlib.suppress(AttributeError):
            yield getattr(module, f"CHECKPOINT_HYPER_PARAMS_{name}")
