"""Models."""

from __future__ import annotations

import torch
from idioms.harness import Job, states
from idioms.models import Chosen, error
from idioms.table import Category, idiom
from torch import nn

MODEL = Category.MODEL


def train(job: Job, model: nn.Module, **options: object) -> None:
    """The loop of the README, for loops that differ in the model alone."""
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model, **options), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom(
    "Mixture of experts: each group routes its batch to other experts",
    MODEL,
    was="what one group used and another did not was averaged in one and left in the other: the groups drifted apart",
    pending="item 4",
)
def mixture_of_experts(job: Job) -> None:
    train(job, Chosen(4, lambda: [(job.step + 3 * job.group) % 4]))


@idiom(
    "LayerDrop: each group leaves other layers out",
    MODEL,
    was="as with experts: the groups drifted apart",
    pending="item 4",
)
def layer_drop(job: Job) -> None:
    train(job, Chosen(3, lambda: [layer for layer in range(3) if (job.step * 5 + layer * 3 + job.group * 2) % 4]))


@idiom(
    "Alternating branches, by the step",
    MODEL,
    "A parameter that nobody used keeps its gradient of None.",
    was="a group that came back, and did not know the step yet, took another branch: its unused parameters kept no gradient",
    pending="item 4, with a death",
)
def alternating_branches(job: Job) -> None:
    train(job, Chosen(3, lambda: [job.step % 3]))
