"""Learning rates and schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import Each, error, errors, mlp, set_up
from idioms.table import Category, idiom
from torch.optim import lr_scheduler as schedules

RATE = Category.RATE


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda sgd: schedules.StepLR(sgd, step_size=2, gamma=0.5),
    "warm_up": lambda sgd: schedules.LambdaLR(sgd, lambda step: min(1.0, (step + 1) / 5)),
    "restarts": lambda sgd: schedules.CosineAnnealingWarmRestarts(sgd, T_0=3),
    "sequence": lambda sgd: schedules.SequentialLR(
        sgd, [schedules.LinearLR(sgd, 0.1, total_iters=3), schedules.CosineAnnealingLR(sgd, 5)], milestones=[3]
    ),
    "chain": lambda sgd: schedules.ChainedScheduler(
        [schedules.ConstantLR(sgd, 0.5, total_iters=3), schedules.ExponentialLR(sgd, 0.9)], optimizer=sgd
    ),
    "one_cycle": lambda sgd: schedules.OneCycleLR(sgd, max_lr=0.2, total_steps=300),
    "steps_of_wrapper": lambda optimizer: schedules.StepLR(optimizer, step_size=2, gamma=0.5),
    "one_cycle_of_wrapper": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.2, total_steps=300),
}


@idiom("StepLR, registered, stepped after each step", RATE)
@idiom("Warm-up by LambdaLR", RATE)
@idiom("CosineAnnealingWarmRestarts", RATE)
@idiom("Warm-up, then cosine (SequentialLR)", RATE)
@idiom("ChainedScheduler, ExponentialLR", RATE)
@idiom("OneCycleLR, with momentum", RATE, "`total_steps` is the number of committed steps.")
@idiom(
    "OneCycleLR of the wrapper: OneCycleLR(Optimizer(manager, ...))",
    RATE,
    "You may pass the optimizer or its wrapper.",
    was="AttributeError: the wrapper had no `defaults`",
)
@idiom(
    "A scheduler of the wrapper: StepLR(Optimizer(manager, ...))",
    RATE,
    "You may pass the optimizer or its wrapper.",
)
def each_scheduler(job: Job) -> None:
    model = Each(**{name: mlp() for name in SCHEDULERS})
    inner = {name: torch.optim.SGD(model.models[name].parameters(), lr=0.1, momentum=0.9) for name in SCHEDULERS}
    manager = job.manager(*states(model=model, **inner))
    ddp, optimizers = job.ddp(model), {name: job.optimizer(sgd) for name, sgd in inner.items()}
    schedulers = []
    for name, make in SCHEDULERS.items():
        schedulers.append(make(optimizers[name] if name.endswith("_of_wrapper") else inner[name]))
        manager.register_state_dict_fn(f"{name}_rate", schedulers[-1].load_state_dict, schedulers[-1].state_dict)
    while job.goes_on():
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        errors(ddp, job.batch()).backward()
        if all([optimizer.step() for optimizer in optimizers.values()]):
            for scheduler in schedulers:
                scheduler.step()


@idiom(
    "manager.scheduler: warm-up, then cosine, stepped after each optimizer.step()",
    RATE,
    "The Manager registers the scheduler. Its `step` does nothing if the step was discarded.",
)
def followed(job: Job) -> None:
    _, adamw, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    scheduler = manager.scheduler(
        schedules.SequentialLR(
            adamw,
            [schedules.LinearLR(adamw, 0.1, total_iters=3), schedules.CosineAnnealingLR(adamw, 9)],
            milestones=[3],
        )
    )
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        scheduler.step()


@idiom(
    "manager.scheduler, with zero_grad at the end of the iteration", RATE, "Call `zero_grad` after `scheduler.step()`."
)
def followed_before_zero_grad(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.current
    scheduler = manager.scheduler(schedules.OneCycleLR(optimizer, max_lr=0.2, total_steps=300))
    while job.goes_on():
        error(ddp, job.batch()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@idiom(
    "manager.scheduler(ReduceLROnPlateau), stepped after each optimizer.step()",
    RATE,
    "Give it a loss that is averaged over the groups (`manager.allreduce`).",
)
def followed_plateau(job: Job) -> None:
    _, sgd, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.5)
    manager = job.current
    scheduler = manager.scheduler(schedules.ReduceLROnPlateau(sgd, patience=0, threshold=0.5))
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        average = loss.detach().clone()
        manager.allreduce(average).wait()
        optimizer.step()
        scheduler.step(average)


@idiom(
    "manager.scheduler of each of two optimizers that share a step",
    RATE,
    "Give each scheduler a name of its own. Each follows its own optimizer.",
)
def followed_twice(job: Job) -> None:
    model = mlp()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    sgd, adamw = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=1e-2)
    manager = job.manager(*states(model=model, sgd=sgd, adamw=adamw))
    ddp, first, second = job.ddp(model), job.optimizer(sgd), job.optimizer(adamw)
    halves = manager.scheduler(schedules.StepLR(sgd, 2, gamma=0.5), "halves")
    decays = manager.scheduler(schedules.ExponentialLR(adamw, 0.9), "decays")
    while job.goes_on():
        first.zero_grad()
        second.zero_grad()
        error(ddp, job.batch()).backward()
        first.step()
        second.step()
        halves.step()
        decays.step()


@idiom("manager.scheduler without the Optimizer wrapper: start_quorum, should_commit", RATE)
def followed_by_hand(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    manager.guard_optimizer(sgd)
    ddp, scheduler = job.ddp(model), manager.scheduler(schedules.ExponentialLR(sgd, 0.9))
    while job.goes_on():
        manager.start_quorum()
        sgd.zero_grad()
        error(ddp, job.batch()).backward()
        if manager.should_commit():
            sgd.step()
        scheduler.step()


@idiom("manager.scheduler, stepped after the next zero_grad", RATE, compare="groups")
def followed_after_zero_grad(job: Job) -> None:
    _, sgd, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    scheduler = manager.scheduler(schedules.ExponentialLR(sgd, 0.9))
    while job.goes_on():
        error(ddp, job.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


@idiom(
    "manager.scheduler, stepped once an epoch",
    RATE,
    "`manager.scheduler` follows each step. Register an epoch's scheduler with model and optimizer instead. Step"
    " it if `optimizer.step()` has returned True and an epoch is over.",
    refused="ConfigError",
    says=r"once an epoch, in turns with another one\) the Manager cannot follow",
)
def followed_each_epoch(job: Job) -> None:
    _, sgd, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    scheduler = manager.scheduler(schedules.ExponentialLR(sgd, 0.9))
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() % 3 == 0:
            scheduler.step()


@idiom(
    "A scheduler that is stepped in every iteration",
    RATE,
    "It counts discarded iterations too. If you register it, it does so equally in all groups.",
)
def every_iteration(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedules.ExponentialLR(sgd, 0.9)
    job.manager(*states(model=model, sgd=sgd, scheduler=scheduler))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        scheduler.step()


@idiom("A scheduler that is stepped once an epoch", RATE, "An epoch is a number of committed steps, not of iterations.")
def every_epoch(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedules.ExponentialLR(adamw, 0.5)
    manager = job.manager(*states(model=model, adamw=adamw, scheduler=scheduler))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step() and manager.current_step() % 3 == 0:
            scheduler.step()


@idiom(
    "ReduceLROnPlateau",
    RATE,
    "Give it a loss that is averaged over the groups (`manager.allreduce`), and register it.",
)
def plateau(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = schedules.ReduceLROnPlateau(sgd, patience=0, threshold=0.5)
    manager = job.manager(*states(model=model, sgd=sgd, scheduler=scheduler))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        average = loss.detach().clone()
        manager.allreduce(average).wait()
        optimizer.step()
        if manager.current_step() > before:
            scheduler.step(average)


@idiom(
    "Set lr from the step, between zero_grad and step",
    RATE,
    was="a group that came back took its first step with the learning rate of its source's step before",
)
def lr_before_step(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + manager.current_step())
        optimizer.step()


@idiom(
    "Scale lr by the number of groups that contribute",
    RATE,
    "From the quorum on, `manager.num_participants()` is the same in all groups.",
)
def lr_by_participants(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * manager.num_participants()
        optimizer.step()


@idiom("Set lr from the step, before zero_grad", RATE)
@idiom("Set lr from the step, after step", RATE)
@idiom(
    "A schedule of momentum, betas or weight decay",
    RATE,
    "These values travel with the optimizer's state. Change them after `step`.",
)
def settings_from_the_step(job: Job) -> None:
    model = Each(before=mlp(), after=mlp(), decays=mlp())
    inner = {
        "before": torch.optim.SGD(model.models["before"].parameters(), lr=0.1, momentum=0.9),
        "after": torch.optim.SGD(model.models["after"].parameters(), lr=0.1, momentum=0.9),
        "decays": torch.optim.AdamW(model.models["decays"].parameters(), lr=1e-2),
    }
    manager = job.manager(*states(model=model, **inner))
    ddp, optimizers = job.ddp(model), [job.optimizer(optimizer) for optimizer in inner.values()]
    while job.goes_on():
        inner["before"].param_groups[0]["lr"] = 0.1 / (1 + manager.current_step())
        for optimizer in optimizers:
            optimizer.zero_grad()
        errors(ddp, job.batch()).backward()
        for optimizer in optimizers:
            optimizer.step()
        inner["after"].param_groups[0]["lr"] = 0.1 / (1 + manager.current_step())
        decayed = inner["decays"].param_groups[0]
        decayed["weight_decay"] = 0.01 * manager.current_step()
        decayed["betas"] = (0.9, 0.9 + 0.0001 * manager.current_step())
