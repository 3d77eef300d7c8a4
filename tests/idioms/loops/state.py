"""What is registered."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
from idioms.harness import Job, states
from idioms.models import Box, error, make_steps, mlp
from idioms.table import Category, idiom
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.optim.lr_scheduler import StepLR

STATE = Category.STATE


def loop(job: Job, model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """The loop of the README, for what differs in the state alone."""
    ddp, optimizer = job.ddp(model), job.optimizer(inner)
    make_steps(job, ddp, optimizer)


@idiom(
    "Several pairs of functions (register_state_dict_fn)",
    STATE,
    "Register the same keys in all groups, before the first step.",
)
@idiom("set_state_dict_fns, as older scripts of torchft have it", STATE)
@idiom(
    "State functions that return copies on the host",
    STATE,
    "This costs a copy in each step in which a group may need the state.",
)
@idiom("DDP's own state_dict, with `module.` in its names", STATE, "Use the same names in all groups.")
@idiom("The wrapper's state_dict instead of the optimizer's", STATE)
@idiom("get_model_state_dict of DCP, with the optimizer's own state_dict", STATE)
def each_way_to_register(job: Job) -> None:
    """Each for a model of its own, and each optimizer in its own."""
    names = ("pairs", "copied", "of_ddp", "of_dcp")
    models = {name: mlp() for name in names}
    adamws = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in models.items()}
    scheduler = StepLR(adamws["pairs"], 2)
    manager = job.manager()
    ddps = {name: job.ddp(model) for name, model in models.items()}
    optimizers = {name: job.optimizer(adamw) for name, adamw in adamws.items()}

    load, get = states(model=models["copied"], adamw=adamws["copied"])
    manager.set_state_dict_fns(load, lambda: copy.deepcopy(get()))
    manager.register_state_dict_fn("model", models["pairs"].load_state_dict, models["pairs"].state_dict)
    manager.register_state_dict_fn("adamw", adamws["pairs"].load_state_dict, adamws["pairs"].state_dict)
    manager.register_state_dict_fn("scheduler", scheduler.load_state_dict, scheduler.state_dict)
    manager.register_state_dict_fn("of_ddp", ddps["of_ddp"].load_state_dict, ddps["of_ddp"].state_dict)
    wrapper = optimizers["of_ddp"]
    manager.register_state_dict_fn("of_wrapper", wrapper.load_state_dict, wrapper.state_dict)

    def load_by_dcp(state: dict[str, Any]) -> None:
        dcp_state.set_model_state_dict(models["of_dcp"], state["model"])
        adamws["of_dcp"].load_state_dict(state["adamw"])

    def get_by_dcp() -> dict[str, Any]:
        return {"model": dcp_state.get_model_state_dict(models["of_dcp"]), "adamw": adamws["of_dcp"].state_dict()}

    manager.register_state_dict_fn("of_dcp", load_by_dcp, get_by_dcp)
    while job.goes_on():
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        batch = job.batch()
        for ddp in ddps.values():
            error(ddp, batch).backward()
        for optimizer in optimizers.values():
            optimizer.step()


@idiom(
    "Numbers, strings, lists, tuples, None, numpy arrays, ordered dicts",
    STATE,
    "Return nothing else that would need pickle.",
)
def plain_values(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    things = Box(
        name="run",
        step=0,
        rates=[0.1, (0.2, None)],
        flag=True,
        table=np.zeros((2, 3)),
        order=OrderedDict(b=1, a=2),
        raw=b"\0\1",
    )
    manager = job.manager(*states(model=model, sgd=sgd, things=things))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() > before:
            things.step += 1
            things.rates = [0.1 * things.step, (0.2, None)]
            things.table = things.table + 1


@idiom(
    "A history of fixed length (deque) in the state",
    STATE,
    "Return a copy. Sets, dates, paths, enums and named tuples travel too (see the state format). Classes of"
    " your own do not.",
)
def history(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: deque[float] = deque(maxlen=3)

    def load(state: deque[float]) -> None:
        assert type(state) is deque and state.maxlen == 3
        losses.clear()
        losses.extend(state)

    manager = job.manager(*states(model=model, sgd=sgd))
    manager.register_state_dict_fn("losses", load, losses.copy)
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        before = manager.current_step()
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        average = loss.detach().clone()
        manager.allreduce(average).wait()
        optimizer.step()
        if manager.current_step() > before:
            losses.append(average.item())


@idiom(
    "An object of a class of your own in the state",
    STATE,
    "Return its content as plain values.",
    refused="UnsupportedValueError",
    says="thing",
)
def object_in_state(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(model.load_state_dict, lambda: {"model": model.state_dict(), "thing": object()})
    loop(job, model, sgd)


@idiom(
    "Other keys registered in one group than in the other",
    STATE,
    "Register the same keys in all groups.",
    refused="StateMismatchError",
    says="register the same",
)
def other_keys(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    if job.group == 1:
        manager.register_state_dict_fn("more", lambda state: None, lambda: {"a": 1})
    loop(job, model, sgd)


@idiom(
    "No state functions at all",
    STATE,
    "A group trains like this as long as it need not heal. If it starts beside others or comes back, it is"
    " refused, and the others train on.",
    refused="RefusedError",
    says="no state dict functions",
)
def nothing_registered(job: Job) -> None:
    model = mlp()
    job.manager()
    loop(job, model, torch.optim.SGD(model.parameters(), lr=0.1))


@idiom(
    "A state of model and optimizer by get_state_dict (DCP)",
    STATE,
    "`get_state_dict` steps an optimizer that has no state yet, and Adam counts that step. Register"
    " `optimizer.state_dict` instead.",
    was="an Adam step too many in a job's first life, in all groups alike",
    compare="groups",
)
def dcp_state_dict(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load_state_dict(state: dict[str, Any]) -> None:
        dcp_state.set_state_dict(model, adamw, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def state_dict() -> dict[str, Any]:
        model_state, optim_state = dcp_state.get_state_dict(model, adamw)
        return {"model": model_state, "optim": optim_state}

    job.manager(load_state_dict, state_dict)
    loop(job, model, adamw)


@idiom(
    "Part of the model left out of the state",
    STATE,
    "A warning names it. One group ends when it differs for the third time. Register everything that you train.",
    was="nothing was said",
    refused="ReplicasDifferError",
    says="no state_dict function returns",
)
def left_out(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(first=model[0], sgd=sgd))
    loop(job, model, sgd)


class SAM(torch.optim.Optimizer):
    """As in github.com/davda54/sam, without its options."""

    def __init__(self, params: Any, base_optimizer: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {"rho": 0.05, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


@idiom(
    "SAM as published, with an optimizer in it that has a momentum",
    STATE,
    "A warning names the momentum: it is in no state dict. Register `optimizer.base_optimizer` too.",
    was="nothing was said, and a group that came back went on with a momentum of its own",
    says="no registered state_dict returns: optimizer 1.state.0.momentum_buffer",
    compare="nothing",
)
def sam_as_published(job: Job) -> None:
    model = mlp()
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sam=sam))
    manager.guard_optimizer(sam)
    ddp = job.ddp(model)
    while job.goes_on():
        batch = job.batch()
        manager.start_quorum()
        sam.zero_grad()
        error(ddp, batch).backward()
        sam.first_step()
        error(ddp, batch).backward()
        if manager.should_commit():
            sam.second_step()


@idiom(
    "Parameters in another order in each group's optimizer (names in a set, PYTHONHASHSEED)",
    STATE,
    "What an optimizer remembers would land at other parameters. The group that differs waits, and its log names the first"
    " parameter. Sort the names.",
    was="a group that came back differed from then on, and nothing was said",
    compare="nothing",
    waits=True,
    says=r"it has parameter 0, default\.model\.1\.weight: 6x6 float32, they have parameter 0, default\.model\.0\.weight: 6x6",
)
def parameters_in_another_order(job: Job) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    first, second, last = (list(layer.parameters()) for layer in model)
    parameters = [*second, *first, *last] if job.group else [*first, *second, *last]
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    job.manager(*states(model=model, sgd=sgd))
    loop(job, model, sgd)


@idiom(
    "Groups with models of different sizes",
    STATE,
    "The group that differs waits, and its log says what differs.",
    was="Gloo ended all processes: the healthy ones too",
    gloo=True,
    compare="nothing",
    waits=True,
    says="cannot train with",
)
def models_of_other_size(job: Job) -> None:
    model = nn.Linear(6, 3) if job.group == 0 else nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    loop(job, model, sgd)


@idiom(
    "A load function that clears a weight before it reads what it was given (`w.zero_(); w.add_(s)`)",
    STATE,
    "A state may be received straight into the registered tensors, and the function is given these. The library sees that they"
    " were written to, and receives the state again into fresh memory.",
    was="the group trained from zeros, silently",
    says="wrote to the tensors that it was given",
    dies=False,
)
def load_zeroes_first(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.zero_().add_(state["model"][name])
        sgd.load_state_dict(state["sgd"])

    job.manager(load, lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()}, min_replica_size=2)
    loop(job, model, sgd)


@idiom(
    "The best loss on a group's own data, which is looked for from a step on",
    STATE,
    "Each group has its own from then on, and a group that comes back takes it over from another one.",
    was="equal at first, it was taken for something that has to be equal, and a group ended with a ReplicasDifferError",
    compare="groups",
    own=("/best/",),
    num_groups=3,
)
def own_best_loss(job: Job) -> None:
    model, best = mlp(), Box(loss=float("inf"))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd, best=best))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        if optimizer.step() and job.step > 3:
            best.loss = min(best.loss, loss.item())
