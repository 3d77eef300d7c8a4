"""Mixed precision."""

from __future__ import annotations

import torch
from idioms.harness import Job, states
from idioms.models import Each, error, errors, mlp, set_up
from idioms.table import Category, idiom
from torch import nn

PRECISION = Category.PRECISION


@idiom(
    "GradScaler, registered",
    PRECISION,
    "Register the scaler with model and optimizer. If the scaler skips a step, it does not call `step`, and"
    " the next `zero_grad` leaves the open step.",
    was="a group that came back unscaled its first step by a new scaler's scale, and differed from then on",
)
def grad_scaler(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    job.manager(*states(model=model, sgd=sgd, scaler=scaler))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        scaler.scale(error(ddp, job.batch())).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@idiom(
    "GradScaler that finds an overflow",
    PRECISION,
    "All groups find it in the averaged gradients, and no group steps. Draw another batch then.",
    was="as with the registered scaler above",
)
def grad_scaler_overflow(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    job.manager(*states(model=model, sgd=sgd, scaler=scaler))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        overflows = job.step == 1 and scaler.get_scale() == 4.0
        scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


@idiom(
    "manager.grad_scaler, with clipping",
    PRECISION,
    "The Manager registers the scaler. Its scale changes only in steps that count.",
)
def followed_scaler(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    scaler = manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        scaler.scale(error(ddp, job.batch())).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@idiom(
    "manager.grad_scaler that finds an overflow, with manager.scheduler",
    PRECISION,
    "The step counts, the weights and the schedule stay, and the scale is halved in all groups.",
)
def followed_overflow(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    scaler = manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))
    scheduler = manager.scheduler(torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        scaler.scale(loss * (torch.inf if job.step % 3 == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@idiom(
    "manager.grad_scaler where one group overflows in a step that another one's error discards",
    PRECISION,
    "The scale stays as it was, in all groups.",
    was="with a scaler that was registered by hand the one group halved its scale, and all trained apart from then on",
)
def overflow_in_a_discarded_step(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    scaler = manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    has_failed = False
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        if job.step == 1 and not has_failed:
            has_failed = True
            if job.group == 0:
                manager.report_error(RuntimeError("a bad batch"))
            else:
                loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@idiom(
    "bfloat16 parameters with float32 master copies",
    PRECISION,
    "Register the master copies, because the optimizer trains them.",
)
def master_weights(job: Job) -> None:
    model = mlp().bfloat16()
    masters = nn.ParameterList(parameter.detach().float() for parameter in model.parameters())
    sgd = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9)
    job.manager(*states(model=model, masters=masters, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        inputs, targets = job.batch()
        model.zero_grad()
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs.bfloat16()), targets.bfloat16()).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)


@idiom("autocast to bfloat16", PRECISION)
@idiom("A fixed loss scale by hand", PRECISION)
def autocast_with_a_fixed_scale(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    while job.goes_on():
        inputs, targets = job.batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = ddp(inputs)
        (nn.functional.mse_loss(outputs.float(), targets) * 128).backward()
        for parameter in model.parameters():
            parameter.grad.div_(128)
        optimizer.step()


class Cast(nn.Module):
    """A model of another dtype than its inputs."""

    def __init__(self, body: nn.Module, head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head, self.dtype = body.to(dtype), head, dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs.to(self.dtype)))
        return self.head(hidden.to(self.head.weight.dtype))


@idiom("All of the model in bfloat16", PRECISION)
@idiom("Some parameters in bfloat16, others in float32", PRECISION)
@idiom("float64", PRECISION)
def each_dtype(job: Job) -> None:
    model = Each(
        all_bfloat16=Cast(nn.Linear(6, 8), nn.Linear(8, 3).bfloat16(), torch.bfloat16),
        mixed=Cast(nn.Linear(6, 8), nn.Linear(8, 3), torch.bfloat16),
        all_float64=Cast(nn.Linear(6, 8), nn.Linear(8, 3).double(), torch.float64),
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        errors(ddp, job.batch()).backward()
        optimizer.step()
