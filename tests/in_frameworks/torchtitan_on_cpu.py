"""torchtitan 0.3.0's debug model on the CPU, with Gloo and without files of its repository. torchtitan's code stays as it is.

    torchrun --nproc-per-node=2 -m torchft_ckpt.compat.torchft torchtitan_on_cpu.py \\
        --module torchtitan_on_cpu --config hsdp --fault_tolerance.replica_id=0 --fault_tolerance.group_size=2

It is `python -m torchtitan.train`, and a module of configurations, as any project has one. What is for the CPU alone:

- `stand_in_for_a_gpu`: torchtitan asks its device for a name, memory and an index, which `torch.cpu` does not tell. It imports
  kernels in triton, of which PyTorch for the CPU has none and the debug model uses none. PyTorch 2.13 has `set_timeout` under
  another name.
- `_on_cpu`: attention by torch's own kernel, as FlexAttention has no backward pass on the CPU; `spmd_backend="partial_dtensor"`;
  no CUDA graphs; Gloo.
- `_parallelize`: FSDP averages by SUM, as Gloo has no PREMUL_SUM.

Text and tokenizer are made here, so that nothing is downloaded. Each rank waits `PAUSE_S` seconds before each step, so that one
has time to watch. It prints a digest of its state at the end, or after each round of an outer loop.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from fingerprints import digest, print_state, say
from gates import Gates

if TYPE_CHECKING:
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

TEXT = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def stand_in_for_a_gpu() -> None:
    """Let torch name the CPU as its device, with a name and memory. To be called before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "CPU"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is None:
        kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
        kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules[kernels.__name__] = kernels


def hsdp() -> FaultTolerantTrainer.Config:
    """The debug model, averaged over the replica groups in each step."""
    return _on_cpu(semi_sync_method=None)


def diloco() -> FaultTolerantTrainer.Config:
    """The debug model in two fragments; each is exchanged every fourth step."""
    return _on_cpu(semi_sync_method="diloco", sync_steps=4, num_fragments=2)


def local_sgd() -> FaultTolerantTrainer.Config:
    """The debug model, averaged every fourth step."""
    return _on_cpu(semi_sync_method="local_sgd", sync_steps=4)


def _on_cpu(**fault_tolerance: Any) -> FaultTolerantTrainer.Config:
    from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.common.attention import ScaledDotProductAttention

    DATASETS["lines"] = DatasetConfig(path=str(TEXT), loader=_lines, sample_processor=lambda line: line["text"])
    config = llama3_torchft_debugmodel()
    config.tokenizer = _byte_tokenizer()
    config.dataloader.dataset = "lines"
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len = 1, 64
    config.lr_scheduler.min_lr_factor = 0.1  # it changes in each step, and says something at the end
    config.parallelism.spmd_backend = "partial_dtensor"
    config.profiler.enable_profiling = config.validator.enable = False
    config.comm.train_timeout_seconds = 120  # a CPU that others use too is slow at times
    config.fault_tolerance.process_group_timeout_ms = 60_000
    # torchtitan registers its state with the Manager only where it writes checkpoints. The debug model's are each tenth step.
    config.checkpoint.enable = True
    for name, value in {"process_group": "gloo", **fault_tolerance}.items():
        setattr(config.fault_tolerance, name, value)
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=_parallelize)
    return _saying_its_state(config)


def _parallelize(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3 import parallelize_llama

    model = parallelize_llama(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def _lines(path: str) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": Path(path).read_text().splitlines()})


def _byte_tokenizer() -> Any:
    """Return the configuration of a tokenizer whose tokens are bytes, and one that begins and ends a text."""
    from torchtitan.components.tokenizer import BaseTokenizer

    class Bytes(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()
            self.eos_id = 256

        def encode(self, text: str, **_: Any) -> list[int]:
            return [256, *text.encode(), 256]

        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")

        def get_vocab_size(self) -> int:
            return 257

    return Bytes.Config()


def _saying_its_state(config: FaultTolerantTrainer.Config) -> FaultTolerantTrainer.Config:
    """Return the configuration of a trainer that says what its state is when it has trained, or after each round."""
    from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer

    gates = Gates(gate.split(":", 1) for gate in os.environ.get("GATES", "").split())

    class Trainer(FaultTolerantTrainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(FaultTolerantTrainer.Config):
            pass

        told_of = 0

        def train_step(self, data_iterator: Any) -> None:
            gates.go_on(self.step, self.ft_manager.manager.view().num_participants)
            time.sleep(float(os.environ.get("PAUSE_S", "0")))
            super().train_step(data_iterator)
            rounds = 0 if self.ft_manager.use_async_quorum else self.ft_manager.manager.current_step()
            if rounds > self.told_of:
                self.told_of = rounds
                _say_state(self)

        def train(self) -> None:
            super().train()
            if self.ft_manager.use_async_quorum:
                _say_state(self)

    return Trainer.Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def _say_state(trainer: FaultTolerantTrainer) -> None:
    """Print a digest of what all groups have in common now; all of it, for tests, where `PRINT_STATE` is set."""
    manager = trainer.ft_manager.manager
    state: dict[str, Any] = {
        "trainer": {"rank": torch.distributed.get_rank(), "step": trainer.step},
        "scheduler": [[each.last_epoch, each.get_last_lr()] for each in trainer.lr_schedulers],
        "learning_rates": [[group["lr"] for group in each.param_groups] for each in trainer.optimizers],
    }
    if trainer.ft_manager.use_async_quorum:
        state["model"] = [part.state_dict() for part in trainer.model_parts]
        state["optimizer"] = [each.state_dict() for each in trainer.optimizers]
    else:  # between two rounds all else is each group's own
        state["agreed_on"] = manager.hooks.registry.capture()[trainer.config.fault_tolerance.semi_sync_method]
    say(f"rank {state['trainer']['rank']}, step {manager.current_step()}: state {digest(**state)}")
    if os.environ.get("PRINT_STATE"):
        print_state(step=manager.current_step(), **state)


def main() -> None:
    """Train as `python -m torchtitan.train` does."""
    stand_in_for_a_gpu()
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
