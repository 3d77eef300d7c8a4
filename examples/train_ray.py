"""Ray Train's replica groups, by its own `TorchftConfig`: a worker that dies is started again, and the others train on.

    pip install ".[ray]"
    python examples/train_ray.py --groups 3 --steps 2000

Ray imports torchft by its name, in its lighthouse and in the workers. The hook in `main` puts this library in its place.

With `--checkpoints DIR` the groups save while they train, and a run that lost all of them goes on from there when it is started
again. Ray gets a `Checkpoint` of its own at the end: `ray.train.report` waits for all workers, so no loop of groups calls it.

The task: guess the next character of the source of Python's standard library from the 24 before it.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch import Tensor, nn

from torchft_ckpt import Checkpointer, DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.errors import JobFinishedError

CONTEXT = 24


def draw_batch(text: Tensor, step: int, group: int) -> tuple[Tensor, Tensor]:
    """What a group learns from in a step, int64 of shape (32, CONTEXT) and (32,): another batch for each step and group."""
    generator = torch.Generator().manual_seed(step * 1000 + group)
    first = torch.randint(len(text) - CONTEXT, (32, 1), generator=generator)
    windows = text[first + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def digest_of(states: list[dict[str, Any]]) -> str:
    """A fingerprint of the bits of all tensors, and of all plain values, to compare groups by."""
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                hasher.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            hasher.update(repr(value).encode())

    add(states)
    return hasher.hexdigest()[:16]


def train_group(options: dict[str, Any]) -> dict[str, Tensor] | None:
    """Train one replica group; return the weights, in the group that gives them to Ray for all groups."""
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s", force=True)
    group = ray.train.get_context().get_world_rank()
    device = get_device()  # where it is a GPU Ray has made it current: the Manager connects NCCL on the current device
    print(f"group {group} is process {os.getpid()}", flush=True)

    text = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    module = nn.Sequential(
        nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
    ).to(device)
    adamw = torch.optim.AdamW(module.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, options["steps"])
    adamw.register_step_post_hook(lambda *_: schedule.step())  # which runs where the step counts

    def state_dict() -> dict[str, Any]:
        return {"model": module.state_dict(), "optim": adamw.state_dict(), "schedule": schedule.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        adamw.load_state_dict(state["optim"])
        schedule.load_state_dict(state["schedule"])

    manager = Manager(
        pg=ProcessGroupNCCL() if device.type == "cuda" else ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,  # each worker of Ray's is a group of its own
        world_size=1,
        replica_id=f"group_{group}",
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, adamw)
    checkpointer = Checkpointer(options["checkpoints"], manager=manager) if options["checkpoints"] else None
    if checkpointer is not None:
        checkpointer.restore()
    while manager.current_step() < options["steps"]:
        time.sleep(options["pause"])
        optimizer.zero_grad()
        inputs, targets = (part.to(device) for part in draw_batch(characters, manager.current_step(), group))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        # commits, or discards the step on every group alike
        if optimizer.step() and manager.current_step() % 100 == 0 and checkpointer is not None:
            checkpointer.save()
    print(f"group {group} finished at step {manager.current_step()}: state {digest_of([state_dict()])}", flush=True)
    speaks = manager.participating_rank() == 0
    if checkpointer is not None:
        checkpointer.shutdown()
    manager.shutdown(finished=True)
    return module.state_dict() if speaks else None


def train(options: dict[str, Any]) -> None:
    """Train one replica group, and report to Ray; one that comes when the others have made the last step only reports."""
    try:
        weights = train_group(options)
    except JobFinishedError as over:
        print(over, flush=True)
        weights = None
    with tempfile.TemporaryDirectory() as folder:
        if weights is not None:
            torch.save(weights, Path(folder) / "weights.pt")
        ray.train.report({"steps": options["steps"]}, None if weights is None else Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2, help="replica groups, a worker each")
    parser.add_argument("--steps", type=int, default=500, help="committed steps to train")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, to have time to watch")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument(
        "--checkpoints", type=Path, help="a directory that all workers see: save here every 100 steps, and go on"
    )
    parser.add_argument("--storage", type=Path, help="where Ray keeps the run's results")
    options = parser.parse_args()

    ray.init(
        include_dashboard=False,
        num_cpus=options.groups + 1,  # of Ray's counting: one for each worker, and one to place the lighthouse
        runtime_env={
            "worker_process_setup_hook": "torchft_ckpt.compat.torchft.install",
            # of Ray's lighthouse and of all workers
            "env_vars": {"TORCHFT_CKPT_TOKEN": secrets.token_hex(32), "TORCHFT_CKPT_JOB": "train_ray"},
        },
    )
    checkpoints = None if options.checkpoints is None else str(options.checkpoints.resolve())
    result = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "pause": options.pause, "checkpoints": checkpoints},
        scaling_config=ScalingConfig(num_workers=options.groups, use_gpu=options.gpu),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}),
        run_config=RunConfig(
            storage_path=None if options.storage is None else str(options.storage),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    print(f"Ray's checkpoint: {result.checkpoint}", flush=True)


if __name__ == "__main__":
    main()
