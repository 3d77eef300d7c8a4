"""The order of a loop's lines: what it reads before a step begins, and what it does after `zero_grad`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.loops.discarded import Discards
from idioms.models import Box, error, mlp, set_up
from idioms.table import Category, idiom
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

ORDER = Category.ORDER
READS = "A group that comes back has the others' state before its next iteration begins, so what it reads at the top is theirs."
TAIL = (
    "These lines belong to the step before `zero_grad`. They may come after it: a step begins with the forward pass, not with"
    " `zero_grad`."
)


class Counter(Box):
    """Counts what a loop counts."""


def lerp(average: nn.Module, model: nn.Module, decay: float) -> None:
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - decay)


def reads_at_top(name: str, *, manager: dict[str, Any], **options: Any) -> Callable[[Any], Any]:
    def enter(loop: Callable[..., None]) -> Callable[..., None]:
        def run(job: Job) -> None:
            loop(job, **manager)

        run.__name__ = f"{loop.__name__}{options.pop('suffix', '')}"
        idiom(name, ORDER, READS, was="differed for ever, silently", **options)(run)
        return loop

    return enter


@reads_at_top("The decay of an average by the step, read at the top of the iteration", manager={})
@reads_at_top("The same, with `use_async_quorum=False`", manager={"use_async_quorum": False}, suffix="_sync")
@reads_at_top("The same, with three groups", manager={}, suffix="_three", num_groups=3)
def ema_decay_read_at_top(job: Job, **options: Any) -> None:
    model = mlp()
    ema = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, adamw=adamw, ema=ema), **options)
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        step = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            lerp(ema, model, min(0.9, (1 + step) / (10 + step)))


@reads_at_top("Weight decay by hand, by the step that was read at the top", manager={})
def decay_by_hand_read_at_top(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.05, momentum=0.9)
    manager = job.current
    while job.goes_on():
        step = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            with manager.state_dict_lock.write(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 - 0.01 * (1 + step))


@reads_at_top("A target network copied every third step, counted at the top", manager={})
def hard_target_read_at_top(job: Job) -> None:
    model = mlp()
    target = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, adamw=adamw, target=target))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        step = manager.current_step()
        optimizer.zero_grad()
        x, y = job.batch()
        with torch.no_grad():
            y = y + 0.1 * target(x)
        error(ddp, (x, y)).backward()
        if optimizer.step() and step % 3 == 0:
            target.load_state_dict(model.state_dict())


@reads_at_top("The learning rate of the next step, set after this one by the step that was read at the top", manager={})
def rate_of_next_read_at_top(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    while job.goes_on():
        step = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (2 + step)


LATER = (
    "A group that comes back counts from 0, so it moves this in another step than the others. That is found 4, 8, 16, ... steps"
    " after its return, or after the last time, and theirs is loaded. A warning says so each time. Register the counter."
)
DIFFERED = "came to another state of step .* differed. It has loaded theirs"


@idiom(
    "An average of the weights moved in each fourth step, by a counter that is not registered",
    ORDER,
    LATER,
    was="named once, and it differed from then on",
    says=DIFFERED,
    compare="groups",
    late=("/ema/",),
)
def ema_each_fourth_step_by_own_count(job: Job) -> None:
    model, num_here = mlp(), 0
    ema = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw, ema=ema))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            num_here += 1
            if num_here % 4 == 0:
                lerp(ema, model, 0.9)


@idiom(
    "A target network copied in each thirteenth step, by a counter that is not registered",
    ORDER,
    "A group that comes back counts from 0. What has moved in the others alone since its return is given to it once, 4, 8, 16,"
    " ... steps after that. Once it has moved there as well, in other steps, it is each group's own, and a warning says so."
    " Register the counter.",
    was="each group's own as soon as it had moved in one of them, and it differed from then on",
    compare="groups",
    late=("/target/",),
)
def target_each_thirteenth_step_by_own_count(job: Job) -> None:
    model, num_here = mlp(), 0
    target = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw, target=target))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            num_here += 1
            if num_here % 13 == 0:
                target.load_state_dict(model.state_dict())


@idiom(
    "A clock of epochs and batches, whose first epoch ends by a counter that is not registered",
    ORDER,
    LATER,
    was="it differed from then on, silently",
    says=DIFFERED,
    compare="groups",
    late=("/clock/",),
)
def epoch_by_own_count(job: Job) -> None:
    model, num_here = mlp(), 0
    clock = Box(now=[0, 0])
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw, clock=clock))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            epoch, batch = clock.now
            num_here += 1
            clock.now = [epoch + (num_here == 3), batch + 1]


@idiom("nanoGPT's order: `zero_grad`, then the count from which the learning rate comes", ORDER, TAIL)
def count_after_zero_grad(job: Job) -> None:
    model, counter = mlp(), Box(iter_num=0)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw, counter=counter))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    optimizer.zero_grad()
    while job.goes_on():
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + counter.iter_num)
        error(ddp, job.batch()).backward()
        counts = optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        counter.iter_num += counts


@idiom("torchtune's order: `step`, `zero_grad`, then the count and the schedule", ORDER, TAIL)
def schedule_after_zero_grad(job: Job) -> None:
    model, counter = mlp(), Box(global_step=0)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = StepLR(adamw, 2, 0.5)
    job.manager(*states(model=model, adamw=adamw, counter=counter, schedule=schedule))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    optimizer.zero_grad()
    while job.goes_on():
        error(ddp, job.batch()).backward()
        counts = optimizer.step()
        optimizer.zero_grad()
        if counts:
            counter.global_step += 1
            schedule.step()


@idiom("diffusers' order: `step`, schedule, `zero_grad`, then the average of the weights", ORDER, TAIL)
def ema_after_zero_grad(job: Job) -> None:
    model, counter = mlp(), Box(global_step=0)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = StepLR(adamw, 2, 0.5)
    job.manager(*states(model=model, adamw=adamw, counter=counter, schedule=schedule, ema=ema))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        error(ddp, job.batch()).backward()
        counts = optimizer.step()
        if counts:
            schedule.step()
        optimizer.zero_grad()
        if counts:
            ema.update_parameters(model)
            counter.global_step += 1


@idiom(
    "The same, with the averaged weights swapped in to validate now and then, and with weights made anew (ReLoRA)",
    ORDER,
    TAIL + " So may lines that write to the weights now and then.",
    was="from the first such write on `zero_grad` began each step, so a group that came back lacked what follows it for ever: it"
    " ended with a ReplicasDifferError, and three groups discarded ten steps for one that counted",
)
def validation_after_zero_grad(job: Job) -> None:
    model, counter = mlp(), Counter(global_step=0)
    ema = copy.deepcopy(model).requires_grad_(False)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, adamw=adamw, counter=counter, ema=ema))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        error(ddp, job.batch()).backward()
        counts = optimizer.step()
        optimizer.zero_grad()
        if not counts:
            continue
        counter.global_step += 1
        lerp(ema, model, 0.9)
        if counter.global_step == 2:
            kept = copy.deepcopy(model.state_dict())
            with manager.state_dict_lock.write():
                model.load_state_dict(ema.state_dict())
            with torch.no_grad():
                error(model, job.batch())
            with manager.state_dict_lock.write():
                model.load_state_dict(kept)
        if counter.global_step in (2, 12):
            with manager.state_dict_lock.write(), torch.no_grad():
                model[0].weight[2].zero_()


@idiom(
    "DINO's order: rates by its own count, teacher, student, a loss that averages its centre, `zero_grad`, the teacher's step",
    ORDER,
    "The forward pass of `DistributedDataParallel` begins the step, so what the loss averages belongs to it.",
    was="a group that came in crashed in its backward pass, or each step was discarded",
    num_discards=3,
)
def dino(job: Job) -> None:
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    centre, counter = nn.Module(), Counter(it=0)
    centre.register_buffer("center", torch.zeros(1, 3))
    adamw = torch.optim.AdamW(student.parameters(), lr=1e-2)
    parts = {"student": student, "teacher": teacher, "centre": centre, "counter": counter, "adamw": adamw}
    manager = job.manager(*states(**parts))
    ddp, optimizer = job.ddp(student), job.optimizer(adamw)
    discards = Discards(job)
    while job.goes_on():
        it = counter.it
        for group in adamw.param_groups:
            group["lr"], group["weight_decay"] = 1e-2 / (1 + it), 0.01 * (1 + it)
        inputs, targets = job.batch()
        with torch.no_grad():
            taught = teacher(inputs)
        loss = F.mse_loss(ddp(inputs), targets + taught - centre.center)
        mean = taught.mean(0, keepdim=True)
        manager.allreduce(mean).wait()
        centre.center.mul_(0.9).add_(mean * 0.1)
        optimizer.zero_grad()
        discards()
        loss.backward()
        if optimizer.step():
            lerp(teacher, student, 0.9 + 0.01 * it)
            counter.it += 1


@idiom(
    "A diffusion trainer's order: accumulate, clip, `step`, `zero_grad`, count, then an average that counts by itself",
    ORDER,
    TAIL,
)
def diffusion(job: Job) -> None:
    model, counter = mlp(), Counter(step=0)
    average = nn.Module()
    average.model = copy.deepcopy(model)
    average.register_buffer("initted", torch.tensor(False))
    average.register_buffer("step", torch.tensor(0))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adam=adam, average=average, counter=counter))
    ddp, optimizer = job.ddp(model), job.optimizer(adam)
    while job.goes_on():
        for _ in range(2):
            (error(ddp, job.batch()) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        counts = optimizer.step()
        optimizer.zero_grad()
        counter.step += counts
        if counts:
            step = int(average.step)
            average.step += 1
            if not average.initted:
                average.model.load_state_dict(model.state_dict())
                average.initted.copy_(torch.tensor(True))
            lerp(average.model, model, min(0.9, 1 - (1 + step) ** -0.7))


@idiom(
    "A count of batches at the top of the iteration, which says when a window is over (`if count % 2: continue`)",
    ORDER,
    "Register it. If a step is discarded, it goes back to what it was as the step's first forward pass began.",
    was="it went back at the discard, and the loop counted on: the next window was shorter; three groups discarded ten steps for"
    " one that counted, as another one came in",
    num_discards=3,
)
@idiom("The same with a count at the end of the iteration", ORDER, num_discards=3)
def count_of_batches(job: Job) -> None:
    model, counter = mlp(), Counter(at_top=0, at_end=0)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adam=adam, counter=counter))
    ddp, optimizer = job.ddp(model), job.optimizer(adam)
    discards = Discards(job)
    while job.goes_on():
        counter.at_top += 1
        loss = error(ddp, job.batch()) / 2
        if counter.at_end % 2:
            discards()
        loss.backward()
        if counter.at_top % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        counter.at_end += 1
