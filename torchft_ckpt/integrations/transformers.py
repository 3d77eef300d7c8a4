"""Replica groups of Hugging Face's `Trainer`, by one of its callbacks.

Each group runs a Trainer of its own, on data of its own. One optimizer step of the Trainer is one step of the job:

    on_step_begin       `start_quorum`, before the first of the batches that are accumulated
    the last backward   the accumulated gradients are averaged over the groups, before the Trainer clips them
    optimizer.step      asks whether the step counts, and steps if it does
    on_optimizer_step   `global_step` becomes that of the job; the Trainer then steps the schedule
    on_step_end         says which group speaks for the job: it alone saves, and its loggers alone log

**Other callbacks find the job's step**, wherever they are in the Trainer's list: this one comes before them when a step begins,
and after them when it ends. They hear of the end of steps that count, and of no other. A state is loaded before they hear that
the first step with it begins. What they have changed in a discarded step goes back, and they hear that the next one begins.

**A discarded step is tried again within the same iteration**, with the same batches: the group's own gradients are averaged
and clipped once more, in another step of the job. A Trainer makes as many iterations as it was set to. One that were let go by
would be missing at the end: `max_steps` not reached, the last checkpoint not written. Position in the data, schedule and logs
then follow from the Trainer's own loop.

**An iteration goes by without a step** only if the group's gradients are not of the state that the job trains from: it has
come back and computes its first iteration, or the others went on without it. It loads that state as the iteration ends. It then
has more iterations than it needs, as the job's steps before it came were not among them. If it has not, it loads at once.

**A group that comes back** begins its data where the job is (`ContinuedSampler`), as the Trainer's loop begins at zero. The job
makes steps while it warms up and receives the state. So it compares the two places after each iteration, and what the loader
has not fetched yet is of the job's place.

**The best checkpoint** is the job's, as far as `metric_for_best_model` says which one that is: it travels with the state. Only
the group that speaks has it in `TrainerState.best_model_checkpoint`. The Trainer deletes other checkpoints than this one at its
end, in each group that has one there.

**With `global_batch_size` steps are exact** (`StepLoader`): a batch of the Trainer's stands for a step, and its `training_step`
runs for each microbatch. It returns when the step counts, with the mean of the losses. So no iteration goes by without a step,
and there is no place in the data. The sums of losses travel with the state: each log is the job's.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, broadcast
from torch.utils.data import BatchSampler, Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, has_length

from torchft_ckpt.core.training.discards import pauses_s
from torchft_ckpt.ddp import BackwardAverage, GradientAverage
from torchft_ckpt.errors import ConfigError, GroupBrokenError
from torchft_ckpt.exact.feeding import feed
from torchft_ckpt.optimizer import OptimizerWrapper

if TYPE_CHECKING:
    from torchft_ckpt.exact import Step, StepLoader
    from torchft_ckpt.manager import Manager

logger = logging.getLogger(__name__)

KEY = "transformers"
"""Names the Trainer's state among all that is registered with the Manager."""
_GEOMETRY = "torchft_ckpt"
"""Names in a checkpoint of the Trainer's what says which samples are in a step."""
_REFUSED: dict[str, str] = {
    "auto_find_batch_size": "it begins the training anew in the middle of the job",
    "load_best_model_at_end": "only the group that speaks for the job has the best one; load it after train()",
    "enable_jit_checkpoint": "all groups would write one checkpoint",
}
"""Arguments of the Trainer that cannot be used, and why."""
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
"""Of the Trainer: its sum of losses until the last log, when that was, and where it began."""
_FIRST = ("on_train_begin", "on_step_begin", "on_optimizer_step", "on_log")
"""Of these events this callback hears before all others, of those that are not here after them."""
_OF_COUNTED_STEPS = ("on_optimizer_step", "on_step_end")


class FaultToleranceCallback(TrainerCallback):
    """Makes a `Trainer` one replica group of a job.

    Pass it as one of the Trainer's `callbacks`, and neither a wrapped model nor a wrapped optimizer. It registers the state of
    model, optimizer and schedule with the manager, and the `ref_model` of callbacks that have one, as TRL's do. All groups have
    the same arguments, and data sets of one size.
    `train()` raises `JobFinishedError` in a group that comes when the others have made the last step. At its end it calls
    `Manager.finish`. It serves one `train()`.

    One group speaks for the job: it alone writes checkpoints. `TrainerState.is_world_process_zero` is False in the others
    from the end of the first step on, so what looks at that, as progress bars do, is silent there.

    Args:
        manager: of this rank. It has no state functions of its own for what the Trainer trains.
        loggers: callbacks that write where all groups would write, as TensorBoard's and W&B's do. Rank 0's hear of steps, logs,
            evaluations and saves while their group speaks, and of `on_train_begin` before. Leave them out of `report_to`.
        global_batch_size: samples in a step, whoever is there: steps are exact, as with `StepLoader`. All groups have the same
            data set. A microbatch is `per_device_train_batch_size` samples. A data set without access by index trains as without
            this, and a warning says so.

    Raises:
        ConfigError: an argument of the Trainer's would leave the groups apart; the message says why.
        GroupBrokenError: from `train()`: the loop has ended before the job's last step; start the group again.
        Also, from `train()`, as `Manager.start_quorum` and `Manager.should_commit`.
    """

    def __init__(
        self, manager: Manager, loggers: Sequence[TrainerCallback] = (), *, global_batch_size: int | None = None
    ) -> None:
        self._manager = manager
        self._global_batch_size = global_batch_size
        self._steps: StepLoader | None = None
        """None: steps are not exact."""
        self._step: Step | None = None
        self._loggers = list(loggers)
        self._loggers_began = False
        self._average: GradientAverage | None = None
        self._clips: Callable[[], object] = lambda: None
        self._trainer: Any = None
        self._tell_of_begin: Callable[[], None] = lambda: None
        self._is_open = self._is_committed = False
        """Of the step that an iteration is for: its gradients are computed, or will be; it counted."""
        self._num_loaded = 0
        """States that were loaded before the iteration, or as it began."""
        self._loss_before: torch.Tensor | None = None
        """The Trainer's sum of losses, before the iteration; None: it keeps it where nobody can have it."""
        self._speaks = False
        self._updates_per_epoch: int | None = None
        self._resumed_at = 0
        self._num_iterations = 0
        self._sampler: ContinuedSampler | None = None
        self._read_until: Callable[[int], int] = lambda update: 0
        self._num_moved = 0
        """Updates that the order of the data was moved by, so that it is where the job is."""
        self._is_save_due = False
        self._resumed_best: str | None = None
        self._best_saved: int | None = None
        """The step of the best checkpoint: the last one that was saved when it was the best."""
        self._logged_at = 0
        """The step of the last log of the loss."""
        self._num_unlogged = self._num_summed = 0
        """Of how many iterations the Trainer has summed the loss since then, and in all."""

    @property
    def speaks(self) -> bool:
        """Whether this group speaks for the job, as of the last step that ended: what all groups would write, it writes."""
        return self._speaks

    # ------------------------------------------------------------------------------------------------ training begins

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse what would leave the groups apart."""
        _refuse(args)
        self._stand_around_others()
        if self._global_batch_size is not None:
            self._feed_by_steps(args, self._global_batch_size)

    def _feed_by_steps(self, args: TrainingArguments, global_batch_size: int) -> None:
        if args.world_size != 1:
            raise ConfigError(
                f"global_batch_size in a group of {args.world_size} processes, which add in an order that changes: make each"
                " process a group",
                party="world_size",
            )
        trainer, make = self._trainer, self._trainer.get_train_dataloader
        seed, accumulates = args.seed if args.data_seed is None else args.data_seed, args.gradient_accumulation_steps

        def get_train_dataloader() -> Any:
            shuffles = SeedableRandomSampler
            self._steps, loader = feed(
                self._manager, make(), global_batch_size, seed=seed, accumulates=accumulates, shuffles=shuffles
            )
            return loader

        trainer.get_train_dataloader = functools.cache(get_train_dataloader)

    def _stand_around_others(self) -> None:
        """Hear of each event before the other callbacks, or after them; let those hear of no step that does not count."""
        if self._trainer is not None:
            return
        self._trainer = _calling_trainer()
        handler = self._trainer.callback_handler
        call = handler.call_event

        def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            others = self._others()
            handler.callbacks = [self, *others] if event in _FIRST else [*others, self]
            if event == "on_step_end" and self._updates_per_epoch is not None:
                state.epoch = state.global_step / self._updates_per_epoch
            if event in _OF_COUNTED_STEPS and not self._is_committed:
                return getattr(self, event)(args, state, control, **kwargs) or control
            return call(event, args, state, control, **kwargs)

        handler.call_event = call_event

    def _others(self) -> list[Any]:
        return [callback for callback in self._trainer.callback_handler.callbacks if callback is not self]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the state, take the optimizer's step over, and go to where the job is in the data."""
        model, optimizer, scheduler = kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"]
        loader = kwargs["train_dataloader"]
        self._take_over(args, model, optimizer)
        accumulation = args.gradient_accumulation_steps
        num_batches = len(loader) if has_length(loader) else None
        self._updates_per_epoch = None if num_batches is None else max(1, math.ceil(num_batches / accumulation))
        fixed = {"max_steps": state.max_steps, "steps_per_epoch": self._updates_per_epoch}
        trainer = self._trainer
        references = [
            one.ref_model for one in self._others() if isinstance(getattr(one, "ref_model", None), torch.nn.Module)
        ]

        def state_dict() -> dict[str, Any]:
            return {
                "model": model.state_dict(),
                "optimizer": optimizer.optimizer.state_dict(),
                "lr_scheduler": scheduler.state_dict(),
                "trainer": dict(fixed),
                "best": self._best_to_carry(state),
                "references": [reference.state_dict() for reference in references],
                "losses": self._losses(),
            }

        def load_state_dict(loaded: dict[str, Any]) -> None:
            if loaded["trainer"] != fixed:
                raise ConfigError(
                    f"the groups train for different lengths: this one has {fixed}, another one {loaded['trainer']}. Give all of"
                    " them the same arguments, and data sets of the same size",
                    party="train_dataset",
                )
            model.load_state_dict(loaded["model"])
            optimizer.optimizer.load_state_dict(loaded["optimizer"])
            scheduler.load_state_dict(loaded["lr_scheduler"])
            self._take_best(loaded["best"], state)
            self._take_losses(loaded["losses"])
            for reference, values in zip(references, loaded["references"], strict=True):
                reference.load_state_dict(values)
            if hasattr(trainer, "_buffered_inputs"):
                trainer._buffered_inputs = None  # what TRL generated with the weights that were here

        self._resumed_best, state.best_model_checkpoint = state.best_model_checkpoint, None
        self._best_saved = _step_of(self._resumed_best)
        self._manager.register_state_dict_fn(KEY, load_state_dict, state_dict)
        resumed_at = self._resumed_at = self._logged_at = state.global_step
        if resumed_at and not self._manager.current_step():
            saved = state.stateful_callbacks.get(_GEOMETRY, {})
            self._manager.load_state_dict({"step": resumed_at, "batches_committed": 0, **saved})
        if self._steps is None:
            self._take_over_data(loader, accumulation)
            self._follow_job(max(self._manager.newest_step_of_peers() or 0, self._manager.current_step()))
        else:
            state.stateful_callbacks[_GEOMETRY] = self._steps.geometry()  # it goes with the Trainer's checkpoints
            trainer.training_step = functools.partial(self._training_step, trainer.training_step)

    def _take_over(self, args: TrainingArguments, model: torch.nn.Module, optimizer: Any) -> None:
        _refuse(args)  # who adds a callback later is not called at the end of __init__
        self._stand_around_others()
        if self._global_batch_size is not None and "get_train_dataloader" not in vars(self._trainer):
            raise ConfigError("with global_batch_size the Trainer is made with the callback", party="callbacks")
        if self._average is not None:
            raise ConfigError("a FaultToleranceCallback serves one train(); make a Manager and a Trainer for another")
        kind = AcceleratorState().distributed_type
        if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise ConfigError(f"FaultToleranceCallback does not know how to train with {kind.value}", party=kind.value)
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise ConfigError(
                f"the Trainer's optimizer is a {type(optimizer).__name__}, not accelerate's", party="optimizer"
            )
        inner = optimizer.optimizer
        if isinstance(inner, OptimizerWrapper):
            raise ConfigError("pass the Trainer the optimizer itself, not torchft_ckpt.Optimizer", party="optimizers")
        if (ranks := self._manager.group_world_size) != args.world_size:
            raise ConfigError(
                f"the group has {ranks} ranks, and the Trainer works with {args.world_size} processes: all would train on the"
                " same data. On CPUs TrainingArguments(use_cpu=True) makes the Trainer one of torchrun's processes",
                party="world_size",
            )
        if optimizer.scaler is not None:
            raise ConfigError("fp16 scales the gradients of each group by a factor of its own; use bf16", party="fp16")
        self._average = GradientAverage(self._manager, model.parameters)
        gradients = optimizer.gradient_state
        backward = BackwardAverage(
            model, self._average.take, is_wanted=lambda: self._is_open and gradients.sync_gradients
        )

        @torch.compiler.disable
        def watch(module: torch.nn.Module, inputs: object, output: object) -> None:
            if self._is_open and module.training and torch.is_grad_enabled():
                backward.watch(output)

        model.register_forward_hook(watch)
        if args.max_grad_norm > 0:
            self._clips = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        self._manager.guard_optimizer(inner)
        steps = inner.step

        def step(closure: object = None) -> None:
            if closure is not None:
                raise ConfigError("optimizers that use closures are not supported", party="closure")
            with self._manager.taking_step():
                self._is_committed = self._steps is not None or self._vote()
                # The Trainer does not step its schedule then.
                optimizer._is_overflow = not self._is_committed
                if self._is_committed:
                    steps()

        inner.step = step

    def _take_over_data(self, loader: Any, accumulation: int) -> None:
        """Make `_follow_job` able to move the order of the data, where that has a sampler with a length."""
        batch_sampler = getattr(loader, "batch_sampler", None)
        batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
        sampler: Any = getattr(batch_sampler, "sampler", None)
        if type(batch_sampler) is not BatchSampler or not has_length(sampler) or self._updates_per_epoch is None:
            return
        num_samples, per_epoch = len(sampler), self._updates_per_epoch

        def read_until(update: int) -> int:
            epochs, updates = divmod(update, per_epoch)
            return epochs * num_samples + min(updates * accumulation * loader.total_batch_size, num_samples)

        self._read_until, self._sampler = read_until, ContinuedSampler(sampler)
        loader.set_sampler(self._sampler)

    def _place_in_data(self) -> int:
        """Return which update of the job the next iteration has the data of."""
        return self._resumed_at + self._num_iterations + self._num_moved

    def _follow_job(self, step: int) -> None:
        """Let what the loader fetches from now on be what the job reads at `step`."""
        if self._steps is not None or step == self._place_in_data():
            return
        name, begun = self._manager.replica_id(), self._resumed_at + self._num_iterations
        self._num_moved = step - begun
        if self._sampler is None:
            logger.warning(
                "%s: the job is at step %d, and the order of the data begins anew: the data set has no sampler that could go on",
                name,
                step,
            )
            return
        self._sampler.num_passed = passed = self._read_until(step) - self._read_until(begun)
        logger.info("%s goes on %d samples further in the data, at step %d", name, passed, step)

    # ----------------------------------------------------------------------------------------------- checkpoints

    def resume_from(self, output_dir: str | os.PathLike[str]) -> str | None:
        """Return the checkpoint to give `train(resume_from_checkpoint=...)`, the same in all ranks of the group.

        None if another group holds a state of the job: the state comes from there. Otherwise the newest checkpoint in
        `output_dir` that is complete, or None. One in whose save the Trainer was killed is not complete. If the lighthouse
        does not answer within the manager's `connect_timeout` it is as if there were no other group: the state of those that
        there are wins later.

        All ranks of the group call it, on the training thread, after the Trainer was made and before `train()`.

        Raises:
            GroupBrokenError, RefusedError: this group cannot go on.
        """
        is_joining = self._manager.newest_step_of_peers() is not None
        found = {} if is_joining else {_step_of(path): str(path) for path in Path(output_dir).glob("checkpoint-*")}
        complete = [step for step, path in found.items() if step is not None and _is_complete(path)]
        # The ranks may have looked at different moments.
        chosen = torch.tensor([max(complete, default=-1)], device=PartialState().device)
        step = int(broadcast(chosen).item())
        if step < 0:
            return None
        path = os.path.join(output_dir, f"checkpoint-{step}")
        logger.info("resumes from %s, if no other group holds a newer state", path)
        return path

    def _best_to_carry(self, state: TrainerState) -> torch.Tensor:
        """Return metric, step and saved step of the best. As a tensor, which no optimizer owns, it may differ between groups."""
        best = (state.best_metric, state.best_global_step, self._best_saved)
        return torch.tensor([math.nan if value is None else value for value in best], dtype=torch.float64, device="cpu")

    def _take_best(self, carried: torch.Tensor, state: TrainerState) -> None:
        metric, *steps = carried.tolist()
        state.best_metric = None if math.isnan(metric) else metric
        state.best_global_step, self._best_saved = (int(step) if 0 <= step < 2**53 else None for step in steps)

    def _best_checkpoint(self, args: TrainingArguments) -> str | None:
        """Return where the best checkpoint is; None: there is none, or it is not there any more."""
        if self._best_saved is None:
            return None
        paths = [self._resumed_best, os.path.join(str(args.output_dir), f"checkpoint-{self._best_saved}")]
        there = (path for path in paths if path and _step_of(path) == self._best_saved and os.path.isdir(path))
        return next(there, None)

    # ------------------------------------------------------------------------------------------------------- one step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin a step of the job in which an iteration of the Trainer's is worth its while."""
        manager = self._manager
        if self._is_save_due and state.best_global_step == state.global_step:
            self._best_saved = state.global_step
        self._is_save_due = False
        self._begin()
        while self._steps is None and manager.is_warming_up() and not self._has_iterations_to_spare():
            manager.should_commit()  # nothing is computed, so the state is loaded here, at the end of no iteration
            manager.start_quorum()
        self._is_open, self._num_loaded = self._steps is None, self._count_loads()
        losses = getattr(self._trainer, "_tr_loss", None)
        self._loss_before = None if losses is None else losses.clone()
        state.global_step = manager.quorum_step() if manager.is_warming_up() else manager.current_step()

        def tell_of_begin() -> None:
            for one in self._others():
                one.on_step_begin(args, state, control, **kwargs)

        self._tell_of_begin = tell_of_begin

    def _begin(self) -> None:
        """Begin a step. What other callbacks change from now on goes back if it is discarded."""
        if self._steps is None:
            self._manager.start_quorum()
        else:
            self._manager.hooks.begin_microbatches()
            self._step = next(iter(self._steps))

    def _training_step(
        self, compute: Callable[..., torch.Tensor], model: torch.nn.Module, inputs: Any, _: object = None
    ) -> torch.Tensor:
        """Compute microbatches, by the Trainer's `training_step`, until a step counts; return the mean of their losses.

        A loss that is divided by a number of tokens is divided by that of the microbatch, which weighs as much.
        """
        trainer, pauses = self._trainer, pauses_s()
        while True:
            assert self._step is not None
            for batch in self._step:
                _, num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
                if num_items is not None:
                    self._step.weigh(float(num_items))
                    num_items = max(num_items, 1)
                self._step.log(loss=compute(model, batch, num_items))
                inputs.update(batch if isinstance(batch, Mapping) else {})  # the Trainer counts what is in it
            if self._manager.should_commit():
                return torch.tensor(self._step.means["loss"], device=trainer.args.device)
            time.sleep(next(pauses))  # where groups are missing
            self._begin()
            trainer.state.global_step = self._step.number
            self._tell_of_begin()

    def _losses(self) -> torch.Tensor:
        """Return what the Trainer has summed of losses, and since when, for who comes in; nothing if it hides it."""
        found = [getattr(self._trainer, name, None) for name in ("_tr_loss", *_SUMS)]
        kept = [] if self._steps is None else [float(one) for one in found if one is not None]
        return torch.tensor(kept if len(kept) == len(found) else [], dtype=torch.float64, device="cpu")

    def _take_losses(self, losses: torch.Tensor) -> None:
        if len(losses):
            since_log, total, *steps = losses.tolist()
            self._trainer._tr_loss.fill_(since_log)
            vars(self._trainer).update(zip(_SUMS, (total, *map(int, steps)), strict=True))

    def _has_iterations_to_spare(self) -> bool:
        """Whether the Trainer's loop reaches the job's last step also if this iteration goes by without a step."""
        return self._manager.quorum_step() > self._resumed_at + self._num_iterations

    def _try_again(self) -> None:
        self._tell_of_begin()
        if self._average is not None:
            self._average.again()
        self._clips()

    def _vote(self) -> bool:
        """Return whether the iteration's gradients count, in this step of the job or in one after it.

        False: they are not of the state that is here, or not of the newest one. A step that is open then goes on in the next
        iteration.
        """
        manager, pauses = self._manager, pauses_s()
        self._is_open = False
        try:
            while not manager.should_commit():
                if manager.is_behind or self._count_loads() != self._num_loaded:
                    return False
                time.sleep(next(pauses))  # where groups are missing
                manager.start_quorum()
                if self._count_loads() != self._num_loaded:
                    return False
                self._try_again()
            return True
        finally:
            if self._average is not None:
                self._average.forget()

    def _count_loads(self) -> int:
        counts = self._manager.statistics()
        return counts.num_healed + counts.num_corrected

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the job's step; the Trainer adds one to it. Say who speaks, as others may write at the end of the step."""
        state.global_step = self._manager.current_step() - 1
        self._speaks = speaks = self._is_committed and self._manager.speaks
        state.is_world_process_zero = args.process_index == 0 and speaks
        state.is_local_process_zero = args.local_process_index == 0 and speaks
        state.best_model_checkpoint = self._best_checkpoint(args) if speaks else None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Say whether what is due is this group's to do."""
        per_epoch = self._updates_per_epoch
        if per_epoch is not None and self._is_committed and state.global_step % per_epoch == 0:
            DefaultFlowCallback().on_epoch_end(args, state, control)
        if self._is_committed or self._loss_before is None:
            self._num_unlogged += 1
            self._num_summed += 1
        else:
            self._trainer._tr_loss = self._loss_before
        if not self._is_committed:
            control.should_log = control.should_evaluate = control.should_save = False
        self._is_save_due = control.should_save
        control.should_save = control.should_save and self._speaks
        self._num_iterations += 1
        if self._is_committed or not self._manager.is_behind:  # else `global_step` is not the job's
            self._follow_job(state.global_step)
        self._tell("on_step_end", args, state, control, **kwargs)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The Trainer's loop ends an epoch, which for a group that came back is not the job's: see `on_step_end` for that."""
        if self._updates_per_epoch is not None:
            control.should_log = control.should_log and args.logging_strategy != IntervalStrategy.EPOCH
            control.should_evaluate = control.should_evaluate and args.eval_strategy != IntervalStrategy.EPOCH
            control.should_save = control.should_save and args.save_strategy != SaveStrategy.EPOCH
        self._is_save_due = self._is_save_due or control.should_save
        control.should_save = control.should_save and self.speaks
        return control

    # ------------------------------------------------------------------------------------------ what loggers hear of

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Correct the losses, and tell the loggers.

        The Trainer divides the sum of this group's losses by the job's steps, of which it may have made a part.
        """
        logs = kwargs["logs"]
        if not len(self._losses()):
            self._correct("loss", logs, state, state.global_step - self._logged_at, self._num_unlogged)
            self._correct("train_loss", logs, state, state.global_step, self._num_summed)
        if "loss" in logs:
            self._logged_at, self._num_unlogged = state.global_step, 0
        self._tell("on_log", args, state, control, **kwargs)

    @staticmethod
    def _correct(name: str, logs: dict[str, Any], state: TrainerState, num_steps: int, num_iterations: int) -> None:
        if name in logs and num_iterations not in (0, num_steps):
            logs[name] = state.log_history[-1][name] = logs[name] * num_steps / num_iterations

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the loggers."""
        self._tell("on_evaluate", args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the loggers."""
        self._tell("on_save", args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the loggers, and the job that this group has made its last step."""
        self._tell("on_train_end", args, state, control, **kwargs)
        if state.global_step < state.max_steps and not control.should_training_stop:
            name, step = self._manager.replica_id(), state.global_step
            raise GroupBrokenError(
                f"{name} is at step {step} of {state.max_steps}, and the Trainer has made all its iterations: some went by"
                " without a step. Start this group again: it goes on where the job is",
                name,
            )
        self._manager.finish()

    def _tell(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.speaks or not state.is_world_process_zero:
            return
        for told in self._loggers:
            if not self._loggers_began:
                kept = {name: value for name, value in kwargs.items() if name not in ("logs", "metrics")}
                told.on_train_begin(args, state, control, **kept)
            getattr(told, event)(args, state, control, **kwargs)
        self._loggers_began = True


def _calling_trainer() -> Trainer:
    """Return the Trainer that calls, as it tells no callback who it is."""
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise ConfigError("nobody but a Trainer of transformers calls a FaultToleranceCallback", party="callbacks")


def _refuse(args: TrainingArguments) -> None:
    for name, why in _REFUSED.items():
        if getattr(args, name, False):
            raise ConfigError(f"FaultToleranceCallback does not go with {name}: {why}", party=name)
    if args.save_strategy == SaveStrategy.BEST:
        raise ConfigError(
            "FaultToleranceCallback does not go with save_strategy='best': all groups would write one checkpoint",
            party="save_strategy",
        )
    loggers = [name for name in args.report_to or () if name != "kubeflow"]  # that one reports of its own process
    if loggers:
        raise ConfigError(
            f"report_to={loggers}: all groups would write to one place; set report_to='none' and pass the callbacks of"
            " these loggers as FaultToleranceCallback(manager, loggers=[...])",
            party="report_to",
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would divide batches over {args.n_gpu} GPUs by DataParallel; start a process for each by torchrun",
            party="n_gpu",
        )


def _step_of(checkpoint: str | os.PathLike[str] | None) -> int | None:
    """Return the step in the name of a checkpoint's folder, as the Trainer writes it; None: it has none."""
    name = "" if checkpoint is None else Path(checkpoint).name
    found = re.fullmatch(r"checkpoint-(0|[1-9][0-9]{0,17})", name)
    return int(found[1]) if found else None


def _is_complete(checkpoint: str) -> bool:
    """Whether the Trainer has written all of a checkpoint: its own state comes last."""
    path = Path(checkpoint, "trainer_state.json")
    try:
        if not path.is_file():  # one of another kind may be read for ever
            return False
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return True


class ContinuedSampler(Sampler[int]):
    """A sampler whose order begins so many samples later, and goes over from each epoch to the next as before.

    What reads it for an epoch gets as many samples as before: the rest of one epoch, and the beginning of the next.
    `num_passed` may be changed while it is read: it counts from the next sample on.

    Args:
        sampler: with a length, and `set_epoch` where its epochs have different orders.
        num_passed: samples, over all epochs.
    """

    def __init__(self, sampler: Any, num_passed: int = 0) -> None:
        self._sampler = sampler
        self.num_passed = num_passed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is read next, counted from where this one began."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        length = len(self)
        begin, num_read = self.epoch * length, 0
        while num_read < length:
            num_before, num_passed = num_read, self.num_passed
            epoch, first = divmod(begin + num_read + num_passed, length)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            # To its end where it can be: some samplers do something there.
            end = None if num_read <= first else first + length - num_read
            for sample in itertools.islice(self._sampler, first, end):
                yield sample
                num_read += 1
                if self.num_passed != num_passed:
                    break
            if num_read == num_before:  # it has less than its length
                return
