"""What a loop changes in its state between `zero_grad` and `step`, where steps are discarded: the plain loop never made these."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import Box, error, mlp
from idioms.table import Category, idiom
from torch import nn
from torch.distributed import ReduceOp
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

DISCARDED = Category.DISCARDED


class Discards:
    """Discards steps, each so many times, by errors of the group that never dies: the first three of a job, and the three from
    that on in which a group has come in."""

    def __init__(self, job: Job, times: int = 1) -> None:
        self._job = job
        self._left = dict.fromkeys(range(3), times)
        self._times, self._num_groups = times, 0

    def __call__(self) -> None:
        if self._job.group != 0:
            return
        step, num_groups = self._job.step, self._job.current.num_participants()
        if num_groups > self._num_groups:
            self._left |= dict.fromkeys({step, step + 1, step + 2} - self._left.keys(), self._times)
        self._num_groups = num_groups
        if self._left.get(step):
            self._left[step] -= 1
            self._job.current.report_error(ValueError("a bad batch"))


def train(
    job: Job,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    model: nn.Module,
    *,
    clip: Callable[[], object] | None = None,
    **parts: Any,
) -> None:
    """Train with a loss of inputs and targets; it knows the manager as `job.current`."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.manager(*states(model=model, sgd=sgd, **parts))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    discards = Discards(job)
    while job.goes_on():
        optimizer.zero_grad()
        inputs, targets = job.batch()
        value = loss(ddp(inputs), targets)
        discards()
        value.backward()
        if clip is not None:
            clip()
        optimizer.step()


class Centre(nn.Module):
    """DINO's: a buffer that each loss binds anew."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))
        self._job = [job]

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = F.mse_loss(outputs - self.center, targets)
        center = outputs.detach().mean(0, keepdim=True)
        self._job[0].current.allreduce(center).wait()
        self.center = self.center * 0.9 + center * 0.1
        return value


@idiom(
    "A centre that the loss averages over the groups (DINO)",
    DISCARDED,
    was="after a discarded step the groups differed from then on",
    num_discards=3,
    num_groups=3,
)
def centre(job: Job) -> None:
    loss = Centre(job)
    train(job, loss, mlp(), centre=loss)


@idiom(
    "A centre that is a variable of the script",
    DISCARDED,
    was="after a discarded step the groups differed from then on",
    num_discards=3,
)
def centre_in_a_variable(job: Job) -> None:
    model, center = mlp(), torch.zeros(3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def load(state: dict[str, Any]) -> None:
        nonlocal center
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])
        center = state["centre"]

    manager = job.manager(load, lambda: {"model": model.state_dict(), "sgd": sgd.state_dict(), "centre": center})
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    discards = Discards(job)
    while job.goes_on():
        inputs, targets = job.batch()
        outputs = ddp(inputs)
        optimizer.zero_grad()
        value = F.mse_loss(outputs - center, targets)
        mean = outputs.detach().mean(0)
        manager.allreduce(mean).wait()
        center = 0.9 * center + 0.1 * mean
        discards()
        value.backward()
        optimizer.step()


class Codebook(nn.Module):
    """VQ-VAE's, with averages that each forward pass moves in place, past autograd's counter of writes."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())
        self._job = [job]

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chosen = F.one_hot(torch.cdist(outputs.detach(), self.codes).argmin(1), 5).float()
        flat = torch.cat([chosen.sum(0), (chosen.T @ outputs.detach()).flatten()])
        self._job[0].current.allreduce(flat, reduce_op=ReduceOp.SUM).wait()
        nearest = chosen @ self.codes
        self.sizes.data.lerp_(flat[:5], 0.1)
        self.sums.data.lerp_(flat[5:].view(5, 3), 0.1)
        self.codes.data.copy_(self.sums / self.sizes[:, None])
        return F.mse_loss(outputs, targets) + F.mse_loss(outputs, nearest)


@idiom(
    "A codebook of moving averages (VQ-VAE)",
    DISCARDED,
    was="after a discarded step the groups differed from then on",
    num_discards=3,
    num_groups=3,
)
def codebook(job: Job) -> None:
    loss = Codebook(job)
    train(job, loss, mlp(), codebook=loss)


class SyncedNorm(nn.Module):
    """Batch normalisation by statistics of all groups, written by hand."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self._job = [job]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        both = torch.stack([inputs.detach().mean(0), inputs.detach().square().mean(0)])
        self._job[0].current.allreduce(both).wait()
        with torch.no_grad():
            self.mean.lerp_(both[0], 0.1)
            self.var.lerp_(both[1] - both[0] ** 2, 0.1)
        return (inputs - self.mean.clone()) / (self.var.clone() + 1e-5).sqrt()


@idiom(
    "Batch normalisation over the groups, written by hand",
    DISCARDED,
    was="after a discarded step the groups differed from then on",
    num_discards=3,
    num_groups=3,
)
def synced_norm(job: Job) -> None:
    train(job, F.mse_loss, nn.Sequential(nn.Linear(6, 8), SyncedNorm(job), nn.ReLU(), nn.Linear(8, 3)))


@idiom(
    "BatchNorm, where steps are discarded",
    DISCARDED,
    "A batch counts in the running statistics if its step counts.",
    num_discards=3,
    num_groups=1,
    dies=False,
)
def batch_norm_discarded(job: Job) -> None:
    train(job, F.mse_loss, nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


class Momentum(nn.Module):
    """MoCo's and BYOL's: the forward pass moves a second network, binding its parameters' data anew."""

    def __init__(self) -> None:
        super().__init__()
        self.online = mlp()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.online.parameters(), self.target.parameters(), strict=True):
            other.data = other.data * 0.9 + one.data * 0.1
        return self.online(inputs) + self.target(inputs)


@idiom(
    "A momentum network that moves in the forward pass (MoCo, BYOL)",
    DISCARDED,
    "If the first step of a group that has come back is discarded, it has no copy of what is large: it loads it again.",
    says="came to another state of step",
    was="after a discarded step the groups differed from then on",
    num_discards=3,
)
def momentum_network(job: Job) -> None:
    train(job, F.mse_loss, Momentum())


@idiom(
    "A history of norms to clip by, remembered before the step",
    DISCARDED,
    "Numbers, lists and deques go back, too, if the name under which your loop has them is the name in the state.",
    was="after a discarded step the groups differed from then on",
    num_discards=3,
    num_groups=3,
)
def clip_history(job: Job) -> None:
    model, history = mlp(), Box(mean=1.0, norms=deque([1.0], maxlen=4))

    def clip() -> None:
        norm = clip_grad_norm_(model.parameters(), history.mean)
        history.norms.append(norm.item())
        history.mean = sum(history.norms) / len(history.norms)

    def load(state: dict[str, Any]) -> None:
        history.mean, history.norms = state["mean"], deque(state["norms"], maxlen=4)

    view = Box()
    view.__dict__.update(state_dict=lambda: {"mean": history.mean, "norms": list(history.norms)}, load_state_dict=load)
    train(job, F.mse_loss, model, clip=clip, history=view)


@idiom(
    "Averaged weights and a count behind zero_grad, where steps are discarded",
    DISCARDED,
    "The tail of a loop after `zero_grad` belongs to the step before, up to the forward pass of `DistributedDataParallel`.",
    num_discards=3,
)
def tail_behind_zero_grad(job: Job) -> None:
    model, count = mlp(), Box(steps=0)
    average = copy.deepcopy(model).requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, average=average, count=count, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    discards = Discards(job)
    optimizer.zero_grad()
    while job.goes_on():
        value = error(ddp, job.batch())
        discards()
        value.backward()
        counts = optimizer.step()
        optimizer.zero_grad()
        if counts:
            count.steps += 1
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.detach(), 0.1)


@idiom(
    "A look at the loss after each step, in training mode, and then the averaged weights",
    DISCARDED,
    "Look at the model in `torch.no_grad()`, or in `model.eval()`. A pass that could be trained begins the next step, unless your"
    " loop calls `zero_grad` before its forward pass, as this one does. What follows it belongs to that step then.",
    was="after a discarded step the average lacked the step before, in all groups alike",
    num_discards=3,
)
def look_after_the_step(job: Job) -> None:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, average=average, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    discards = Discards(job)
    while job.goes_on():
        optimizer.zero_grad()
        value = error(ddp, job.batch())
        discards()
        value.backward()
        counts = optimizer.step()
        error(ddp, (torch.ones(4, 6), torch.ones(4, 3))).item()
        if counts:
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.detach(), 0.1)


class SAM(torch.optim.Optimizer):
    """As in davda54/sam: the first step perturbs the weights, the second puts them back and steps."""

    def __init__(self, parameters: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.base.step()


@idiom(
    "Perturb the weights, and put them back only if the step counts (SAM)",
    DISCARDED,
    "If your loop writes to the weights before the vote, they are copied as each step begins, which the log says once. Hold"
    " `manager.state_dict_lock.write()` around each change.",
    was="after a discarded step the groups differed from then on",
    num_discards=20,
    num_groups=3,
    dies=False,
)
def sam(job: Job) -> None:
    train_by_sam(job, times=7)


@idiom(
    "The same, with what SAM keeps registered too",
    DISCARDED,
    says="came to another state of step",
    was="a group that came back never came in: its parameters were called otherwise",
    num_discards=3,
)
def sam_registered(job: Job) -> None:
    train_by_sam(job, "sam")


def train_by_sam(job: Job, *more: str, times: int = 1) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sam = SAM(model.parameters(), sgd)
    manager = job.manager(*states(model=model, sgd=sgd, **{name: sam for name in more}))
    manager.guard_optimizer(sgd)
    ddp = job.ddp(model)
    discards = Discards(job, times)
    while job.goes_on():
        manager.start_quorum()
        batch = job.batch()
        for is_second in (False, True):
            sam.zero_grad()
            error(ddp, batch).backward()
            if not is_second:
                with manager.state_dict_lock.write():
                    sam.first_step()
                discards()
        if manager.should_commit():
            with manager.state_dict_lock.write():
                sam.second_step()


@idiom(
    "Skip a step after the vote, in all groups alike (an overflow)",
    DISCARDED,
    "The step counts, and its weights are those of the step before.",
    num_discards=3,
    num_groups=3,
)
def skips_after_the_vote(job: Job) -> None:
    model, scale = mlp(), Box(scale=4.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd, scale=scale))
    manager.guard_optimizer(sgd)
    ddp = job.ddp(model)
    discards = Discards(job)
    while job.goes_on():
        manager.start_quorum()
        sgd.zero_grad()
        value = error(ddp, job.batch()) * (float("inf") if job.step % 4 == 2 else scale.scale)
        discards()
        value.backward()
        if not manager.should_commit():
            continue
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        if not norm.isfinite():
            scale.scale /= 2
            continue
        sgd.step()


@idiom(
    "A generator that learns in its own step through samples, and BatchNorm's statistics, of a critic's step that is discarded",
    DISCARDED,
    was="torch's RuntimeError in the backward pass, 'modified by an inplace operation': what the step had written went back",
    own=("running_",),
    compare="groups",  # a group that comes back has drawn its first noise for a step of its own
)
def generator_of_a_discarded_step(job: Job) -> None:
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(3, 1)
    adam_g, adam_c = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    job.manager(*states(generator=generator, critic=critic, adam_g=adam_g, adam_c=adam_c))
    ddp_g, ddp_c = job.ddp(generator), job.ddp(critic)
    optimizer_g, optimizer_c = job.optimizer(adam_g), job.optimizer(adam_c)
    discards = Discards(job)
    while job.goes_on():
        noise, real = job.batch()
        optimizer_c.zero_grad()
        fake = ddp_g(noise)
        value = ddp_c(fake.detach()).mean() - ddp_c(real).mean()
        discards()
        value.backward()
        optimizer_c.step()
        optimizer_g.zero_grad()
        (-ddp_c(fake).mean()).backward()
        optimizer_g.step()


@idiom(
    "Gradients filtered by averages in a dict, which the first step fills (Grokfast)",
    DISCARDED,
    was="what came into being in a discarded step stayed: the groups differed, and ended by a ReplicasDifferError",
    num_discards=3,
)
def filtered_gradients(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    averages: dict[str, torch.Tensor] = {}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])
        averages.clear()
        averages.update(state["averages"])

    state = lambda: {"model": model.state_dict(), "sgd": sgd.state_dict(), "averages": dict(averages)}  # noqa: E731
    job.manager(load, state, use_async_quorum=False)
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    discards = Discards(job)
    while job.goes_on():
        optimizer.zero_grad()
        value = error(ddp, job.batch())
        discards()
        value.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            average = averages.get(name)
            averages[name] = parameter.grad.clone() if average is None else average * 0.9 + parameter.grad * 0.1
            parameter.grad.add_(averages[name], alpha=2.0)
        optimizer.step()
