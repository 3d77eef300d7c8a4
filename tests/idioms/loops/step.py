"""The step and the optimizer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import Each, error, errors, make_steps, mlp, set_up
from idioms.table import Category, idiom
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEP = Category.STEP


def train(
    job: Job, make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], **ddp_options: Any
) -> None:
    """The loop of the README, with another optimizer or other options of DDP."""
    model = mlp()
    inner = make_optimizer(model.parameters())
    job.manager(*states(model=model, optimizer=inner))
    ddp, optimizer = job.ddp(model, **ddp_options), job.optimizer(inner)
    make_steps(job, ddp, optimizer)


@idiom("DistributedDataParallel, AdamW, zero_grad, backward, step", STEP, "This is the loop of the README.")
def readme_loop(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom("Three replica groups", STEP, num_groups=3)
def three_groups(job: Job) -> None:
    train(job, lambda parameters: torch.optim.Adam(parameters, lr=1e-2))


@idiom("Gradients as views of DDP's buckets (gradient_as_bucket_view)", STEP)
@idiom("Small buckets (bucket_cap_mb)", STEP, "Use the same size in all groups.")
def bucket_options(job: Job) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    train(job, adamw, gradient_as_bucket_view=True, bucket_cap_mb=1e-4)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                    momentum.lerp_(parameter.grad, 1 - group["beta"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-1),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "maximize": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, dampening=0.1, weight_decay=0.1, maximize=True),
    "own": Lion,
}


@idiom("SGD with Nesterov momentum", STEP)
@idiom("Adam with amsgrad", STEP)
@idiom("RMSprop, centred, with momentum", STEP)
@idiom("Adagrad", STEP)
@idiom("NAdam", STEP)
@idiom("foreach=True", STEP)
@idiom("fused=True", STEP)
@idiom("A learning rate that is a tensor", STEP)
@idiom("maximize=True, weight decay, dampening", STEP)
@idiom("An optimizer class of your own", STEP)
def each_optimizer(job: Job) -> None:
    model = Each(**{name: mlp() for name in (*OPTIMIZERS, "tensor_lr")})
    inner = {name: make(model.models[name].parameters()) for name, make in OPTIMIZERS.items()}
    # Not in the table above: each group has a tensor of its own.
    inner["tensor_lr"] = torch.optim.AdamW(model.models["tensor_lr"].parameters(), lr=torch.tensor(1e-2), foreach=False)
    job.manager(*states(model=model, **inner))
    ddp, optimizers = job.ddp(model), [job.optimizer(optimizer) for optimizer in inner.values()]
    while job.goes_on():
        for optimizer in optimizers:
            optimizer.zero_grad()
        errors(ddp, job.batch()).backward()
        for optimizer in optimizers:
            optimizer.step()


@idiom(
    "An optimizer class of your own whose state has tensors, numbers and names of its own in place of dicts",
    STEP,
    was="AttributeError: 'int' object has no attribute 'values', as the state was first captured",
)
def optimizer_state_of_any_shape(job: Job) -> None:
    class Named(torch.optim.Optimizer):
        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.state["calls"] = self.state.get("calls", 0) + 1
            mean = self.state.setdefault("mean", torch.zeros(2))
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        momentum = self.state.setdefault(parameter, torch.zeros_like(parameter))
                        momentum.mul_(0.9).add_(parameter.grad)
                        mean.lerp_(parameter.grad.mean().expand(2), 0.1)
                        parameter.sub_(momentum - mean[0], alpha=group["lr"] / self.state["calls"])

    train(job, Named)


@idiom("Several parameter groups, with their own settings", STEP)
def param_groups(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
    )
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    make_steps(job, ddp, optimizer)


@idiom("zero_grad(set_to_none=False)", STEP)
def zero_in_place(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    while job.goes_on():
        optimizer.zero_grad(set_to_none=False)
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom(
    "zero_grad at the end of the iteration",
    STEP,
    "You may call `zero_grad` once before the loop too, or leave that out: `DistributedDataParallel` begins"
    " the first step in its forward pass.",
)
def zero_grad_at_the_end(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    while job.goes_on():
        error(ddp, job.batch()).backward()
        optimizer.step()
        if job.goes_on():
            optimizer.zero_grad()


@idiom(
    "zero_grad twice in an iteration, before the batch and before the backward pass",
    STEP,
    was="each call began a step and broke the quorum of the one before; a group that came back might never get in",
)
def zero_grad_twice(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    while job.goes_on():
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@idiom(
    "Forward pass, then zero_grad, then backward (the order of torch's tutorials)",
    STEP,
    "`DistributedDataParallel` begins the step in its forward pass. If you do not use it, call `zero_grad`"
    " before the forward pass.",
    was="in the first step of a job all groups but one ended with torch's RuntimeError, 'modified by an inplace operation'",
)
def forward_before_zero_grad(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    while job.goes_on():
        loss = error(ddp, job.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@idiom("model.zero_grad() besides the optimizer's", STEP)
def model_zero_grad(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    while job.goes_on():
        optimizer.zero_grad()
        ddp.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        ddp.zero_grad()


@idiom(
    "Wait for the quorum before the forward pass (use_async_quorum=False)",
    STEP,
    "A group that returns loads the state in the same place as without. Each step waits for its quorum.",
)
def synchronous_quorum(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.manager(*states(model=model, sgd=sgd), use_async_quorum=False)
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    make_steps(job, ddp, optimizer)


@idiom(
    "Without the Optimizer wrapper: start_quorum, should_commit",
    STEP,
    "Name the optimizer by `manager.guard_optimizer`. Then the library never reads the state while the"
    " optimizer steps.",
)
def own_commit(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    manager.guard_optimizer(sgd)
    ddp = job.ddp(model)
    while job.goes_on():
        manager.start_quorum()
        sgd.zero_grad()
        error(ddp, job.batch()).backward()
        if manager.should_commit():
            sgd.step()


@idiom(
    "Two optimizers for one model (Muon for matrices, AdamW for the rest)",
    STEP,
    "One step is one vote. Guard both optimizers, and step both if `should_commit` returns True.",
)
def two_optimizers(job: Job) -> None:
    model = mlp()
    both = [
        torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-2),
    ]
    manager = job.manager(*states(model=model, first=both[0], second=both[1]))
    for optimizer in both:
        manager.guard_optimizer(optimizer)
    ddp = job.ddp(model)
    while job.goes_on():
        manager.start_quorum()
        for optimizer in both:
            optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if manager.should_commit():
            for optimizer in both:
                optimizer.step()


@idiom(
    "Two optimizers, each in a wrapper of its own",
    STEP,
    "They share a step: the first `zero_grad` begins it, and the first `step` decides it. Do both backward"
    " passes before that `step`.",
    was="the second never stepped",
)
def two_wrappers(job: Job) -> None:
    model = mlp()
    first = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-2)
    job.manager(*states(model=model, first=first, second=second))
    ddp, both = job.ddp(model), [job.optimizer(first), job.optimizer(second)]
    while job.goes_on():
        for optimizer in both:
            optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        for optimizer in both:
            optimizer.step()


@idiom(
    "Two optimizers in wrappers, each stepped and cleared before the other",
    STEP,
    "The next step begins when you clear the last of them.",
    was="the second never stepped",
)
def two_wrappers_in_turn(job: Job) -> None:
    model = mlp()
    first = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-2)
    job.manager(*states(model=model, first=first, second=second))
    ddp, both = job.ddp(model), [job.optimizer(first), job.optimizer(second)]
    for optimizer in both:
        optimizer.zero_grad()
    while job.goes_on():
        error(ddp, job.batch()).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


@idiom(
    "Average the loss over the groups after each step, for the log (torchtitan)",
    STEP,
    "The average belongs to the step just decided. If a group died meanwhile, `wait()` is False: do not use"
    " the tensor then.",
    was="every second step was discarded, and what was averaged was wrong in between",
)
def loss_for_the_log(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        loss = torch.tensor([float(job.group)])
        is_good = manager.allreduce(loss).wait()
        if is_good is not False and manager.num_participants() == 2 and loss.item() != 0.5:
            raise ArithmeticError(f"the average of 0 and 1 is {loss.item()}")


@idiom("A container of optimizers that is an optimizer itself, in the wrapper (torchtitan)", STEP)
def optimizers_container(job: Job) -> None:
    class Container(torch.optim.Optimizer):
        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            self.optimizers = optimizers
            super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

        def zero_grad(self, set_to_none: bool = True) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none)

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for optimizer in self.optimizers:
                optimizer.step()

        def state_dict(self) -> dict[str, Any]:
            return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            for number, optimizer in enumerate(self.optimizers):
                optimizer.load_state_dict(state_dict[str(number)])

    model = mlp()
    container = Container([torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (model[0], model[2])])
    job.manager(*states(model=model, optimizers=container))
    ddp, optimizer = job.ddp(model), job.optimizer(container)
    make_steps(job, ddp, optimizer)


@idiom(
    "Hooks of the wrapped optimizer (register_step_pre_hook, register_step_post_hook)",
    STEP,
    "They run in steps that count.",
)
def step_hooks(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.2) and None)
    sgd.register_step_post_hook(lambda *_: [p.data.clamp_(-0.4, 0.4) for p in model.parameters()] and None)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    make_steps(job, ddp, optimizer)


@idiom(
    "Change weights after the step (clamp, normalise, prune by a mask)",
    STEP,
    "Do it only if the step counted, or do it so that doing it twice changes nothing.",
)
def project_weights(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    mask = (torch.arange(48).view(8, 6) % 3 > 0).float()
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.mul_(mask)
            model[2].weight.clamp_(-0.3, 0.3)


class Langevin(torch.optim.SGD):
    """Adds noise to the weights as it steps, as optimizers do that round by chance, too."""

    generator = torch.Generator()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for parameter in (one for group in self.param_groups for one in group["params"]):
                parameter.add_(torch.randn(parameter.shape, generator=self.generator), alpha=0.01)


@idiom(
    "An optimizer that draws random numbers (Langevin noise, stochastic rounding), seeded by `manager.current_step()`",
    STEP,
    "All groups have to draw the same.",
)
def noise_of_the_optimizer(job: Job) -> None:
    *_, inner, ddp, optimizer = set_up(job, Langevin, lr=0.1)
    manager = job.current
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        inner.generator = torch.Generator().manual_seed(manager.current_step())
        optimizer.step()


@idiom(
    "The same with numbers of the group's own",
    STEP,
    "Seed it by `manager.current_step()` before each step.",
    refused="ReplicasDifferError",
    says="for the third time in a row, in .* by random numbers of its own",
)
def own_noise_of_the_optimizer(job: Job) -> None:
    *_, inner, ddp, optimizer = set_up(job, Langevin, lr=0.1)
    inner.generator = torch.Generator().manual_seed(100 + job.group)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, whose groups and state it shares; it counts in the groups."""

    def __init__(self, inner: torch.optim.Optimizer, *, every: int) -> None:
        super().__init__(inner.param_groups, {"every": every, "num_steps": 0})
        self.inner, self.state = inner, inner.state
        inner.param_groups = self.param_groups
        for group in self.param_groups:
            group |= {"every": every, "num_steps": 0}

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                group["num_steps"] += 1
                for parameter in group["params"] if group["num_steps"] % group["every"] == 0 else ():
                    slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                    parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


@idiom("Lookahead as an optimizer that holds another one, whose groups and state it shares (timm)", STEP)
def lookahead_of_an_optimizer(job: Job) -> None:
    model = mlp()
    lookahead = Lookahead(torch.optim.RAdam(model.parameters(), lr=1e-2), every=2)
    job.manager(*states(model=model, lookahead=lookahead))
    make_steps(job, job.ddp(model), job.optimizer(lookahead))


@idiom(
    "Weights made anew now and then by random numbers of the group's own (dead neurons, ReLoRA, shrink and perturb)",
    STEP,
    "One group loads the other's each time, with a warning. Seed the numbers by `manager.current_step()`: then nothing differs.",
    says=r"came to another state of step .* differed. It has loaded theirs .* by random numbers of its own",
    compare="groups",
    late=("/model/", "/optimizer/"),
)
def weights_made_anew(job: Job) -> None:
    model, _, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager, generator = job.current, torch.Generator().manual_seed(100 + job.group)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step() and manager.current_step() % 7 == 0:
            with torch.no_grad():
                model[0].weight[2] = torch.randn(6, generator=generator)


@idiom(
    "Add a parameter group while training",
    STEP,
    "Your `load_state_dict` has to add the group too, if the state that it gets has the group.",
)
def add_param_group(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

    def load_state_dict(state: dict[str, Any]) -> None:
        if len(state["sgd"]["param_groups"]) > len(sgd.param_groups):
            sgd.add_param_group({"params": list(model[2].parameters())})
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["sgd"])

    manager = job.manager(load_state_dict, lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()})
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()
        if manager.current_step() >= 3 and len(sgd.param_groups) == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})


@idiom(
    "A closure for step that clears, computes and goes back (optimizer.step(closure))",
    STEP,
    "It is called once, before the vote. `step` returns whether the step counts, not the loss.",
    was="ConfigError: optimizers that use closures are not supported",
)
def closure_for_step(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = error(ddp, job.batch())
        loss.backward()
        return loss

    while job.goes_on():
        optimizer.step(closure)


@idiom(
    "A closure that accumulates two batches, with EMA and a schedule (Composer's order)",
    STEP,
    was="ConfigError: optimizers that use closures are not supported",
)
def closure_of_a_window(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    manager = job.manager(*states(model=model, sgd=sgd, average=average))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    scheduler = manager.scheduler(torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9))

    def microbatches() -> torch.Tensor:
        optimizer.zero_grad()
        with ddp.no_sync():
            (error(ddp, job.batch()) / 2).backward()
        loss = error(ddp, job.batch()) / 2
        loss.backward()
        return loss

    while job.goes_on():
        optimizer.step(closure=microbatches)
        scheduler.step()
        if manager.last_step_counted():
            average.update_parameters(model)


@idiom(
    "An optimizer that calls a closure itself (LBFGS)",
    STEP,
    "It would do so after the vote.",
    refused="ConfigError",
    says="LBFGS calls its closure itself, after the vote",
)
def lbfgs(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.LBFGS)
    while job.goes_on():
        optimizer.zero_grad()
        batch = job.batch()
        optimizer.step(lambda: error(ddp, batch))  # noqa: B023 - called here


@idiom(
    "zero_grad at the end of the iteration (the order of torch's quickstart)",
    STEP,
    "`DistributedDataParallel` begins the first step in its forward pass. If you do not use it, call"
    " `zero_grad` before the loop.",
    was="ConfigError: the first backward pass was in no step",
)
def backward_before_zero_grad(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    while job.goes_on():
        error(ddp, job.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


@idiom(
    "A GAN: two networks, each with an optimizer in a wrapper of its own",
    STEP,
    "Each wrapper's step is a step of the manager. A group that returns waits until the others are at the network that it is at."
    " One vote for both networks is cheaper.",
    was="a group that came back averaged one network's gradients with the other's",
)
def gan(job: Job) -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    adam_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
    adam_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    job.manager(*states(generator=generator, critic=critic, adam_g=adam_g, adam_c=adam_c))
    ddp_g, ddp_c = job.ddp(generator), job.ddp(critic)
    optimizer_g, optimizer_c = job.optimizer(adam_g), job.optimizer(adam_c)
    while job.goes_on():
        optimizer_c.zero_grad()
        noise, real = job.batch()
        with torch.no_grad():
            fake = generator(noise)
        (ddp_c(fake).mean() - ddp_c(real).mean()).backward()
        optimizer_c.step()
        optimizer_g.zero_grad()
        noise, _ = job.batch()
        (-critic(ddp_g(noise))).mean().backward()
        optimizer_g.step()


@idiom(
    "A GAN whose generator goes back through samples of the critic's step (DCGAN)",
    STEP,
    "A group that returns loads nothing between the two, but at the end of an iteration after which no backward pass is owed.",
    was="RuntimeError in the backward pass of a group that came back: weights had been loaded meanwhile",
    compare="groups",  # a group that comes back has drawn its first noise for a step of its own
)
def dcgan(job: Job) -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
    adam_g = torch.optim.Adam(generator.parameters(), lr=1e-2)
    adam_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    job.manager(*states(generator=generator, critic=critic, adam_g=adam_g, adam_c=adam_c))
    ddp_g, ddp_c = job.ddp(generator), job.ddp(critic)
    optimizer_g, optimizer_c = job.optimizer(adam_g), job.optimizer(adam_c)
    while job.goes_on():
        ddp_c.zero_grad()
        noise, real = job.batch()
        labels = torch.ones(4, 1)
        F.binary_cross_entropy(ddp_c(real), labels).backward()
        fake = ddp_g(noise)
        F.binary_cross_entropy(ddp_c(fake.detach()), 0 * labels).backward()
        optimizer_c.step()
        ddp_g.zero_grad()
        F.binary_cross_entropy(ddp_c(fake), labels).backward()
        optimizer_g.step()


@idiom(
    "A GAN that computes samples first, and freezes its critics for the generators' step (CycleGAN)",
    STEP,
    was="RuntimeError in the first backward pass: a step began anew after its forward pass, and weights were loaded",
    compare="groups",  # as above
)
def cyclegan(job: Job) -> None:
    generators = nn.ModuleList([mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))])
    critics = nn.ModuleList([nn.Linear(6, 1), nn.Linear(3, 1)])
    adam_g = torch.optim.Adam(generators.parameters(), lr=1e-2)
    adam_c = torch.optim.Adam(critics.parameters(), lr=1e-2)
    job.manager(*states(generators=generators, critics=critics, adam_g=adam_g, adam_c=adam_c))
    (to_b, to_a), (critic_a, critic_b) = map(job.ddp, generators), map(job.ddp, critics)
    optimizer_g, optimizer_c = job.optimizer(adam_g), job.optimizer(adam_c)
    while job.goes_on():
        a, b = job.batch()
        fake_b, fake_a = to_b(a), to_a(b)
        cycled = F.mse_loss(to_a(fake_b), a) + F.mse_loss(to_b(fake_a), b)
        critics.requires_grad_(False)
        optimizer_g.zero_grad()
        (cycled - critic_a(fake_a).mean() - critic_b(fake_b).mean()).backward()
        optimizer_g.step()
        critics.requires_grad_(True)
        optimizer_c.zero_grad()
        (critic_a(fake_a.detach()).mean() - critic_a(a).mean()).backward()
        (critic_b(fake_b.detach()).mean() - critic_b(b).mean()).backward()
        optimizer_c.step()


@idiom(
    "A WGAN: the critic learns in each iteration, the generator in each third, by the loop's own counter",
    STEP,
    "A group that returns waits until the others are at the same place of the turns as its own counter.",
    was="a group that came back came in at another place of the turns, and all discarded a step",
)
def wgan(job: Job) -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    rms_g = torch.optim.RMSprop(generator.parameters(), lr=1e-2)
    rms_c = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    job.manager(*states(generator=generator, critic=critic, rms_g=rms_g, rms_c=rms_c))
    ddp_g, ddp_c = job.ddp(generator), job.ddp(critic)
    optimizer_g, optimizer_c = job.optimizer(rms_g), job.optimizer(rms_c)
    for number in itertools.count():
        if not job.goes_on():
            break
        optimizer_c.zero_grad()
        noise, real = job.batch()
        fake = ddp_g(noise).detach()
        (ddp_c(fake).mean() - ddp_c(real).mean()).backward()
        optimizer_c.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        if number % 3 == 0:
            optimizer_g.zero_grad()
            (-critic(ddp_g(noise))).mean().backward()
            optimizer_g.step()


@idiom(
    "StyleGAN2's order: both forward passes, then `zero_grad`; a penalty in each fourth iteration, and spectral norm",
    STEP,
    "As above. The buffers of a spectral norm follow from the weights, so they are equal in all groups.",
    compare="groups",  # as above
)
def stylegan(job: Job) -> None:
    generator = mlp()
    critic = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.utils.spectral_norm(nn.Linear(8, 1)))
    ema = copy.deepcopy(generator).requires_grad_(False)
    adam_g, adam_c = (torch.optim.Adam(one.parameters(), lr=1e-2, betas=(0.0, 0.99)) for one in (generator, critic))
    job.manager(*states(generator=generator, critic=critic, ema=ema, adam_g=adam_g, adam_c=adam_c))
    ddp_g, ddp_c = job.ddp(generator), job.ddp(critic)
    optimizer_g, optimizer_c = job.optimizer(adam_g), job.optimizer(adam_c)
    for number in itertools.count():
        if not job.goes_on():
            break
        noise, real = job.batch()
        scores = ddp_c(ddp_g(noise).detach()), ddp_c(real)
        ddp_c.zero_grad()
        (F.softplus(scores[0]) + F.softplus(-scores[1])).mean().backward()
        optimizer_c.step()
        if number % 4 == 0:
            real.requires_grad_(True)
            (slope,) = torch.autograd.grad(ddp_c(real).sum(), real, create_graph=True)
            ddp_c.zero_grad()
            slope.square().sum(1).mean().backward()
            optimizer_c.step()
        loss = F.softplus(-critic(ddp_g(noise))).mean()
        ddp_g.zero_grad()
        loss.backward()
        if optimizer_g.step():
            for kept, parameter in zip(ema.parameters(), generator.parameters(), strict=True):
                kept.lerp_(parameter.detach(), 0.1)


class Temperature(nn.Module):
    """The logarithm of SAC's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def forward(self, log_pi: torch.Tensor) -> torch.Tensor:
        return (-self.log_alpha.exp() * (log_pi - 3.0)).mean()


@idiom(
    "SAC: the critic learns in each iteration, actor and temperature twice in each second, by the loop's own counter",
    STEP,
    "As above. Take the temperature from its parameter where it is used: a number from before may be of an older state.",
    was="a group that came back came in at another place of the turns, and all discarded a step",
    compare="groups",  # a group that comes back has drawn its first batch for a step of its own
)
def sac(job: Job) -> None:
    actor, critic, temperature = mlp(), nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 1)), Temperature()
    networks = {"actor": actor, "critic": critic, "temperature": temperature}
    adams = {name: torch.optim.Adam(network.parameters(), lr=1e-2) for name, network in networks.items()}
    job.manager(*states(**networks, **{f"adam_{name}": adam for name, adam in adams.items()}))
    ddp = {name: job.ddp(network) for name, network in networks.items()}
    optimizers = {name: job.optimizer(adam) for name, adam in adams.items()}

    def learns(name: str, loss: torch.Tensor) -> None:
        optimizers[name].zero_grad()
        loss.backward()
        optimizers[name].step()

    for number in itertools.count():
        if not job.goes_on():
            break
        seen, action = job.batch()
        with torch.no_grad():
            target = critic(torch.cat([seen, torch.tanh(actor(seen))], 1)) - temperature.log_alpha.exp()
        learns("critic", F.mse_loss(ddp["critic"](torch.cat([seen, action], 1)), target))
        if number % 2 == 0:
            for _ in range(2):
                chosen = torch.tanh(ddp["actor"](seen))
                value = critic(torch.cat([seen, chosen], 1))
                alpha = temperature.log_alpha.exp().detach()
                learns("actor", (alpha * chosen.square().sum(1) - value.squeeze(1)).mean())
                with torch.no_grad():
                    log_pi = actor(seen).square().sum(1)
                learns("temperature", ddp["temperature"](log_pi))


@idiom(
    "A GAN with one vote for both networks",
    STEP,
    "Compute both losses, call `should_commit`, then step both optimizers.",
)
def gan_with_one_vote(job: Job) -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    adams = [torch.optim.Adam(network.parameters(), lr=1e-2) for network in (generator, critic)]
    manager = job.manager(*states(generator=generator, critic=critic, adam_g=adams[0], adam_c=adams[1]))
    for adam in adams:
        manager.guard_optimizer(adam)
    while job.goes_on():
        noise, real = job.batch()
        manager.start_quorum()
        fake = generator(noise)
        for network, loss in (
            (critic, critic(fake.detach()).mean() - critic(real).mean()),
            (generator, -critic(fake).mean()),
        ):
            parameters = list(network.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
                manager.allreduce(parameter.grad)
        if manager.should_commit():
            for adam in adams:
                adam.step()


@idiom(
    "All together: accumulation, GradScaler, clipping, schedule, averaged weights, evaluation",
    STEP,
    "Only the average of the weights needs to ask whether the step counts.",
)
def all_together(job: Job) -> None:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, average=average, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    scaler = manager.grad_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
    scheduler = manager.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 9))
    while job.goes_on():
        optimizer.zero_grad()
        with ddp.no_sync():
            scaler.scale(error(ddp, job.batch()) / 2).backward()
        scaler.scale(error(ddp, job.batch()) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler.step(optimizer):
            average.update_parameters(model)
        scaler.update()
        scheduler.step()
        with torch.no_grad():
            error(average, job.batch())


@idiom(
    "zero_grad only if the step counted (if optimizer.step(): optimizer.zero_grad())",
    STEP,
    "After a discarded step, `DistributedDataParallel` begins the next one in its forward pass, and clears the gradients. If you"
    " do not use it, call `zero_grad` in each iteration: `step` raises a `ConfigError` otherwise.",
    was="after the first discarded step the loop went round for ever, without a step and without a word",
)
def zero_if_committed(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    manager = job.current
    reported: list[int] = []
    while job.goes_on():
        loss = error(ddp, job.batch())
        if job.group == 0 and job.step == job.num_steps - 2 and not reported:
            reported.append(job.step)
            manager.report_error(ValueError("a bad batch"))
        loss.backward()
        if optimizer.step():
            optimizer.zero_grad()


@idiom(
    "Two optimizers in wrappers, both cleared only if the step counted",
    STEP,
    was="after the first discarded step the loop went round for ever, without a step and without a word",
)
def two_wrappers_if_committed(job: Job) -> None:
    model = mlp()
    first = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=1e-2)
    job.manager(*states(model=model, first=first, second=second))
    ddp, both = job.ddp(model), [job.optimizer(first), job.optimizer(second)]
    for optimizer in both:
        optimizer.zero_grad()
    while job.goes_on():
        error(ddp, job.batch()).backward()
        if all([optimizer.step() for optimizer in both]):
            for optimizer in both:
                optimizer.zero_grad()


@idiom(
    "A step of the optimizer itself, instead of the wrapper's (inner.step() for optimizer.step())",
    STEP,
    "Each group would train by itself. Call `step` of the wrapper.",
    was="the groups trained apart, without a word",
    refused="ConfigError",
    says="SGD steps, and step 0 is not decided yet",
)
def inner_by_mistake(job: Job) -> None:
    _, inner, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        inner.step()


class Nested(torch.optim.Optimizer):
    """Steps the optimizer that it holds, as SAM does in its second step, or evaluates a closure first."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def second_step(self) -> None:
        self.inner.step()

    def step(self, closure: Any = None) -> None:
        closure()
        self.second_step()


@idiom(
    "A step of an optimizer that the wrapped one holds, without the wrapper's (SAM's second_step)",
    STEP,
    "Guard the inner optimizer, ask `should_commit` before the second step, and register the state of both.",
    was="no step was voted on, without a word",
    refused="ConfigError",
    says="SGD steps, and step 0 is not decided yet",
)
def inner_of_inner(job: Job) -> None:
    model = mlp()
    nested = Nested(torch.optim.SGD(model.parameters(), lr=0.1))
    job.manager(*states(model=model, inner=nested.inner))
    ddp, optimizer = job.ddp(model), job.optimizer(nested)
    while job.goes_on():
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        nested.second_step()


@idiom(
    "A closure for step, after should_commit (SAM, LBFGS)",
    STEP,
    "No vote is about what it computes.",
    was="all groups were torn, and waited for ever",
    refused="ConfigError",
    says="a step begins while an optimizer takes the last one, by a forward pass in a closure",
)
def closure_after_the_vote(job: Job) -> None:
    model = mlp()
    nested = Nested(torch.optim.SGD(model.parameters(), lr=0.1))
    manager = job.manager(*states(model=model, inner=nested.inner))
    manager.guard_optimizer(nested)
    ddp = job.ddp(model)
    while job.goes_on():
        manager.start_quorum()
        nested.zero_grad()
        batch = job.batch()
        error(ddp, batch).backward()
        if manager.should_commit():
            nested.step(lambda: error(ddp, batch).backward())  # noqa: B023 - called here


@idiom(
    "Optimizers that step in the backward pass (torchtune's optimizer_in_bwd, LOMO)",
    STEP,
    "They step before the groups have voted. Step after the backward pass.",
    was="the groups trained apart, without a word",
    refused="ConfigError",
    says="SGD steps, and step 0 is not decided yet.*not its own and not in the backward pass",
)
def optimizers_in_backward(job: Job) -> None:
    model = mlp()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    manager = job.manager(*states(model=model))
    for parameter, optimizer in optimizers.items():
        manager.guard_optimizer(optimizer)
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    ddp = job.ddp(model)
    while job.goes_on():
        manager.start_quorum()
        error(ddp, job.batch()).backward()
        manager.should_commit()


@idiom(
    "should_commit called, and its answer not used",
    STEP,
    "In the first discarded step. Step a guarded optimizer only if `should_commit` returns True.",
    was="from the first discarded step on the groups trained apart, without a word",
    refused="ConfigError",
    says="SGD steps, and step 1 was discarded",
)
def ignores_the_answer(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = job.manager(*states(model=model, sgd=sgd))
    manager.guard_optimizer(sgd)
    ddp = job.ddp(model)
    while job.goes_on():
        manager.start_quorum()
        error(ddp, job.batch()).backward()
        if job.step == 1:
            manager.report_error(ValueError("a bad batch"))
        manager.should_commit()
        sgd.step()
        sgd.zero_grad()


@idiom(
    "Skip the optimizer's step after the vote, in all groups (an overflow of averaged gradients)",
    STEP,
    "The step counts, and the weights stay. Do the optimizer's step, or leave it out, in `manager.taking_step()`: a checkpoint"
    " that is saved after it has the number of this step then, and of the step before otherwise.",
)
def skip_after_the_vote(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    manager.guard_optimizer(sgd)
    ddp = job.ddp(model)
    while job.goes_on():
        manager.start_quorum()
        error(ddp, job.batch()).backward()
        if manager.should_commit() and job.step % 3:
            sgd.step()
        model.zero_grad()
