"""A script for accelerate in the shape of diffusers' `train_unconditional`, before it is changed: accumulation, clipping, a
schedule, an average of the weights after `zero_grad`, checkpoints, a log. `accelerate_changes` makes a group's of it.

It prints a line each: `READ [numbers]` for each batch that the model trains on, `STEP n digest` for each optimizer step, with a
digest of all that is trained, `SAVED n`. `--wait STEP FILE`: it stands still after that step until the file exists, and then goes
slowly until another group trains with it. `--hold STEP`: it never goes on from its first batch after that step.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from fingerprints import digest, say
from gates import Gates
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler


class Numbered(Dataset):
    """Random samples, each with its number."""

    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index), "input": self.inputs[index]}


class Average:
    """An average of parameters whose decay follows from its own count, as diffusers' `EMAModel`."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.shadow = [parameter.detach().clone() for parameter in parameters]
        self.num_updates = 0

    @torch.no_grad()
    def step(self, parameters: list[torch.nn.Parameter]) -> None:
        self.num_updates += 1
        decay = min(0.99, (1 + self.num_updates) / (10 + self.num_updates))
        for shadow, parameter in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - parameter))

    def state_dict(self) -> dict[str, object]:
        return {"shadow": self.shadow, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict) -> None:
        self.shadow = [shadow.clone() for shadow in state["shadow"]]
        self.num_updates = state["num_updates"]


class EightBit(torch.optim.Optimizer):
    """Momentum in eight bits, and what scales it beside, as in bitsandbytes' optimizers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, scale=torch.zeros(()), state1=torch.zeros_like(parameter, dtype=torch.int8))
                momentum = 0.9 * state["scale"] * state["state1"] + parameter.grad
                state["step"] += 1
                state["scale"] = momentum.abs().max() / 127 + 1e-12
                state["state1"] = (momentum / state["scale"]).round().to(torch.int8)
                parameter -= group["lr"] * momentum

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # it gives all tensors the parameter's dtype
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():
            given = {name: state[name].clone() for name in ("scale", "state1")}
            self.state[parameters[number]] = {"step": state["step"], **given}


def make_optimizers(model: torch.nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "eight-bit":
        return [EightBit(model.parameters(), lr=0.01)]
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    if kind == "two":
        return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(others, lr=0.01, momentum=0.9)]
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


def digest_of(model: torch.nn.Module, optimizers: list[Any], scheduler: Any, average: Average | None = None) -> str:
    states = {"model": model.state_dict(), "average": average and average.state_dict()}
    return digest(**states, optimizers=[one.state_dict() for one in optimizers], lr=scheduler.get_last_lr())


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["input"]) - batch["input"].flip(1)).square().mean()


def num_groups_of(accelerator: Any) -> int:
    """Return how many groups made the last step."""
    return int(accelerator._manager.view().num_participants)


def schedule(step: int) -> float:
    return min(1.0, (step + 1) / 10) / (1 + step / 50)


def options_of() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--fp16", type=int, help="scale losses, at first by this power of two")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--automatic", action="store_true", help="let accelerate name checkpoints")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--subset", action="store_true", help="draw by a sampler that has no generator of its own")
    parser.add_argument("--two-losses", action="store_true", help="go back twice")
    parser.add_argument("--torch-clip", action="store_true", help="clip by torch, of which nothing is told")
    parser.add_argument("--optimizers", default="one", help="one, two or eight-bit")
    parser.add_argument("--dynamo", help="compile by this backend")
    parser.add_argument("--split-batches", action="store_true", help="divide each batch among the groups")
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--name", default=f"group_{os.environ.get('REPLICA_GROUP_ID', 0)}")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--wait", nargs=2, action="append", default=[])
    parser.add_argument("--hold", type=float, default=math.inf)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        cpu=True,
        dynamo_backend=options.dynamo,
        dataloader_config=DataLoaderConfiguration(split_batches=options.split_batches),
        project_config=ProjectConfiguration(
            project_dir=str(options.folder), automatic_checkpoint_naming=options.automatic, total_limit=options.limit
        ),
    )
    if options.fp16:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**options.fp16, growth_interval=5)
    set_seed(options.seed)
    model = make_model()
    ema_model = Average(list(model.parameters()))
    optimizers = make_optimizers(model, options.optimizers)
    sampler = SubsetRandomSampler(range(options.samples)) if options.subset else None
    train_dataloader = DataLoader(
        Numbered(options.samples), batch_size=4, shuffle=sampler is None, sampler=sampler, num_workers=options.workers
    )
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], schedule)
    model, train_dataloader, *optimizers, lr_scheduler = accelerator.prepare(
        model, train_dataloader, *optimizers, lr_scheduler
    )
    if options.fp16:  # accelerate has it on a GPU alone
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / options.accumulate)
    gates, global_step, first_epoch = Gates(options.wait), 0, 0
    if options.resume:
        accelerator.load_state(options.resume)
        global_step = int(options.resume.rpartition("_")[2])
        first_epoch = global_step // num_update_steps_per_epoch
    for _ in range(first_epoch, options.epochs):
        model.train()
        for batch in train_dataloader:
            say(f"READ {batch['number'].tolist()}")
            while global_step >= options.hold:
                time.sleep(1)
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                for part in [loss / 4, 3 * loss / 4] if options.two_losses else [loss]:
                    accelerator.backward(part, retain_graph=options.two_losses)
                if accelerator.sync_gradients:
                    clip = torch.nn.utils.clip_grad_norm_ if options.torch_clip else accelerator.clip_grad_norm_
                    clip(model.parameters(), 0.5)
                for optimizer in optimizers:
                    optimizer.step()
                lr_scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(list(model.parameters()))
                global_step += 1
                trained = accelerator.unwrap_model(model, keep_torch_compile=False)
                say(f"STEP {global_step} {digest_of(trained, optimizers, lr_scheduler, ema_model)}")
                gates.go_on(global_step, num_groups_of(accelerator))
                if accelerator.is_main_process and global_step % options.save_steps == 0:
                    accelerator.save_state(str(options.folder / f"step_{global_step}"))
                    say(f"SAVED {global_step}")
            accelerator.log({"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0]}, step=global_step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), options.folder / "final.pt")
    accelerator.end_training()
    say(f"ENDED {global_step}")


if __name__ == "__main__":
    main(options_of())
