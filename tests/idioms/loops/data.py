"""Data, logging, random numbers."""

from __future__ import annotations

import logging

import numpy as np
import torch
from idioms.harness import Job, states
from idioms.models import Box, error, mlp, set_up
from idioms.table import Category, idiom
from torch import nn
from torch.profiler import record_function
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchft_ckpt import DistributedSampler

DATA = Category.DATA
logger = logging.getLogger(__name__)


def dataset() -> TensorDataset:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].tanh())


@idiom(
    "Take the batch by the step (an index into the data)",
    DATA,
    "A step then trains on the same samples, whatever was discarded before it. A group that comes back reads"
    " other samples in its first iteration, which does not count.",
)
def batch_by_step(job: Job) -> None:
    model, data = mlp(), dataset()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        first = 8 * manager.current_step() + 4 * job.group
        error(ddp, data[first : first + 4]).backward()
        optimizer.step()


@idiom(
    "A DataLoader with DistributedSampler, in epochs",
    DATA,
    "Call `set_epoch` by the step. A batch of a discarded step is not read again. So if a group has died, the"
    " order of batches differs from a plain loop's. The groups stay equal.",
    compare="groups",
)
def distributed_sampler(job: Job) -> None:
    model, data = mlp(), dataset()
    sampler = DistributedSampler(data, job.group, 2, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        sampler.set_epoch(manager.current_step() // 3)
        for batch in loader:
            if not job.goes_on():
                break
            optimizer.zero_grad()
            error(ddp, batch).backward()
            optimizer.step()


@idiom(
    "StatefulDataLoader",
    DATA,
    "Each group has its own place in the data. Save it with `Checkpointer.save(rank_state=...)`, and do not"
    " register it.",
    compare="groups",
)
def stateful_dataloader(job: Job) -> None:
    model = mlp()
    loader = StatefulDataLoader(dataset(), batch_size=4, shuffle=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    batches = iter(loader)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, next(batches)).backward()
        optimizer.step()
        loader.state_dict()


@idiom(
    "Register the place in the data, the same for all groups",
    DATA,
    "Count it only if the step counted. A group that returns goes on where the other groups are.",
)
def registered_place(job: Job) -> None:
    model, data = mlp(), dataset()
    place = Box(epoch=0, sample=0, seen=[])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd, place=place))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        first = place.sample + 4 * job.group
        error(ddp, data[first : first + 4]).backward()
        optimizer.step()
        if manager.current_step() > before:
            place.sample += 8
            place.seen = [*place.seen, place.sample]
            if place.sample >= 40:
                place.epoch, place.sample = place.epoch + 1, 0


@idiom(
    "Average metrics over the groups (manager.allreduce)",
    DATA,
    "Average them in the step: between `zero_grad` and `step`, the same number of values in all groups."
    " A group gets its own values back in an iteration that it computes alone.",
)
def averaged_metrics(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    totals = Box(sum=0.0)
    manager = job.manager(*states(model=model, sgd=sgd, totals=totals))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        inputs, targets = job.batch()
        outputs = ddp(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        loss.backward()
        metrics = torch.stack([loss.detach(), (outputs - targets).abs().amax().detach()])
        manager.allreduce(metrics).wait()
        optimizer.step()
        if manager.current_step() > before:
            totals.sum += metrics.sum().item()


@idiom(
    "The largest or smallest value over the groups (allreduce with MAX or MIN)",
    DATA,
    "The result is over the groups that contribute.",
    was="a group that healed took part with zeros, so the smallest of positive values was 0",
)
def extreme_metrics(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    extremes = Box(largest=0.0, smallest=0.0)
    manager = job.manager(*states(model=model, sgd=sgd, extremes=extremes))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        largest, smallest = -loss.detach(), loss.detach().clone()
        manager.allreduce(largest, reduce_op=torch.distributed.ReduceOp.MAX).wait()
        manager.allreduce(smallest, reduce_op=torch.distributed.ReduceOp.MIN).wait()
        optimizer.step()
        if manager.current_step() > before:
            extremes.largest, extremes.smallest = largest.item(), smallest.item()


@idiom(
    "Metric vectors of different lengths in different groups",
    DATA,
    "All groups discard the step, and the error names the reason.",
    was="Gloo ended all processes: the healthy ones too",
    gloo=True,
    compare="nothing",
)
def metrics_of_other_length(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    iterations = 0
    while job.goes_on():
        iterations += 1
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        odd = job.group == 1 and iterations == 4
        manager.allreduce(torch.ones(5 if odd else 3)).wait()
        optimizer.step()


@idiom("Log loss.item() in every iteration", DATA, "It is this group's loss.")
@idiom("torch.profiler (record_function) in the loop", DATA)
@idiom("Forward hooks, backward hooks, activations kept for logging", DATA)
@idiom("Norms of each layer's gradients, histograms of the weights", DATA)
def look_on(job: Job) -> None:
    model = mlp()
    seen: list[float] = []
    model[0].register_forward_hook(lambda _, inputs, output: seen.append(output.detach().norm().item()))
    model[2].register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0].norm().item()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        with record_function("forward"):
            loss = error(ddp, job.batch())
        loss.backward()
        norms = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
        optimizer.step()
        logger.debug("step %d, loss %.3f", job.step, loss.item())
        assert all(value == value for value in norms.values())
        [np.histogram(parameter.detach().numpy(), bins=4) for parameter in model.parameters()]


@idiom(
    "Random numbers that all groups share (a mask, a permutation)",
    DATA,
    "Seed a generator of your own by the step, after `zero_grad`.",
)
def shared_randomness(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        inputs, targets = job.batch()
        mask = torch.rand(6, generator=torch.Generator().manual_seed(manager.current_step())) > 0.3
        error(ddp, (inputs * mask, targets)).backward()
        optimizer.step()


@idiom(
    "Register the state of a random generator",
    DATA,
    "A group that comes back goes on with its source's numbers. Draw only if the step counted, or draw after"
    " `zero_grad` in all groups.",
)
def registered_generator(job: Job) -> None:
    model = mlp()
    generator = torch.Generator().manual_seed(job.group)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, adamw=adamw))
    generator.manual_seed(0)
    manager.register_state_dict_fn("generator", lambda state: generator.set_state(state.clone()), generator.get_state)
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before:
            with torch.no_grad():
                model[2].bias.add_(torch.randn(3, generator=generator), alpha=0.01)
