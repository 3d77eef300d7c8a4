"""A replica group of Hugging Face's Trainer with all switched on: accumulation, clipping, evaluation, checkpoints, loggers.

It prints what happens, a line each: `READ [ids]` for each batch that the model trains on, `EVALUATED step`; its logger appends
to one file of all groups. `--wait STEP FILE`, more than once: it stands still after that step until the file exists. `--meet`:
the same, and it goes slowly from there until all groups train. With one of these its steps take a while. `--hold STEP`: it never
takes the step after that one. `--warm-up FILE`: its first iteration takes until the file exists. `--resumes`: it asks what to
resume from, and prints `RESUMES path`. `--as-trl`: it has a reference model that a callback moves, and rollouts, which it prints
at its end (`ROLLOUTS ...`). `--exact`: steps of the whole data set, whoever is there; with `--hold` it says `HELD`, and ends no
microbatch of that step or a later one.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fingerprints import print_state, say
from gates import Gates
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from torchft_ckpt import Manager, ProcessGroupGloo
from torchft_ckpt.integrations.transformers import FaultToleranceCallback

LENGTH, BATCH = 8, 4


class Numbered(Dataset):
    """Random texts whose first token is their number."""

    def __init__(self, first: int, count: int) -> None:
        self.texts = torch.randint(0, 64, (count, LENGTH), generator=torch.Generator().manual_seed(first))
        self.texts[:, 0] = torch.arange(count) + first

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


class Recorder(TrainerCallback):
    """Says what the Trainer does, and waits where it was told to."""

    def __init__(self, manager: Manager, options: argparse.Namespace) -> None:
        self._manager = manager
        self._gates, self._is_slow = Gates(options.meet, options.wait), bool(options.meet or options.wait)
        self._warm_up, self._hold = options.warm_up, options.hold

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while state.global_step >= self._hold:
            time.sleep(1)
        while self._warm_up is not None and not self._warm_up.exists():
            time.sleep(0.05)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(f"EVALUATED {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._manager.last_step_counted():
            self._gates.go_on(self._manager.current_step(), self._manager.view().num_participants)
        if self._is_slow:
            time.sleep(0.2)


class Logger(TrainerCallback):
    """Writes where all groups would write."""

    def __init__(self, group: int, path: Path) -> None:
        self._group, self._path = group, path

    def _write(self, event: str, step: int, loss: float | None = None) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "group": self._group, "step": step, "loss": loss}) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write("begin", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self._write("log", state.global_step, logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write("save", state.global_step)


class Averages(TrainerCallback):
    """Keeps an average whose decay follows from the step that it reads, and a copy of the weights of every third step.

    It counts steps that begin, so that one which does not count would leave a trace.
    """

    def __init__(self, manager: Manager, model: torch.nn.Module) -> None:
        self.average, self.copied = ([p.detach().clone() for p in model.parameters()] for _ in range(2))
        self.num_begun = 0
        manager.register_state_dict_fn("averages", self.load_state_dict, self.state_dict)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "copied": self.copied, "num_begun": self.num_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.copied, self.num_begun = state["average"], state["copied"], state["num_begun"]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.num_begun += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.global_step == self.step + 1
        weights = [parameter.detach() for parameter in kwargs["model"].parameters()]
        for average, weight in zip(self.average, weights, strict=True):
            average.lerp_(weight, 9 / (10 + self.step))
        if self.step % 3 == 0:
            self.copied = [weight.clone() for weight in weights]


class SyncsReference(TrainerCallback):
    """Moves a reference model after the weights at each second step, as TRL's `SyncRefModelCallback` does."""

    def __init__(self, ref_model: torch.nn.Module) -> None:
        self.ref_model = ref_model

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2 == 0:
            for copied, parameter in zip(self.ref_model.parameters(), kwargs["model"].parameters(), strict=True):
                copied.mul_(0.4).add_(0.6 * parameter)


def note_what_is_read(model: torch.nn.Module, holds: Callable[[], bool]) -> None:
    def note(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not module.training:
            return
        say(f"READ {named['input_ids'][:, 0].tolist()}")
        if holds():
            say("HELD")
        while holds():
            time.sleep(1)

    model.register_forward_pre_hook(note, with_kwargs=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=34, help="of each group")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--resumes", action="store_true")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--limit", type=int, help="keep so many checkpoints")
    parser.add_argument("--greater-is-better", action="store_true", help="take the largest loss for the best")
    parser.add_argument("--warm-up", type=Path)
    parser.add_argument("--wait", nargs=2, action="append", default=[])
    parser.add_argument("--meet", nargs=2, action="append", default=[])
    parser.add_argument("--hold", type=float, default=math.inf)
    parser.add_argument("--averages", choices=["before", "after"], help="in the list of callbacks, than the library's")
    parser.add_argument("--as-trl", action="store_true")
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    group = int(os.environ["REPLICA_GROUP_ID"])
    manager = Manager(
        ProcessGroupGloo(), None, None, min_replica_size=options.min_replicas, replica_id=f"group_{group}"
    )
    torch.manual_seed(0 if options.exact else group)  # else weights differ until the groups are made equal
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            attention_dropout=0.2,
        )
    )
    note_what_is_read(model, lambda: options.exact and manager.current_step() >= options.hold)
    fault_tolerance = FaultToleranceCallback(
        manager,
        loggers=[Logger(group, options.folder / "log.jsonl")],
        global_batch_size=4 * BATCH if options.exact else None,
    )
    averages = [Averages(manager, model)] if options.averages else []
    reference = copy.deepcopy(model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.folder / "checkpoints"),
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=1 if options.exact else 2,
            dataloader_num_workers=1 if options.exact else 0,
            max_grad_norm=0.1,
            learning_rate=1e-2,
            lr_scheduler_type=options.schedule,
            eval_strategy="epoch",
            metric_for_best_model="eval_loss",
            greater_is_better=options.greater_is_better,
            logging_steps=4,
            save_steps=options.save_steps,
            save_total_limit=options.limit,
            disable_tqdm=False,
            report_to="none",
            use_cpu=True,
            seed=7,
        ),
        train_dataset=Numbered(0 if options.exact else 100 * group, options.samples),
        eval_dataset=Numbered(200, 8),
        callbacks=[
            Recorder(manager, options),
            *(averages if options.averages == "before" else []),
            fault_tolerance,
            *(averages if options.averages == "after" else []),
        ],
    )
    if options.as_trl:
        trainer.add_callback(SyncsReference(reference))  # TRL adds its own when the user's are there
        trainer._buffered_inputs = ["rollouts of the weights that are here"]
    resume = options.resume
    if options.resumes:
        resume = fault_tolerance.resume_from(options.folder / "checkpoints")
        say(f"RESUMES {resume}")
    trainer.train(resume_from_checkpoint=resume)
    if fault_tolerance.speaks:
        trainer.save_model(str(options.folder / f"saved by {group}"))
    print_state(
        step=manager.current_step(),
        model=trainer.model.state_dict(),
        optimizer=trainer.optimizer.state_dict(),
        lr_scheduler=trainer.lr_scheduler.state_dict(),
        averages={} if not averages else averages[0].state_dict(),
        reference=reference.state_dict() if options.as_trl else {},
        trainer={
            name: getattr(trainer.state, name) for name in ("global_step", "epoch", "best_metric", "best_global_step")
        }
        | ({"train_loss": trainer.state.log_history[-1]["train_loss"]} if options.exact else {}),
    )
    say(f"ROLLOUTS {getattr(trainer, '_buffered_inputs', None)}")
    manager.shutdown()


if __name__ == "__main__":
    main()
