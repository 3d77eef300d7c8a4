"""Averaged weights, evaluation, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import Box, error, mlp, set_up
from idioms.table import Category, idiom
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

WEIGHTS = Category.WEIGHTS


@idiom("An exponential average of the weights (EMA)", WEIGHTS)
@idiom("AveragedModel with use_buffers and foreach averaging", WEIGHTS)
@idiom(
    "EMA in every iteration, counted or not",
    WEIGHTS,
    "It also averages after a discarded step, equally in all groups.",
)
@idiom(
    "EMA where the trainer drops what optimizer.step() returns (accelerate, Composer, timm)",
    WEIGHTS,
    "Ask `manager.last_step_counted()`.",
)
def ema(job: Job) -> None:
    model = mlp()
    averages = nn.ModuleDict(
        {
            "by_hand": copy.deepcopy(model).requires_grad_(False),
            "of_torch": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True),
            "always": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            "asks": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        }
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, averages=averages, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        counts = optimizer.step()
        if manager.current_step() > before:
            for kept, parameter in zip(averages["by_hand"].parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.detach(), 0.1)
        if counts:
            averages["of_torch"].update_parameters(model)
        averages["always"].update_parameters(model)
        if manager.last_step_counted():
            averages["asks"].update_parameters(model)


@idiom("Stochastic weight averaging: AveragedModel and SWALR from a step on", WEIGHTS)
def swa(job: Job) -> None:
    model = mlp()
    average = AveragedModel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SWALR(sgd, swa_lr=0.02, anneal_epochs=2)
    manager = job.manager(*states(model=model, average=average, sgd=sgd, scheduler=scheduler))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before and manager.current_step() >= 3:
            average.update_parameters(model)
            scheduler.step()
    update_bn([job.randn(4, 6)], average)


@idiom(
    "Swap averaged weights in to evaluate, and out again",
    WEIGHTS,
    "Hold `manager.state_dict_lock.write()` around each change. At that moment the library may be saving or"
    " serving the state.",
)
def swap_ema(job: Job) -> None:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, average=average, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)

    def swap() -> None:
        with manager.state_dict_lock.write(), torch.no_grad():
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
        swap()
        with torch.no_grad():
            error(model, job.batch())
        swap()


class ScheduleFree(torch.optim.Optimizer):
    """SGD that moves `z`, and evaluates gradients between that and its average: `eval` moves parameters there, `train` back."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "num_steps": 0, "trains": True})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                group["num_steps"] += 1
                for parameter in group["params"]:
                    z = self.state[parameter].setdefault("z", parameter.detach().clone())
                    parameter.lerp_(z, 1 / group["num_steps"])
                    parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - group["beta"]))
                    z.sub_(parameter.grad, alpha=group["lr"])

    def move(self, weight: Callable[[float], float], *, trains: bool) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                group["trains"] = trains
                for parameter in (one for one in group["params"] if one in self.state):
                    parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))

    def eval(self) -> None:
        self.move(lambda beta: 1 - 1 / beta, trains=False)

    def train(self) -> None:
        self.move(lambda beta: 1 - beta, trains=True)


def evaluate_schedule_free(job: Job, is_due: Callable[[int, int], bool]) -> None:
    model, num_here = mlp(), 0
    schedule_free = ScheduleFree(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, schedule_free=schedule_free))
    ddp, optimizer = job.ddp(model), job.optimizer(schedule_free)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        counts = optimizer.step()
        num_here += 1
        if counts and is_due(manager.current_step(), num_here):
            with manager.state_dict_lock.write():
                schedule_free.eval()
            with torch.no_grad():
                error(model, job.batch())
            with manager.state_dict_lock.write():
                schedule_free.train()


@idiom(
    "A schedule-free optimizer: `eval()` and `train()` in some steps, by `manager.current_step()`",
    WEIGHTS,
    "The way back rounds, so all groups go it in the same steps.",
)
def schedule_free_by_the_step(job: Job) -> None:
    evaluate_schedule_free(job, lambda step, _: step % 3 == 0)


@idiom(
    "A schedule-free optimizer: `eval()` and `train()` by a count of the loop's own",
    WEIGHTS,
    "A group that comes back counts from 0, so it rounds in other steps than the others: one loads the other's weights each time,"
    " with a warning. Choose the steps by `manager.current_step()`.",
    was="the same, and the warning's advice did not fit",
    says="came to another state of step .* differed. It has loaded theirs .* as an optimizer's eval\\(\\) and train\\(\\) do",
    compare="groups",
    late=("/model/", "/schedule_free/"),
)
def schedule_free_by_own_count(job: Job) -> None:
    evaluate_schedule_free(job, lambda _, num_here: num_here % 5 == 0)


@idiom(
    "Perturb the weights between zero_grad and step, and put them back (SAM)",
    WEIGHTS,
    "Hold `manager.state_dict_lock.write()` around each change.",
    was="a group that healed meanwhile might get perturbed weights",
)
def sharpness_aware(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    parameters = list(model.parameters())
    while job.goes_on():
        batch = job.batch()
        optimizer.zero_grad()
        kept = [parameter.detach().clone() for parameter in parameters]
        slopes = torch.autograd.grad(error(model, batch), parameters)
        with manager.state_dict_lock.write(), torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.add_(slope, alpha=0.05)
        error(ddp, batch).backward()
        with manager.state_dict_lock.write(), torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        optimizer.step()


@idiom("Lookahead: slow weights, taken over every k steps", WEIGHTS)
def lookahead(job: Job) -> None:
    model = mlp()
    slow = copy.deepcopy(model).requires_grad_(False)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, slow=slow, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before and manager.current_step() % 2 == 0:
            with torch.no_grad():
                for kept, parameter in zip(slow.parameters(), model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.5)
                    parameter.copy_(kept)


@idiom("A target network (DQN, BYOL) that follows the online one", WEIGHTS)
def target_network(job: Job) -> None:
    online = mlp()
    target = copy.deepcopy(online).requires_grad_(False)
    adam = torch.optim.Adam(online.parameters(), lr=1e-2)
    manager = job.manager(*states(online=online, target=target, adam=adam))
    ddp, optimizer = job.ddp(online), job.optimizer(adam)
    while job.goes_on():
        before = manager.current_step()
        inputs, _ = job.batch()
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = 0.9 * target(inputs.flip(0)) + 0.1
        nn.functional.smooth_l1_loss(ddp(inputs), wanted).backward()
        optimizer.step()
        if manager.current_step() > before and manager.current_step() % 3 == 0:
            target.load_state_dict(online.state_dict())


@idiom(
    "Evaluate between steps (model.eval(), no_grad)",
    WEIGHTS,
    "Evaluate whenever you like, in any group.",
)
@idiom("Evaluate through DDP under no_grad", WEIGHTS)
@idiom("Evaluate between zero_grad and the forward pass", WEIGHTS, "The evaluation overlaps with finding the quorum.")
@idiom("deepcopy of the model, to evaluate it elsewhere", WEIGHTS)
def evaluate(job: Job) -> None:
    model, _, ddp, optimizer = set_up(
        job, torch.optim.AdamW, lr=1e-2, model=nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    )
    manager = job.current
    while job.goes_on():
        ddp.train()
        optimizer.zero_grad()
        with torch.no_grad():
            error(model, job.batch()).item()
        error(ddp, job.batch()).backward()
        optimizer.step()
        ddp.eval()
        with torch.no_grad():
            error(ddp, job.batch()).item()
        if manager.current_step() % 2 == 0:
            with torch.inference_mode():
                error(ddp.module, job.batch()).item()
        other = copy.deepcopy(model).double()
        with torch.no_grad():
            other(job.batch()[0].double())


@idiom(
    "Evaluate in one group alone",
    WEIGHTS,
    "The others wait for it in their next step, up to the lighthouse's `--join-timeout-ms`. Then they go on without it, if they"
    " are more than half of the living groups. With two groups, the other one waits until it comes.",
)
def evaluate_in_one_group(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if job.group == 0 and manager.current_step() % 2 == 0:
            with torch.no_grad():
                error(model, job.batch()).item()


@idiom("Keep the best weights so far", WEIGHTS, "Register them. Decide by a value that is averaged over the groups.")
def best_weights(job: Job) -> None:
    model = mlp()
    best = Box(loss=1e9, weights=None)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    manager = job.manager(*states(model=model, sgd=sgd, best=best))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        average = loss.detach().clone()
        manager.allreduce(average).wait()
        optimizer.step()
        if manager.current_step() > before and average.item() < best.loss:
            best.loss = average.item()
            best.weights = {name: value.clone() for name, value in model.state_dict().items()}


@idiom(
    "Reset the optimizer, or go back to kept weights, at a step",
    WEIGHTS,
    "Decide by the step. Then all groups do it at once.",
)
def reset_optimizer(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fresh: dict[str, Any] = copy.deepcopy(adamw.state_dict())
    manager = job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before and manager.current_step() % 4 == 3:
            adamw.load_state_dict(fresh)


@idiom(
    "Prune by masks (torch.nn.utils.prune), more in each third step, by `manager.current_step()`",
    WEIGHTS,
    "Make the masks before the loop (`prune.identity`): a group that comes back has them then, and its `load_state_dict` takes"
    " the others'.",
)
def prune_by_masks(job: Job) -> None:
    model = mlp()
    for layer in (model[0], model[2]):
        prune.identity(layer, "weight")
    _, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9, model=model)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step() and job.step % 3 == 0:
            for layer in (model[0], model[2]):
                prune.l1_unstructured(layer, "weight", amount=0.1)


@idiom(
    "Go back to the best weights after some bad looks, by variables that are not registered",
    WEIGHTS,
    "A group that comes back has seen other looks, so it goes back in another step, and loads the others' weights, with a"
    " warning. Register the best weights, and how many looks were bad.",
    says="came to another state of step .* It has loaded theirs .* by a count that no state_dict function returns",
    compare="groups",
    late=("/model/", "/optimizer/"),
)
def back_to_the_best(job: Job) -> None:
    model, inner, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.3, momentum=0.9)
    kept, num_looks = copy.deepcopy(model.state_dict()), 0
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            num_looks += 1
            if num_looks % 5 == 1:
                kept = copy.deepcopy(model.state_dict())
            elif num_looks % 5 == 0:
                model.load_state_dict(kept)
                for group in inner.param_groups:
                    group["lr"] *= 0.9
