"""torchtune's recipe `full_finetune_single_device` in replica groups that may die and come back.

    pip install ".[torchtune]"
    python -m torchft_ckpt run --groups 2 -- examples/train_torchtune.py --epochs 20 --pause 0.2

It trains a tiny Llama 2 from scratch on questions and answers that are made on the spot, and downloads nothing. Your own
configuration goes in place of `make_config`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import runpy
import time
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune import training, utils

from torchft_ckpt import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.errors import JobFinishedError

RECIPE = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"  # or what `tune cp` wrote
Recipe = runpy.run_path(str(RECIPE))["FullFinetuneRecipeSingleDevice"]


class Questions(Dataset):
    """Item i asks in JSON for a sum, and answers. Only the answer is trained on, and its length differs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return 144

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        first, second = index * 37 % 101, index * 53 % 1009
        question = self._tokenizer.encode(f'{{"sum": [{first}, {second}], "is": ')
        answer = self._tokenizer.encode(f"{first + second}{' and so on' * (index % 5)}}}")
        return {"tokens": question + answer, "labels": [-100] * len(question) + answer}


class Tokenizer:
    """Bytes."""

    pad_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Checkpointer:
    """Begins with random weights or the newest file that one can go on from, and writes a file for each epoch."""

    def __init__(self, output_dir: str, model_type: str, should_load_recipe_state: bool) -> None:
        self._folder, self._resumes = Path(output_dir), should_load_recipe_state

    def load_checkpoint(self) -> dict[str, Any]:
        for path in sorted(self._folder.glob("epoch_*.pt"), reverse=True) if self._resumes else ():
            state = torch.load(path)
            if training.OPT_KEY in state:
                return state
        return {training.MODEL_KEY: torchtune.config.instantiate(make_config(0, ".").model).state_dict()}

    def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, intermediate_checkpoint: bool) -> None:
        torch.save(state_dict, self._folder / "unfinished")
        os.replace(self._folder / "unfinished", self._folder / f"epoch_{epoch:06d}.pt")


def make_config(num_epochs: int, folder: str, resumes: bool = False) -> DictConfig:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tiny = {"vocab_size": 257, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "embed_dim": 64, "max_seq_len": 128}
    config = {
        "output_dir": folder,
        "device": device,
        "dtype": "fp32",
        "seed": 42,
        "epochs": num_epochs,
        "max_steps_per_epoch": None,
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "clip_grad_norm": 1.0,
        "shuffle": True,
        "compile": False,
        "optimizer_in_bwd": False,
        "resume_from_checkpoint": resumes,
        "model": {"_component_": "torchtune.models.llama2.llama2", **tiny},
        "tokenizer": {"_component_": "train_torchtune.Tokenizer"},
        "dataset": {"_component_": "train_torchtune.Questions"},
        "checkpointer": {
            "_component_": "train_torchtune.Checkpointer",
            "output_dir": folder,
            "model_type": "LLAMA2",
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-3},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 5,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
    }
    return OmegaConf.create(config)


class GroupRecipe(Recipe):
    """The recipe, in one of several replica groups."""

    def __init__(self, cfg: DictConfig, group: int, num_groups: int, pause_s: float = 0.0) -> None:
        super().__init__(cfg)
        self._group, self._num_groups, self._pause_s = group, num_groups, pause_s
        self._manager = Manager(
            pg=ProcessGroupNCCL() if self._device.type == "cuda" else ProcessGroupGloo(),
            load_state_dict=None,  # registered in `setup`
            state_dict=None,
            min_replica_size=1,
            replica_id=f"group_{group}",
        )

    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        if self.global_step:  # it was resumed
            self._manager.load_state_dict({"step": self.global_step, "batches_committed": 0})
        for name, part in {"model": self._model, "optimizer": self._optimizer}.items():
            self._manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
        self._lr_scheduler = self._manager.scheduler(self._lr_scheduler)
        self._optimizer = Optimizer(self._manager, self._optimizer)
        self._model = DistributedDataParallel(self._manager, self._model)

    def _setup_data(self, cfg_dataset: DictConfig, shuffle: bool, batch_size: int, **others: Any) -> StatefulDataLoader:
        others["dataloader_state_dict"] = None  # a checkpoint is of the end of an epoch
        loader = super()._setup_data(cfg_dataset, shuffle, batch_size, **others)
        data, collate_fn = loader.dataset, loader.collate_fn
        place = {"num_replicas": self._num_groups, "rank": self._group}  # was: 1 and 0
        sampler = StatefulDistributedSampler(data, **place, shuffle=shuffle, seed=0)
        return StatefulDataLoader(data, batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=True)

    def save_checkpoint(self, epoch: int) -> None:
        if self._manager.speaks:
            ddp, self._model = self._model, self._model.module  # else all names begin with "module."
            super().save_checkpoint(epoch)
            self._model = ddp

    def train(self) -> None:
        manager = self._manager
        while (global_step := manager.current_step()) < self.total_epochs * self._steps_per_epoch:
            epoch = global_step // self._steps_per_epoch
            self._dataloader.sampler.set_epoch(epoch)
            self._optimizer.zero_grad(set_to_none=True)
            num_tokens, running_loss = torch.zeros((), device=self._device), 0.0
            for idx, batch in enumerate(self._dataloader):
                is_last = (idx + 1) % self._gradient_accumulation_steps == 0
                utils.batch_to_device(batch, self._device)
                current_num_tokens = (batch["labels"] != self._loss_fn.ignore_index).sum()
                num_tokens += current_num_tokens
                with contextlib.nullcontext() if is_last else self._model.no_sync():
                    current_loss = self._loss_step(batch) * current_num_tokens
                    running_loss += current_loss.item()
                    current_loss.backward()
                if not is_last:
                    continue
                own_tokens = num_tokens.item()
                manager.allreduce(num_tokens).wait()  # the gradients are averages over the groups, so this is one, too
                training.scale_grads(self._model, 1 / num_tokens)
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self._lr_scheduler.step()
                self.global_step = manager.current_step()  # was: += 1
                if manager.speaks and self.global_step % self._log_every_n_steps == 0:
                    self._metric_logger.log_dict({"loss": running_loss / own_tokens}, step=self.global_step)
                num_tokens.zero_()
                running_loss = 0.0
                time.sleep(self._pause_s)
                if self.global_step // self._steps_per_epoch > epoch:
                    break
            if self.global_step // self._steps_per_epoch > epoch:
                self.epochs_run = self.global_step // self._steps_per_epoch
                self.save_checkpoint(epoch=self.epochs_run - 1)
        manager.shutdown(finished=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="of nine steps each, with two groups")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to watch")
    parser.add_argument("--output", default="train-torchtune-out", help="for checkpoints, the same of all groups")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint there")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    os.makedirs(options.output, exist_ok=True)
    cfg = make_config(options.epochs, options.output, options.resume)
    group, num_groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])  # of the launcher
    recipe = GroupRecipe(cfg, group, num_groups, options.pause)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()
    digest = hashlib.sha256()
    for value in recipe._model.module.state_dict().values():
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    print(f"[{group}] finished at step {recipe.global_step} with state {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
