"""One rank of a group that takes a job over from a group of another layout, and hands it over to the next; its own process.

Gradients are whole multiples of 12 over a power of two, the same on every rank, so sums and averages over up to four ranks are
exact: after each step the full tensors have the bits of `tests/sharded/test_moving_job.py`'s plain loop, in whatever layout.

Options: `layout` is plain, fsdp or fsdp+tp (two by two); `take_over`; `until`, the step at which it stops (without it, that in
the file `stop` of the directory `control`); `hand_over`.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support.trainer_process import begin, is_over, make_manager, report, state_functions
from torchft_ckpt import HTTPTransport, Optimizer, set_all_reduce_hook

SHAPES = [(7, 6), (16, 8), (5,), (1, 3), (4, 2, 3)]
LIMIT = timedelta(seconds=60)


class Item(nn.Module):
    """One parameter, whose gradient is what it is called with."""

    def __init__(self, shape: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):  # sharded by tensor parallelism: what FSDP gathers is a shard of it
            gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements, src_data_rank=None)
            return (weight * gradient).to_local().sum()
        return (weight * gradient).sum()


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.items = nn.ModuleList(Item(shape, seed + index) for index, shape in enumerate(SHAPES))

    def forward(self, step: int) -> torch.Tensor:
        return torch.stack([item(gradient) for item, gradient in zip(self.items, gradients(step), strict=True)]).sum()


def gradients(step: int) -> list[torch.Tensor]:
    """The full gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(-64, 64, shape, generator=generator) * 12 / 256 for shape in SHAPES]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def shard(model: Model, layout: str) -> None:
    if layout == "plain":
        return
    if layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for item in model.items:
            if len(item.weight) > 1:  # FSDP cannot reduce what tensor parallelism leaves empty
                item.weight = nn.Parameter(distribute_tensor(item.weight.detach(), mesh["tp"], [Shard(0)]))
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for item in model.items:
        fully_shard(item, mesh=mesh)
    fully_shard(model, mesh=mesh)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """All full tensors, as integers: parameters, then momenta."""
    values = []
    for parameter in model.parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        for tensor in (parameter.detach(), *(() if momentum is None else (momentum,))):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            values.append(full.contiguous().view(torch.int32).flatten().tolist())
    return values


def is_there(options: dict[str, Any], step: int) -> bool:
    """Whether it has trained until the step that its options name, or somebody told it to stop."""
    return step >= options["until"] if "until" in options else is_over(options, step)


def main() -> None:
    options = begin()
    if options["layout"] != "plain":
        alone = {} if "MASTER_ADDR" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", timeout=timedelta(seconds=30), **alone)
    model = Model(options["seed"])
    shard(model, options["layout"])
    sgd = make_optimizer(model.parameters())

    transport: HTTPTransport[Any] = HTTPTransport(timeout=timedelta(seconds=30), hostname="127.0.0.1")
    manager = make_manager(options, transport, *state_functions(model, sgd))
    if options["layout"] != "plain":
        set_all_reduce_hook(manager, model)
    optimizer = Optimizer(manager, sgd)
    report("ready", address=transport.metadata())
    try:
        if options.get("take_over"):
            report("took", is_held=manager.take_over(LIMIT), step=manager.current_step(), bits=bits(model, sgd))
        while not is_there(options, manager.current_step()):
            optimizer.zero_grad()
            time.sleep(options.get("pause_s", 0.0))
            model(manager.quorum_step()).backward()
            if options["layout"] == "plain":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        manager.allreduce(parameter.grad).wait()
            optimizer.step()
            report("step", step=manager.current_step(), participants=manager.num_participants())
        report("there", step=manager.current_step(), bits=bits(model, sgd))
        if options.get("hand_over"):
            report("handed", is_taken=manager.hand_over(LIMIT))
        report("done", step=manager.current_step())
    finally:
        manager.shutdown()
        transport.shutdown()


if __name__ == "__main__":
    main()
