"""Skipped batches, stopping, resuming."""

from __future__ import annotations

import math

import torch
from idioms.harness import Job, states
from idioms.models import Box, error, make_steps, mlp, set_up
from idioms.table import Category, idiom
from torch import nn

FLOW = Category.FLOW


@idiom(
    "Skip a batch in all groups (one that is empty, or too long)",
    FLOW,
    "Call `continue` before the backward pass. The next `zero_grad` goes on with the step.",
)
def skip_in_all(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    iteration = 0
    while job.goes_on():
        iteration += 1
        optimizer.zero_grad()
        if manager.current_step() == 3 and iteration % 2:
            continue
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom(
    "Skip a batch in one group (a loss of NaN) by `continue`",
    FLOW,
    "The step of the other groups waits for this group, or they discard it and try again.",
)
def skip_in_one(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    skipped: set[int] = set()
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        if job.group == 1 and manager.current_step() == job.num_steps - 2 and not skipped:
            loss = loss * math.nan
        if not loss.isfinite():
            skipped.add(manager.current_step())
            continue
        loss.backward()
        optimizer.step()


@idiom(
    "zero_grad at both ends of the iteration, and one skipped batch in one group",
    FLOW,
    was="livelock: nearly all iterations were discarded, as each `zero_grad` abandoned the step that was open",
)
def zero_grad_at_both_ends(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.current
    skipped: set[int] = set()
    while job.goes_on():
        optimizer.zero_grad()
        if job.group == 1 and manager.current_step() == job.num_steps - 2 and not skipped:
            skipped.add(manager.current_step())
            continue
        error(ddp, job.batch()).backward()
        optimizer.step()
        if job.goes_on():
            optimizer.zero_grad()


@idiom(
    "Discard a step on purpose (report_error)",
    FLOW,
    "Call `manager.report_error(e)` in any group. All groups discard the step. Then go on with `step` as always.",
)
def report_error(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    reported = False
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        if job.group == 1 and manager.current_step() == job.num_steps - 2 and not reported:
            reported = True
            manager.report_error(ValueError("a bad batch"))
        loss.backward()
        optimizer.step()


@idiom(
    "Skip the step in all groups where an averaged value says so (gradient norm, NaN)",
    FLOW,
    "Averaged gradients are the same in all groups, so all groups decide equally. Draw another batch then.",
)
def skip_by_norm(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    spikes: list[int] = []
    while job.goes_on():
        optimizer.zero_grad()
        inputs, targets = job.batch()
        spike = 100 if job.step == job.num_steps - 2 and not spikes else 1
        (nn.functional.mse_loss(ddp(inputs), targets) * spike).backward()
        if nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]) > 10.0:
            spikes.append(job.step)
            continue
        optimizer.step()


@idiom(
    "Catch an error of a batch and go on (out of memory, a broken file)",
    FLOW,
    "If the error came before the backward pass, the next `zero_grad` is enough. The other groups discard their step.",
)
def catch_and_go_on(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    raised = False
    while job.goes_on():
        optimizer.zero_grad()
        try:
            loss = error(ddp, job.batch())
            if job.group == 1 and manager.current_step() == job.num_steps - 2 and not raised:
                raised = True
                raise MemoryError("no room for this batch")
        except MemoryError:
            continue
        loss.backward()
        optimizer.step()


@idiom("Stop early", FLOW, "Decide by a value that is averaged over the groups. Then all groups stop at the same step.")
def early_stop(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    patience = Box(best=1e9, bad=0)
    manager = job.manager(*states(model=model, sgd=sgd, patience=patience))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on() and patience.bad < 9:
        before = manager.current_step()
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        average = loss.detach().clone()
        manager.allreduce(average).wait()
        optimizer.step()
        if manager.current_step() > before:
            patience.bad = 0 if average.item() < patience.best else patience.bad + 1
            patience.best = min(average.item(), patience.best)


@idiom(
    "Count batches instead of steps (manager.batches_committed)",
    FLOW,
    "The count is the same in all groups, whichever groups contributed.",
)
def count_batches(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Box(batches=0)
    manager = job.manager(*states(model=model, sgd=sgd, seen=seen))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on() and manager.batches_committed() < 100:
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before:
            seen.batches = manager.batches_committed()


@idiom(
    "Resume from a checkpoint of your own",
    FLOW,
    "Save `manager.state_dict()` with the model, and give it to `manager.load_state_dict` before the first step.",
    dies=False,
)
def resume(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.current
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    manager.load_state_dict({"step": 3, "batches_committed": 6})
    make_steps(job, ddp, optimizer)


@idiom("Give a bad batch no weight (loss * 0, nan_to_num)", FLOW, "Its group still counts in the average.")
@idiom("A curriculum: longer or larger batches from a step on", FLOW, "Choose by `manager.current_step()`.")
@idiom(
    "Batches of different sizes in different groups",
    FLOW,
    "Each group's mean has the same weight.",
)
def uneven_batches(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        weight = 0.0 if (manager.current_step() + job.group) % 3 == 0 else 1.0
        (error(ddp, job.batch(rows=2 + manager.current_step() + job.group)) * weight).backward()
        optimizer.step()


@idiom(
    "Weigh each group's loss by its number of tokens",
    FLOW,
    "Before the backward pass, sum the tokens of the groups that contribute (`manager.allreduce` with SUM).",
)
def weigh_by_tokens(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    while job.goes_on():
        inputs, targets = job.batch(rows=3 + job.group)
        optimizer.zero_grad()
        tokens = torch.tensor(float(len(inputs)))
        manager.allreduce(tokens, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        loss = nn.functional.mse_loss(ddp(inputs), targets, reduction="sum")
        (loss * manager.num_participants() / tokens).backward()
        optimizer.step()


@idiom(
    "Divide the averaged gradients by this group's own number of tokens, as torchtune's recipe does",
    FLOW,
    "Each group steps with other gradients: the lighthouse finds that, and one group ends at the third time. Average the number,"
    " too: `manager.allreduce(num_tokens).wait()`.",
    was="nothing was said, and the groups differed after each step",
    refused="ReplicasDifferError",
    says=r"default\.model\.",
)
def divide_by_own_tokens(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    while job.goes_on():
        inputs, targets = job.batch(rows=3 + job.group)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets, reduction="sum").backward()
        for parameter in ddp.parameters():
            parameter.grad /= len(inputs)
        optimizer.step()


@idiom(
    "One group's accumulation window is shorter than the others'",
    FLOW,
    "All groups discard the step, and the error names the reason: the groups' collectives have to be the same"
    " in each step.",
    was="all waited for the whole `timeout`, and discarded every such step",
    compare="nothing",
)
def unequal_windows(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    windows = 0
    while job.goes_on():
        shorter = job.group == 1 and manager.current_step() == 2 and windows < 2
        windows += shorter
        optimizer.zero_grad()
        for _ in range(1 if shorter else 2):
            error(ddp, job.batch()).backward()
        optimizer.step()
