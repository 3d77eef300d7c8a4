"""Gradients: accumulating, clipping, adding to them."""

from __future__ import annotations

import torch
from idioms.harness import Job, states
from idioms.models import Box, Each, error, errors, mlp, set_up
from idioms.table import Category, idiom
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

GRADIENT = Category.GRADIENT


@idiom(
    "Accumulate gradients of several batches under no_sync",
    GRADIENT,
    "Call `zero_grad` once for all of them, and leave `no_sync` before the last batch. The windows of all"
    " groups have the same length.",
)
def accumulate_no_sync(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    while job.goes_on():
        optimizer.zero_grad()
        with ddp.no_sync():
            for _ in range(2):
                (error(ddp, job.batch()) / 3).backward()
        (error(ddp, job.batch()) / 3).backward()
        optimizer.step()


@idiom("Accumulate without no_sync", GRADIENT, "It is right, but exchanges the gradients once for each batch.")
def accumulate_and_average_each(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    while job.goes_on():
        optimizer.zero_grad()
        for _ in range(2):
            (error(ddp, job.batch()) / 2).backward()
        optimizer.step()


@idiom(
    "Accumulate windows of different lengths",
    GRADIENT,
    "The length may differ from step to step, but not from group to group.",
)
def accumulate_by_step(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    while job.goes_on():
        optimizer.zero_grad()
        for _ in range(1 + job.step % 2):
            with ddp.no_sync():
                error(ddp, job.batch()).backward()
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom("Clip by norm", GRADIENT, "`backward` has averaged the gradients when it returns, so all groups clip equally.")
@idiom("Clip by value", GRADIENT)
@idiom("Centralise and normalise the gradients", GRADIENT)
@idiom("Scale or clip gradients in a hook of a parameter (register_hook)", GRADIENT, "It sees this group's gradient.")
def each_way_to_change_gradients(job: Job) -> None:
    model = Each(norm=mlp(), value=mlp(), centralised=mlp(), hooked=mlp())
    for parameter in model.models["hooked"].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        errors(ddp, job.batch()).backward()
        clip_grad_norm_(model.models["norm"].parameters(), 0.1)
        clip_grad_value_(model.models["value"].parameters(), 0.01)
        for parameter in model.models["centralised"].parameters():
            if parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
            parameter.grad.div_(parameter.grad.norm() + 1e-6)
        optimizer.step()


@idiom(
    "Clip to a running mean of the norms, which is registered",
    GRADIENT,
    "Remember the norm only if the step counted. In a discarded step, each group has its own norm.",
    was="a group that came back clipped its first step by its old history, and differed from then on",
)
def adaptive_clipping(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    history = Box(mean=1.0)
    manager = job.manager(*states(model=model, sgd=sgd, history=history))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        norm = clip_grad_norm_(model.parameters(), 0.5 * history.mean)
        optimizer.step()
        if manager.current_step() > before:
            history.mean = 0.9 * history.mean + 0.1 * norm.item()


@idiom(
    "Add weight decay to the gradients by hand",
    GRADIENT,
    was="a group that came back added the decay of its old weights to its first step, and differed from then on",
)
def decay_by_hand(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1)
        optimizer.step()


@idiom(
    "Add noise to the gradients",
    GRADIENT,
    "Seed the noise by `manager.current_step()`. It has to be the same in all groups.",
    was="a group that came back seeded the noise of its first step by step 0, and differed from then on",
)
def gradient_noise(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        generator = torch.Generator().manual_seed(manager.current_step())
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        optimizer.step()


@idiom("Gradient penalty (double backward)", GRADIENT)
def gradient_penalty(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    while job.goes_on():
        inputs, targets = job.batch()
        inputs.requires_grad_(True)
        optimizer.zero_grad()
        outputs = ddp(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        (nn.functional.mse_loss(outputs, targets) + slope.norm(dim=1).sub(1).square().mean()).backward()
        optimizer.step()


@idiom("Several losses, weighted and added", GRADIENT)
def several_losses(job: Job) -> None:
    trunk, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: torch.Tensor) -> list[torch.Tensor]:
            hidden = torch.tanh(trunk(inputs))
            return [head(hidden) for head in heads]

    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(Both()), job.optimizer(adamw)
    while job.goes_on():
        inputs, targets = job.batch()
        optimizer.zero_grad()
        first, second = ddp(inputs)
        (nn.functional.mse_loss(first, targets) + 0.3 * nn.functional.l1_loss(second, targets)).backward()
        optimizer.step()


@idiom(
    "Average the gradients yourself, without DDP (manager.allreduce)",
    GRADIENT,
    "Average the same tensors in the same order in all groups. `optimizer.step()` waits for the averages.",
)
def own_allreduce(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    optimizer = job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        optimizer.step()


@idiom("Average one flat vector of all gradients", GRADIENT)
def flat_allreduce(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    optimizer = job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        manager.allreduce(flat).wait()
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()


@idiom("Gradients of several losses by autograd.grad, combined by hand (PCGrad)", GRADIENT)
def gradient_surgery(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    optimizer = job.optimizer(sgd)
    parameters = list(model.parameters())
    while job.goes_on():
        optimizer.zero_grad()
        first = torch.autograd.grad(error(model, job.batch()), parameters)
        second = torch.autograd.grad(error(model, job.batch()), parameters)
        for parameter, one, other in zip(parameters, first, second, strict=True):
            dot = (one * other).sum()
            parameter.grad = one + other if dot > 0 else other.clone()
            manager.allreduce(parameter.grad)
        optimizer.step()


@idiom("Gradients of ten tasks, cleared before each backward pass, combined by hand (GradVac)", GRADIENT)
def surgery_by_task(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.current
    while job.goes_on():
        found: list[list[torch.Tensor]] = []
        for task in range(10):
            with ddp.no_sync():
                loss = (task + 1) * error(ddp, job.batch())
                optimizer.zero_grad()
                loss.backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, gradients in zip(model.parameters(), zip(*found, strict=True), strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
            manager.allreduce(parameter.grad)
        optimizer.step()


@idiom(
    "Send the gradients as bytes (should_quantize)",
    GRADIENT,
    "The groups stay bit-equal to each other, but the average is rounded.",
    compare="groups",
)
def quantised_gradients(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    optimizer = job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(model, job.batch()).backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad, should_quantize=True)
        optimizer.step()


@idiom(
    "Weights of losses that are trained too, in no DistributedDataParallel (Kendall)",
    GRADIENT,
    "They differ between the groups after each step: the lighthouse finds that, and one group ends at the third time. Put"
    " them into a module that you wrap, or average `p.grad` by `manager.allreduce`.",
    was="nothing was said, and the groups drifted apart from the first step on",
    refused="ReplicasDifferError",
    says=r"default\.scales\.0",
)
def loss_weights(job: Job) -> None:
    model, scales = mlp(), nn.ParameterList([torch.zeros(2)])
    sgd = torch.optim.SGD([*model.parameters(), *scales], lr=0.1)
    job.manager(*states(model=model, scales=scales, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        losses = torch.stack([error(ddp, job.batch()), error(ddp, job.batch())])
        (losses * torch.exp(-scales[0]) + scales[0]).sum().backward()
        optimizer.step()


@idiom("The same, with their gradients averaged by manager.allreduce", GRADIENT)
def loss_weights_averaged(job: Job) -> None:
    model, scales = mlp(), nn.ParameterList([torch.zeros(2)])
    sgd = torch.optim.SGD([*model.parameters(), *scales], lr=0.1)
    manager = job.manager(*states(model=model, scales=scales, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        (loss * torch.exp(-scales[0]) + scales[0]).sum().backward()
        gradient = scales[0].grad.clone()
        manager.allreduce(gradient).wait()
        scales[0].grad = 2 * gradient
        optimizer.step()
