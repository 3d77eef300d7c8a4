"""DiLoCo and LocalSGD."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import error, mlp
from idioms.table import Category, idiom
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR

OUTER = Category.OUTER
DIFFERED = "came to another state of step .* differed. It has loaded theirs .* if loop.round_counted\\(\\) is True"


def nesterov(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def train(job: Job, loop: Any, model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """The inner steps of a plain loop, within an outer loop."""
    with loop:
        while job.goes_on():
            inner.zero_grad()
            error(model, job.batch()).backward()
            inner.step()


def diloco(
    job: Job,
    *,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    num_fragments: int = 1,
    sync_every: int = 2,
    **options: Any,
) -> None:
    """The loop of the guide to outer loops, for loops that differ in the options alone."""
    model = mlp()
    optimizer = inner(model)
    fragments = [model] if num_fragments == 1 else [model[:2], model[2:]]
    job.manager(use_async_quorum=False)
    train(
        job, job.diloco(fragments, optimizer, [nesterov(f) for f in fragments], sync_every, **options), model, optimizer
    )


@idiom(
    "DiLoCo",
    OUTER,
    "This is the loop of the guide to outer loops. A group that returns enters in one round and contributes to"
    " the next.",
)
def plain_diloco(job: Job) -> None:
    diloco(job)


@idiom(
    "DiLoCo with AdamW as inner optimizer",
    OUTER,
    "Each group has its own inner optimizer state. A group that returns begins with an empty one.",
)
def diloco_adamw(job: Job) -> None:
    diloco(job, inner=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), sync_every=3)


@idiom("Streaming DiLoCo: several fragments", OUTER)
def streaming_diloco(job: Job) -> None:
    diloco(job, num_fragments=2, sync_every=4)


@idiom("Streaming DiLoCo with a delay, and a part of the local parameters kept", OUTER)
def delayed_diloco(job: Job) -> None:
    diloco(job, num_fragments=2, sync_every=6, fragment_sync_delay=1, fragment_update_alpha=0.5)


@idiom("Buckets instead of single parameters (use_bucketization)", OUTER)
def bucketed_diloco(job: Job) -> None:
    diloco(job, use_bucketization=True, bucket_cap_mb=1e-4)


@idiom(
    "DiLoCo that sends bytes (should_quantize)",
    OUTER,
    "The values are rounded, but they are the same in all groups.",
    compare="groups",
)
def quantised_diloco(job: Job) -> None:
    diloco(job, should_quantize="int8")


@idiom("One outer optimizer for all fragments", OUTER)
def shared_outer(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    job.manager(use_async_quorum=False)
    train(job, job.diloco([model[0], model[2]], sgd, nesterov(model), 4), model, sgd)


@idiom("LocalSGD", OUTER)
def local_sgd(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(use_async_quorum=False)
    train(job, job.local_sgd(model, sgd, 3), model, sgd)


@idiom("LocalSGD with Adam", OUTER, "A group that returns begins with an empty inner optimizer state.")
def local_adam(job: Job) -> None:
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    job.manager(use_async_quorum=False)
    train(job, job.local_sgd(model, adam, 2), model, adam)


@idiom(
    "Accumulate and clip in the inner steps", OUTER, "Do it as in any plain loop. The groups exchange nothing there."
)
def inner_accumulation(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    job.manager(use_async_quorum=False)
    with job.diloco([model], sgd, nesterov(model), 2):
        while job.goes_on():
            sgd.zero_grad()
            for _ in range(2):
                error(model, job.batch()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            sgd.step()


@idiom("Set the inner learning rate by the round", OUTER, "Set it from `manager.current_step()`, which counts rounds.")
def inner_rate(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = job.manager(use_async_quorum=False)
    with job.diloco([model], sgd, nesterov(model), 2):
        while job.goes_on():
            sgd.param_groups[0]["lr"] = 0.05 / (1 + manager.current_step())
            sgd.zero_grad()
            error(model, job.batch()).backward()
            sgd.step()


@idiom("Frozen parameters in a fragment", OUTER, "They are in the global state. The groups do not exchange them.")
def frozen_in_fragment(job: Job) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    outer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.7)
    job.manager(use_async_quorum=False)
    train(job, job.diloco([model], sgd, outer, 2), model, sgd)


@idiom(
    "Evaluate the global parameters (restore_parameters)",
    OUTER,
    "Do it at the end of a round. Otherwise you lose the local changes that the groups have not exchanged yet.",
)
def evaluate_globals(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = job.manager(use_async_quorum=False)
    with job.diloco([model], sgd, nesterov(model), 2) as loop:
        while job.goes_on():
            before = manager.current_step()
            sgd.zero_grad()
            error(model, job.batch()).backward()
            sgd.step()
            if manager.current_step() > before:
                loop.restore_parameters()
                with torch.no_grad():
                    model(torch.ones(4, 6)).sum().item()


@idiom(
    "autocast and BatchNorm in the inner steps",
    OUTER,
    "The groups do not exchange buffers. Each group keeps its own.",
)
def inner_batch_norm(job: Job) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    job.manager(use_async_quorum=False)
    with job.diloco([model], sgd, nesterov(model), 2):
        while job.goes_on():
            inputs, targets = job.batch()
            sgd.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs)
            nn.functional.mse_loss(outputs.float(), targets).backward()
            sgd.step()


@idiom(
    "Parameters that the inner optimizer trains and no fragment holds",
    OUTER,
    "Each group keeps its own values. Put these parameters into a fragment.",
    was="nothing was said",
    says="they are not exchanged",
    compare="nothing",
)
def outside_of_fragments(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    job.manager(use_async_quorum=False)
    train(job, job.diloco([model[0]], sgd, nesterov(model[0]), 2), model, sgd)


@idiom(
    "Parameters that are unfrozen after the loop was made",
    OUTER,
    "Each group keeps its own values. Let these parameters require a gradient from the start.",
    was="nothing was said",
    says="(?i)requires_grad|frozen",
    compare="nothing",
)
def unfrozen_later(job: Job) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = job.manager(use_async_quorum=False)
    with job.diloco([model], sgd, nesterov(model), 2):
        while job.goes_on():
            if manager.current_step() >= 2:
                model.requires_grad_(True)
            sgd.zero_grad()
            error(model, job.batch()).backward()
            sgd.step()


@idiom(
    "A codebook that is a parameter without a gradient of a fragment, written to by the loop",
    OUTER,
    "Each round of DiLoCo puts back what it was at the beginning. Make it a buffer, which each group has for itself.",
    was="nothing was said: what the loop wrote was lost with each round, in all groups alike",
    says="need no gradient were written to",
    compare="nothing",
)
def frozen_codebook(job: Job) -> None:
    model = mlp()
    model.register_parameter("codebook", nn.Parameter(torch.zeros(6), requires_grad=False))
    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=0.05)
    job.manager(use_async_quorum=False)
    with job.diloco([model], sgd, torch.optim.SGD(trained, lr=0.7), 2):
        while job.goes_on():
            inputs, targets = job.batch()
            sgd.zero_grad()
            error(model, (inputs, targets)).backward()
            sgd.step()
            with torch.no_grad():
                model.codebook.lerp_(inputs.mean(0), 0.1)


@idiom(
    "Two fragments that share a parameter",
    OUTER,
    "The groups would exchange it twice.",
    refused="ConfigError",
    says="exchanged twice",
)
def shared_parameter(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    job.manager(use_async_quorum=False)
    job.diloco([model, model[0]], sgd, nesterov(model), 4)


@idiom("sync_every that the fragments do not divide", OUTER, refused="ConfigError", says="sync_every")
def odd_sync_every(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    job.manager(use_async_quorum=False)
    job.diloco([model[0], model[2]], sgd, [nesterov(model[0]), nesterov(model[2])], 5)


@idiom(
    "DiLoCo with a state of your own registered besides (a count of tokens)",
    OUTER,
    "Compute it from `manager.current_step()`, after the first forward pass. A group that comes back takes over a"
    " round's result in that pass. Its next inner step changes nothing.",
)
def diloco_with_own_state(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = StepLR(sgd, 2)
    manager = job.manager(*states(scheduler=scheduler), use_async_quorum=False)
    with job.diloco([model], sgd, nesterov(model), 2):
        model(torch.zeros(1, 6))
        scheduler.last_epoch = manager.current_step()
        while job.goes_on():
            sgd.zero_grad()
            error(model, job.batch()).backward()
            sgd.step()
            scheduler.last_epoch = manager.current_step()


def outer_loop(
    job: Job,
    *,
    make: Callable[[torch.optim.Optimizer, Any], Any] = lambda *_: None,
    before: Callable[[torch.optim.Optimizer, Any], object] = lambda *_: None,
    after: Callable[[torch.optim.Optimizer, Any, Any, int], object] = lambda *_: None,
    registers: bool = False,
) -> None:
    """DiLoCo whose outer optimizer is set to something else with each round.

    `after` gets, besides what `make` made, by how much the inner step has moved `manager.current_step()`.
    """
    model = mlp()
    sgd, outer = torch.optim.SGD(model.parameters(), lr=0.05), nesterov(model)
    own = ExponentialLR(outer, 0.8) if registers else None
    manager = job.manager(*(states(scheduler=own) if registers else ()), use_async_quorum=False)
    scheduler = make(outer, manager) or own
    with job.diloco([model], sgd, outer, 2) as loop:
        while job.goes_on():
            before(outer, manager)
            sgd.zero_grad()
            error(model, job.batch()).backward()
            step = manager.current_step()
            sgd.step()
            after(outer, loop, scheduler, manager.current_step() - step)


def by_round(outer: torch.optim.Optimizer, manager: Any) -> None:
    outer.param_groups[0]["lr"] = 0.7 * 0.8 ** manager.current_step()


@idiom(
    "Set the outer learning rate by the round, before it",
    OUTER,
    was="the group that came back took its first round with the learning rate of round 0, and differed from then on",
)
def outer_rate_before(job: Job) -> None:
    outer_loop(job, before=by_round)


@idiom(
    "Set the outer learning rate by the round, after each inner step",
    OUTER,
    was="as with the rate that is set before a round",
    own=("/lr",),  # until its first inner step, a group that came back has what its round was applied with
)
def outer_rate_after(job: Job) -> None:
    held: list[Any] = []
    outer_loop(job, make=lambda _, manager: held.append(manager), after=lambda outer, *_: by_round(outer, held[0]))


@idiom(
    "manager.scheduler of an outer optimizer (DiLoCo)",
    OUTER,
    "It moves within each round that counts. Its `step` does nothing: call it after each inner step, or leave it out.",
    was="ConfigError: the Manager followed no schedulers in an outer loop",
)
def outer_scheduler(job: Job) -> None:
    def make(outer: torch.optim.Optimizer, manager: Any) -> Any:
        return job.outer_scheduler(ExponentialLR(outer, 0.8))

    outer_loop(job, make=make, after=lambda _outer, _loop, scheduler, _: scheduler.step())


@idiom(
    "An outer scheduler of your own, stepped if a round has counted (loop.round_counted())",
    OUTER,
    "Register it. `round_counted` is True once for each round, in the iteration in which the other groups see it too.",
    was="a script could not ask whether a round had counted",
    own=("/lr", "/scheduler/"),  # until its first inner step, a group that came back has them as they came to it
)
def outer_scheduler_asks(job: Job) -> None:
    def after(_: torch.optim.Optimizer, loop: Any, scheduler: Any, __: int) -> None:
        if loop.round_counted():
            scheduler.step()
        assert scheduler.last_epoch == job.step, "it has not followed a round"

    outer_loop(job, registers=True, after=after)


@idiom(
    "An outer scheduler, registered, stepped if `inner.step()` has moved current_step()",
    OUTER,
    "A group that comes back does not see its first round count, and loads the scheduler of the others before the next one: its"
    " inner steps of that round are lost, and a warning says so. Ask `loop.round_counted()` instead.",
    was="each round was applied with another learning rate in the group that came back",
    says=DIFFERED,
    compare="groups",
)
def outer_scheduler_late(job: Job) -> None:
    outer_loop(job, registers=True, after=lambda _outer, _loop, scheduler, moved: moved and scheduler.step())


@idiom(
    "An outer scheduler that is not registered",
    OUTER,
    "Each round is applied with the settings of the group that has been in the job longest. So the groups stay equal, and a"
    " warning names what differs. Give the scheduler to `manager.scheduler`.",
    was="the group that came back took its rounds with learning rates of its own, and differed from then on",
    says="sets its outer optimizer otherwise",
    own=("/lr",),  # between two rounds
)
def outer_scheduler_alone(job: Job) -> None:
    outer_loop(
        job,
        make=lambda outer, _: LambdaLR(outer, lambda epoch: 0.8**epoch),
        after=lambda _outer, _loop, scheduler, moved: moved and scheduler.step(),
    )


class Followed:
    """What a script keeps of the rounds, registered: averaged weights, and how many rounds went into them."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [param.detach().clone() for param in model.parameters()]
        self.count = 0

    @torch.no_grad()
    def update(self, weights: Iterable[torch.Tensor], decay: float = 0.9) -> None:
        for average, weight in zip(self.weights, weights, strict=True):
            average.lerp_(weight, 1 - decay)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for average, received in zip(self.weights, state["weights"], strict=True):
            average.copy_(received)
        self.count = state["count"]


def followed_loop(
    job: Job,
    follow: Callable[[Followed, Any, Any, nn.Module, int], object],
    *,
    asks: bool,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    num_fragments: int = 1,
    is_local_sgd: bool = False,
    **options: Any,
) -> None:
    """A loop that does something once a round: if the loop says that it counts (`asks`), or if `current_step` has moved.

    `follow` gets what is registered, the loop, the inner optimizer, the model, and the step as the iteration began.
    """
    model = mlp()
    optimizer, followed = inner(model), Followed(model)
    manager = job.manager(*states(followed=followed), use_async_quorum=False)
    fragments = [model] if num_fragments == 1 else [model[:2], model[2:]]
    if is_local_sgd:
        loop = job.local_sgd(model, optimizer, 3)
    else:
        loop = job.diloco(fragments, optimizer, [nesterov(f) for f in fragments], 3 * num_fragments, **options)
    with loop:
        while job.goes_on():
            step = manager.current_step()
            optimizer.zero_grad()
            error(model, job.batch()).backward()
            optimizer.step()
            if loop.round_counted() if asks else manager.current_step() > step:
                follow(followed, loop, optimizer, model, step)
                job.history.pop(job.step, None)  # what was here before belongs to the round before


def average(followed: Followed, _loop: Any, _inner: Any, model: nn.Module, _step: int) -> None:
    followed.update(model.parameters())


def average_globals(followed: Followed, loop: Any, *_: Any) -> None:
    followed.update(w for fragment in loop.state_dict()["original_parameters"] for w in fragment.values())


ASKS = "Ask `loop.round_counted()` instead."


@idiom("Averaged weights, moved if a round has counted (loop.round_counted())", OUTER, "Register them.")
def averaged_by_rounds(job: Job) -> None:
    followed_loop(job, average, asks=True)


@idiom("LocalSGD with averaged weights, moved if a round has counted", OUTER, num_groups=3)
def local_averaged_by_rounds(job: Job) -> None:
    followed_loop(job, average, asks=True, is_local_sgd=True)


@idiom("Streaming DiLoCo with a delay, and averages of the global parameters", OUTER, num_groups=3)
def globals_averaged(job: Job) -> None:
    options = {"num_fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    followed_loop(job, average_globals, asks=True, **options)


@idiom("Forget the inner optimizer's state if a round has counted", OUTER)
def inner_reset(job: Job) -> None:
    def reset(followed: Followed, _loop: Any, inner: torch.optim.Optimizer, *_: Any) -> None:
        inner.state.clear()
        followed.count += 1

    followed_loop(job, reset, asks=True, inner=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))


@idiom(
    "Averaged weights, moved if `inner.step()` has moved current_step()",
    OUTER,
    f"A group that comes back lacks the round that it came in with, and loads the others' average before its next one. {ASKS}",
    was="the average of the group that came back differed from then on, and nothing was said",
    says=DIFFERED,
    compare="groups",
)
def averaged_if_step_moved(job: Job) -> None:
    followed_loop(job, average, asks=False)


@idiom(
    "Averaged weights, moved with each third round, by current_step()",
    OUTER,
    f"A group that comes back with such a round lacks it, and loads the others' average before its next round. {ASKS}",
    was="it was compared if it moved in one of the rounds in which groups are compared, and nothing was said",
    says=DIFFERED,
    compare="groups",
)
def averaged_each_third_round(job: Job) -> None:
    def follow(followed: Followed, _loop: Any, _inner: Any, model: nn.Module, _step: int) -> None:
        if job.step % 3 == 0:
            followed.update(model.parameters())

    followed_loop(job, follow, asks=False)


@idiom(
    "Streaming DiLoCo with a delay, and averages that move if `inner.step()` has moved current_step()",
    OUTER,
    f"As with one fragment. {ASKS}",
    was="the average of the group that came back differed from then on, and nothing was said",
    says=DIFFERED,
    compare="groups",
    num_groups=3,
)
def globals_averaged_if_step_moved(job: Job) -> None:
    followed_loop(job, average_globals, asks=False, num_fragments=2, fragment_sync_delay=1)


@idiom(
    "Averaged weights, with a decay by the step that was read at the top of the iteration",
    OUTER,
    "In a group that comes back that step is 0. It loads the others' average before its next round. Read the step where the round"
    " has counted.",
    was="the average of the group that came back differed from then on, and nothing was said",
    says=DIFFERED,
    compare="groups",
)
def decay_read_at_top(job: Job) -> None:
    def follow(followed: Followed, _loop: Any, _inner: Any, model: nn.Module, step: int) -> None:
        followed.update(model.parameters(), 1 - 1 / (2 + step))

    followed_loop(job, follow, asks=True)


@idiom(
    "The inner learning rate by a count of rounds, which is registered",
    OUTER,
    f"Compute it from `manager.current_step()`. A count that moves with `current_step` lacks a round. {ASKS}",
    was="the group that came back trained with another learning rate from then on, and nothing was said",
    says=DIFFERED,
    compare="groups",
)
def inner_rate_by_count(job: Job) -> None:
    def follow(followed: Followed, _loop: Any, inner: torch.optim.Optimizer, *_: Any) -> None:
        followed.count += 1
        inner.param_groups[0]["lr"] = 0.05 / (1 + followed.count)

    followed_loop(job, follow, asks=False)


@idiom(
    "Inner state that is registered: BatchNorm, AdamW, a codebook, a loss scale, the best loss",
    OUTER,
    "Each group has its own. A group that comes back takes them over from another group.",
    compare="groups",
    own=("/model/", "/inner/", "/scale", "/best"),
    num_groups=3,
)
def inner_state_registered(job: Job) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    model.register_buffer("codebook", torch.zeros(6))
    adam, schedule = torch.optim.AdamW(model.parameters(), lr=0.01), {"scale": 65536.0, "best": 1e9, "rounds": 0}
    load, get = states(model=model, inner=adam)

    def load_state(state: dict[str, Any]) -> None:
        load(state)
        schedule.update(state["schedule"])

    job.manager(load_state, lambda: {**get(), "schedule": schedule}, use_async_quorum=False)
    with job.diloco([model], adam, nesterov(model), 3) as loop:
        while job.goes_on():
            inputs, targets = job.batch()
            adam.zero_grad()
            loss = error(model, (inputs, targets))
            loss.backward()
            adam.step()
            with torch.no_grad():
                model.codebook.lerp_(inputs.mean(0), 0.1)
            if job.group == 1 and job.step % 2:
                schedule["scale"] /= 2  # an overflow
            schedule["best"] = min(schedule["best"], loss.item())
            if loop.round_counted():
                schedule["rounds"] += 1
                job.history.pop(job.step, None)
