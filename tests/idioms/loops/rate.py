"""Learning rates and schedules."""

from __future__ import annotations

import torch
from idioms.harness import Job, states
from idioms.models import error, mlp
from idioms.table import Category, idiom

RATE = Category.RATE


@idiom(
    "Set lr from the step, between zero_grad and step",
    RATE,
    was="a group that came back took its first step with the learning rate of its source's step before",
    pending="item 3, with a death",
)
def lr_before_step(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + manager.current_step())
        optimizer.step()
