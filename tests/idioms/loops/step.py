"""The step and the optimizer."""

from __future__ import annotations

import torch
from idioms.harness import Job, states
from idioms.models import error, mlp
from idioms.table import Category, idiom

STEP = Category.STEP


@idiom("DistributedDataParallel, AdamW, zero_grad, backward, step", STEP, "The loop of the README.")
def readme_loop(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
