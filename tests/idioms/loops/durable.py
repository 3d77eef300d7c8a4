"""Checkpoints: a job that is stopped and started again."""

from __future__ import annotations

import copy

import torch
from idioms.harness import Job, states
from idioms.models import Box, error, mlp
from idioms.table import Category, idiom
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

DURABLE = Category.DURABLE


@idiom(
    "Checkpointer: restore before the first step, save now and then",
    DURABLE,
    "This is the loop of the guide to durable checkpoints. All groups save at the same steps.",
    restarts=True,
)
def save_and_restore(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(adamw, 3)
    manager = job.manager(*states(model=model, adamw=adamw, scheduler=scheduler), min_replica_size=2)
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    checkpointer = job.checkpointer()
    checkpointer.restore()
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before:
            scheduler.step()
            if manager.current_step() % 4 == 0:
                checkpointer.save()
    checkpointer.shutdown()


@idiom("Save after each step, and wait for it (future.result())", DURABLE, restarts=True)
def save_between(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = Box(samples=0)
    manager = job.manager(*states(model=model, sgd=sgd, seen=seen), min_replica_size=2)
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    checkpointer = job.checkpointer()
    checkpointer.restore()
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before:
            seen.samples += 8
            saved = checkpointer.save(rank_state={"place": job.step})
            if saved is not None:
                saved.result(20)
    checkpointer.shutdown()


@idiom(
    "Save, then swap averaged weights in to evaluate",
    DURABLE,
    "Hold `manager.state_dict_lock.write()` while you change weights. Without it the save fails and names the tensor.",
    was="the checkpoint held the averaged weights, and `verify` called it right",
    restarts=True,
)
def save_then_swap(job: Job) -> None:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, average=average, sgd=sgd), min_replica_size=2)
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    checkpointer = job.checkpointer()
    checkpointer.restore()

    def swap() -> None:
        with torch.no_grad(), manager.state_dict_lock.write():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                held = kept.clone()
                kept.copy_(parameter)
                parameter.copy_(held)

    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before:
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.detach(), 0.1)
            if manager.current_step() == 4:
                saved = checkpointer.save()
                swap()
                if saved is not None:
                    saved.result(10)
                swap()
    checkpointer.shutdown()


@idiom(
    "Checkpointer with a sharded model",
    DURABLE,
    "The mesh may be another one when the job starts again.",
    restarts=True,
)
def save_sharded(job: Job) -> None:
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=job.mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, adamw=adamw), min_replica_size=2)
    job.average_shards(model)
    optimizer = job.optimizer(adamw)
    checkpointer = job.checkpointer()
    checkpointer.restore()
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before and manager.current_step() == 4:
            checkpointer.save()
    checkpointer.shutdown()


@idiom(
    "Checkpointer with DiLoCo, restored before the `with`",
    DURABLE,
    "Inner optimizers begin anew.",
    was="the restored weights were thrown away: the job went on from random ones, and saved those",
    restarts=True,
)
def restore_diloco_before(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = job.manager(min_replica_size=2, use_async_quorum=False)
    loop = job.diloco([model], sgd, outer, 2)
    checkpointer = job.checkpointer()
    checkpointer.restore()
    with loop:
        while job.goes_on():
            before = manager.current_step()
            sgd.zero_grad()
            error(model, job.batch()).backward()
            sgd.step()
            if manager.current_step() > before and manager.current_step() == 4:
                checkpointer.save()
    checkpointer.shutdown()


@idiom(
    "Checkpointer with LocalSGD, restored within the `with`",
    DURABLE,
    was="nothing put what was restored into the model",
    restarts=True,
)
def restore_local_sgd_within(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = job.manager(min_replica_size=2, use_async_quorum=False)
    checkpointer = None
    with job.local_sgd(model, sgd, 2):
        checkpointer = job.checkpointer()
        checkpointer.restore()
        while job.goes_on():
            before = manager.current_step()
            sgd.zero_grad()
            error(model, job.batch()).backward()
            sgd.step()
            if manager.current_step() > before and manager.current_step() == 4:
                checkpointer.save()
    checkpointer.shutdown()
