"""Hugging Face's Trainer in replica groups that may die and come back: one `FaultToleranceCallback` more than without.

    pip install ".[transformers]"
    python -m torchft_ckpt run --groups 2 -- examples/train_transformers.py

The task: guess the next character of the source of Python's standard library. The model is made on the spot, and nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from torchft_ckpt import Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.errors import JobFinishedError
from torchft_ckpt.integrations.transformers import FaultToleranceCallback

CONTEXT = 64


class Windows(Dataset):
    """This group's part of all windows of a text: every `num_groups`-th, as many in each group."""

    def __init__(self, folder: Path, group: int, num_groups: int) -> None:
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // CONTEXT * CONTEXT].view(
            -1, CONTEXT
        )
        self.windows = windows[group : len(windows) // num_groups * num_groups : num_groups]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def make_model() -> LlamaForCausalLM:
    """Two layers: about 90,000 parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    )


class Pause(TrainerCallback):
    """Waits before each step, to have time to watch."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    def on_step_begin(self, *_: object, **__: object) -> None:
        time.sleep(self._pause_s)


def digest_of(trainer: Trainer) -> str:
    """A fingerprint of weights, optimizer state and learning rates, to compare groups by."""
    hasher = hashlib.sha256(repr([group["lr"] for group in trainer.optimizer.param_groups]).encode())
    states = trainer.optimizer.state_dict()["state"]
    tensors = [*trainer.model.state_dict().values(), *(value for state in states.values() for value in state.values())]
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of the job")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--min-replica-size", type=int, default=1, help="train only with this many groups")
    parser.add_argument("--output", default="train-transformers-out", help="for checkpoints, the same of all groups")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="where no other group has a state of the job, go on from the newest complete checkpoint in --output",
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    group, num_groups = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    if not torch.cuda.is_available():
        torch.set_num_threads(1)

    manager = Manager(
        pg=ProcessGroupNCCL() if torch.cuda.is_available() else ProcessGroupGloo(),
        load_state_dict=None,  # the callback registers what is trained
        state_dict=None,
        min_replica_size=options.min_replica_size,
        replica_id=f"group_{group}",
    )
    fault_tolerance = FaultToleranceCallback(manager)
    trainer = Trainer(
        model=make_model(),
        args=TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_steps=100,
            save_total_limit=2,
            disable_tqdm=True,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Windows(Path(os.__file__).parent, group, num_groups),
        callbacks=[Pause(options.pause), fault_tolerance],
    )
    trainer.train(resume_from_checkpoint=fault_tolerance.resume_from(options.output) if options.resume else None)
    print(f"[{group}] finished at step {manager.current_step()} with state {digest_of(trainer)}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
