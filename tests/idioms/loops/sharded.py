"""Sharded models: FSDP2 in a group of one rank; what needs several ranks is in tests/sharded."""

from __future__ import annotations

from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import error, mlp
from idioms.table import Category, idiom
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

SHARDED = Category.SHARDED


def sharded_mlp(job: Job, **options: Any) -> nn.Sequential:
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=job.mesh, **options)
    return fully_shard(model, mesh=job.mesh, **options)


def train(job: Job, model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """The loop of the guide to sharded models."""
    job.manager(*states(model=model, inner=inner))
    job.average_shards(model)
    optimizer = job.optimizer(inner)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        optimizer.step()


@idiom("fully_shard, set_all_reduce_hook, AdamW", SHARDED, "This is the loop of the guide to sharded models.")
def fsdp(job: Job) -> None:
    model = sharded_mlp(job)
    train(job, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@idiom("reshard_after_forward=False", SHARDED)
def fsdp_no_reshard(job: Job) -> None:
    model = sharded_mlp(job, reshard_after_forward=False)
    train(job, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@idiom("MixedPrecisionPolicy: bfloat16 parameters, float32 reduction", SHARDED)
def fsdp_mixed_precision(job: Job) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = sharded_mlp(job, mp_policy=policy)
    train(job, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@idiom("Clip by norm (DTensor)", SHARDED)
def fsdp_clip(job: Job) -> None:
    model = sharded_mlp(job)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    job.average_shards(model)
    optimizer = job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@idiom("Accumulate gradients (set_requires_gradient_sync)", SHARDED)
def fsdp_accumulate(job: Job) -> None:
    model = sharded_mlp(job)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    job.average_shards(model)
    optimizer = job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            (error(model, job.batch()) / 2).backward()
        optimizer.step()


@idiom("Frozen layers (LoRA)", SHARDED)
def fsdp_frozen(job: Job) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=job.mesh)
    train(job, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


@idiom("State by get_model_state_dict (DCP)", SHARDED)
def fsdp_dcp_state(job: Job) -> None:
    model = sharded_mlp(job)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load_state_dict(state: dict[str, Any]) -> None:
        dcp_state.set_model_state_dict(model, state["model"])
        adamw.load_state_dict(state["adamw"])

    job.manager(load_state_dict, lambda: {"model": dcp_state.get_model_state_dict(model), "adamw": adamw.state_dict()})
    job.average_shards(model)
    optimizer = job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        optimizer.step()


@idiom(
    "Progressive unfreezing of a sharded model",
    SHARDED,
    was="the group that came back, still frozen, ended with StateMismatchError at every restart",
)
def fsdp_unfreeze(job: Job) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=job.mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    job.average_shards(model)
    optimizer = job.optimizer(sgd)
    while job.goes_on():
        if manager.current_step() >= 3:
            model.requires_grad_(True)
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        optimizer.step()


@idiom(
    "The hook forgotten: no DistributedDataParallel, no set_all_reduce_hook",
    SHARDED,
    "A warning says that nothing was averaged. One group ends when its weights differ for the third time.",
    was="all steps were committed, and the groups drifted apart without a word",
    refused="ReplicasDifferError",
    says=r"default\.model\.\d.weight",
)
def hook_forgotten(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    optimizer = job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        optimizer.step()


@idiom(
    "A plain parameter beside the sharded ones, in no module that fully_shard was applied to",
    SHARDED,
    "A warning says that it is not averaged, and one group ends when it differs for the third time. Average it with"
    " `manager.allreduce`, or give it to `fully_shard`.",
    refused="ReplicasDifferError",
    says=r"default\.model\.2\.weight",
)
def plain_beside_sharded(job: Job) -> None:
    model = mlp()
    fully_shard(model[0], mesh=job.mesh)
    train(job, model, torch.optim.SGD(model.parameters(), lr=0.1))


@idiom(
    "Tensor-parallel parameters outside of fully_shard",
    SHARDED,
    "A warning says that they are not averaged, and one group ends when they differ for the third time.",
    was="nothing was said, and they drifted apart",
    refused="ReplicasDifferError",
    says=r"default\.model\.0\.0\.weight",
)
def tensor_parallel_outside(job: Job) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(mlp(), nn.Linear(3, 3))
    parallelize_module(model[0], job.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[1], mesh=job.mesh)
    assert isinstance(model[0][0].weight, DTensor)
    train(job, model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))


@idiom(
    "set_all_reduce_hook of a model that nothing was sharded in",
    SHARDED,
    refused="ConfigError",
    says="fully_shard",
)
def nothing_sharded(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    job.average_shards(model)
