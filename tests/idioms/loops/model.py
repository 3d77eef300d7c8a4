"""Models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from idioms.harness import Job, states
from idioms.models import Box, Chosen, Each, error, errors, make_steps, mlp, set_up
from idioms.table import Category, idiom
from torch import nn
from torch.nn import functional as F
from torch.nn import parallel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

MODEL = Category.MODEL


def train(job: Job, model: nn.Module, *, is_pure: bool = False, **options: Any) -> None:
    """The loop of the README, for loops that differ in the model, or in what it is wrapped in, alone."""
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.pure_ddp(model) if is_pure else job.ddp(model, **options), job.optimizer(adamw)
    make_steps(job, ddp, optimizer)


class Centres(nn.Module):
    """Centres that are made of the first two batches that it sees."""

    centres: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(2, 3))
        self._num_seen = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self._num_seen += 1
        if self._num_seen <= 2:
            self.centres.add_(features.detach()[:2])
        return features + self.centres.mean(0)


@idiom(
    "A codebook made of each group's first batches (k-means), that the groups average later",
    MODEL,
    "It is each group's own, until it was found to move alike in most groups at two looks in a row (4, 8, 16, ... steps after the"
    " job began, or a group came in). From then on a group that makes it anew as it comes back loads theirs, with a warning."
    " Register how many it has seen: then nothing differs.",
    was="each group's own for ever: a group that came back kept what it had made, silently",
    says="came to another state of step .* differed. It has loaded theirs",
    compare="groups",
    late=("centres",),
)
def codebook_of_own_data(job: Job) -> None:
    codebook = Centres()
    model = nn.Sequential(mlp(), codebook)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        inputs, targets = job.batch()
        F.mse_loss(ddp(inputs), targets).backward()
        is_third, moved = manager.current_step() == 2, inputs.mean(0)[:3]
        together = torch.cat([moved, codebook.centres.flatten()])
        manager.allreduce(together).wait()
        if optimizer.step():
            if is_third:
                codebook.centres.copy_(together[3:].view(2, 3))
            codebook.centres.add_(together[:3], alpha=0.1)


class Calls(nn.Module):
    """A module whose forward pass is a function of its parts."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._call = forward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._call(self, inputs)


@idiom(
    "Mixture of experts: each group routes its batch to other experts",
    MODEL,
    "If any group used an expert, all groups get the expert's averaged gradient.",
    was="what one group used and another did not was averaged in one and left in the other: the groups drifted apart",
)
def mixture_of_experts(job: Job) -> None:
    train(job, Chosen(4, lambda: [(job.step + 3 * job.group) % 4]))


@idiom(
    "LayerDrop: each group leaves other layers out",
    MODEL,
    was="as with experts: the groups drifted apart",
)
def layer_drop(job: Job) -> None:
    train(job, Chosen(3, lambda: [layer for layer in range(3) if (job.step * 5 + layer * 3 + job.group * 2) % 4]))


@idiom(
    "Alternating branches, by the step",
    MODEL,
    "If no group used a parameter, its gradient stays None.",
    was="a group that came back, and did not know the step yet, took another branch: its unused parameters kept no gradient",
)
def alternating_branches(job: Job) -> None:
    train(job, Chosen(3, lambda: [job.step % 3]))


@idiom("Parameters that are never used", MODEL)
def never_used(job: Job) -> None:
    train(job, Chosen(3, lambda: [1]))


@idiom(
    "static_graph=True",
    MODEL,
    "It rebuilds the buckets after the first step. A group that returns would have other buckets.",
    was="a group that came back got its gradients in other places: they differed by 0.09",
    refused="ConfigError",
    says="static_graph",
)
def static_graph(job: Job) -> None:
    train(job, mlp(), static_graph=True)


@idiom(
    "delay_all_reduce_named_params",
    MODEL,
    "It averages within one replica group only.",
    was="the delayed parameters were not averaged: each group kept its own",
    refused="ConfigError",
    says="delay_all_reduce_named_params",
)
def delayed_parameters(job: Job) -> None:
    model = mlp()
    delayed = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("0.")]
    train(job, model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[2].bias)


@idiom(
    "PureDistributedDataParallel",
    MODEL,
    "Use it for models that DDP's reducer cannot handle. It is slower with many small parameters.",
)
def pure_ddp(job: Job) -> None:
    train(job, mlp(), is_pure=True)


@idiom(
    "PureDistributedDataParallel with several backward passes in a step",
    MODEL,
    was="the second pass added into a gradient that was still being averaged: they differed by 0.009",
)
def pure_ddp_accumulates(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.pure_ddp(model), job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        for _ in range(3):
            error(ddp, job.batch()).backward()
        optimizer.step()


@idiom(
    "PureDistributedDataParallel where one group uses a parameter and another does not",
    MODEL,
    was="the groups averaged different parameters with each other",
)
def pure_ddp_unused(job: Job) -> None:
    train(job, Chosen(3, lambda: [(job.step + job.group) % 3]), is_pure=True)


@idiom(
    "BatchNorm",
    MODEL,
    "Each group has its own running statistics, because each group sees other batches. A group that returns"
    " goes on from its source's statistics.",
    own=("running_", "num_batches_tracked"),
)
def batch_norm(job: Job) -> None:
    train(job, nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))


@idiom(
    "BatchNorm that is frozen (eval) in the first steps, and trained later",
    MODEL,
    "From then on its running statistics are each group's own, as with any BatchNorm.",
    was="equal at first, they were taken for something that has to be equal, and a group ended with a ReplicasDifferError",
    compare="groups",
    own=("/1.running", "/1.num_batches"),
    num_groups=3,
)
def batch_norm_frozen_first(job: Job) -> None:
    model, count = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), Box(steps=0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd, count=count))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        model[1].train(count.steps >= 3)
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        if optimizer.step():
            count.steps += 1


class Scaled(nn.Module):
    """Fake quantisation's scale, which follows the statistics of the step before."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.scale.copy_(self.norm.running_var.mean())
        return torch.tanh(self.norm(inputs)) * self.scale


@idiom(
    "Quantisation-aware training, whose scales follow BatchNorm's statistics",
    MODEL,
    "They are equal in the first step, and each group's own from the next one on. That is found out as they are compared, with a"
    " warning.",
    was="all but one group ended with a ReplicasDifferError in their first steps",
    says="(?s)came to another state of step .*scale changes in other steps in some groups",
    compare="groups",
    own=("running_", "num_batches_tracked", "scale"),
    num_groups=3,
)
def quantisation_aware(job: Job) -> None:
    train(job, nn.Sequential(nn.Linear(6, 8), Scaled(), nn.Linear(8, 3)))


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.parts = nn.ParameterList(torch.randn(6, 3) for _ in range(2))
        self.register_buffer("mean", torch.ones(6) / 7, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum((inputs - self.mean) @ part for part in self.parts) * self.scale.exp()


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        members = [mlp() for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(value.detach()) for value in stacked.values())
        self._skeleton = [copy.deepcopy(members[0]).to("meta")]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        def one(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(self._skeleton[0], parameters, (inputs,))

        return torch.func.vmap(one)(dict(zip(self.names, self.stacked, strict=True))).mean(0)


def adapt(self: Any, inputs: torch.Tensor) -> torch.Tensor:
    """The inner loop of MAML."""
    parameters = dict(self.model.named_parameters())
    loss = torch.func.functional_call(self.model, parameters, (inputs[:2],)).square().mean()
    slopes = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    adapted = {name: value - 0.1 * slope for (name, value), slope in zip(parameters.items(), slopes, strict=True)}
    return torch.func.functional_call(self.model, adapted, (inputs,))


def each_kind() -> dict[str, nn.Module]:
    partly_frozen, square = mlp(), nn.Linear(6, 6)
    partly_frozen[0].requires_grad_(False)
    parametrize.register_parametrization(square, "weight", Symmetric())
    channels_last = {"memory_format": torch.channels_last}
    return {
        "norms": Calls(
            lambda self, x: self.head(self.norm(x + self.body(x))),
            body=nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.GroupNorm(2, 6)),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 3),
        ),
        "partly_frozen": partly_frozen,
        "lora": Calls(
            lambda self, x: self.base(x) + self.up(self.down(x)),
            base=mlp().requires_grad_(False),
            down=nn.Linear(6, 2, bias=False),
            up=nn.Linear(2, 3, bias=False),
        ),
        "embedding": Calls(
            lambda self, x: self.head(self.table((x * 3).long().abs() % 10).mean(1)),
            table=nn.Embedding(10, 8, padding_idx=0),
            head=nn.Linear(8, 3),
        ),
        "weight_norm": nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 3))
        ),
        "parametrized": nn.Sequential(square, nn.Tanh(), nn.Linear(6, 3)),
        "convolutions": Calls(
            lambda self, x: self.head(self.body(x.view(-1, 1, 2, 3).contiguous(**channels_last)).flatten(1)),
            body=nn.Sequential(nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)).to(**channels_last),
            head=nn.Linear(16, 3),
        ),
        "lstm": Calls(
            lambda self, x: self.head(self.lstm(x.view(-1, 3, 2))[0][:, -1]),
            lstm=nn.LSTM(2, 5, batch_first=True),
            head=nn.Linear(5, 3),
        ),
        "transformer": Calls(
            lambda self, x: self.head(self.layer(x.view(-1, 3, 2).repeat(1, 1, 2)).mean(1)),
            layer=nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        "odd": Odd(),
        "function": Calls(
            lambda self, x: self.head(Sign.apply(self.body(x))), body=nn.Linear(6, 8), head=nn.Linear(8, 3)
        ),
        "ensemble": Ensemble(),
        "maml": Calls(adapt, model=mlp()),
        "checkpointing": Calls(
            lambda self, x: self.head(checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)),
            body=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
            head=nn.Linear(8, 3),
        ),
    }


@idiom("LayerNorm, GroupNorm, GELU, residuals", MODEL)
@idiom("Frozen layers (requires_grad=False before DDP)", MODEL)
@idiom(
    "LoRA: a frozen base, trained adapters",
    MODEL,
    "You may register the whole model. If all groups load the same base, you may register the adapters alone.",
)
@idiom("Embeddings", MODEL)
@idiom("weight_norm", MODEL)
@idiom("Parametrizations of your own (register_parametrization)", MODEL)
@idiom("Convolutions, pooling, channels_last", MODEL)
@idiom("LSTM", MODEL)
@idiom("A transformer with attention", MODEL)
@idiom("Scalar parameters, ParameterList, buffers that are not persistent", MODEL)
@idiom("A custom autograd.Function", MODEL)
@idiom("torch.func: an ensemble by vmap and functional_call", MODEL)
@idiom("An inner loop of gradient steps (MAML)", MODEL)
@idiom("Activation checkpointing (use_reentrant=False)", MODEL)
def each_model(job: Job) -> None:
    model = Each(**each_kind())
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        optimizer.zero_grad()
        errors(ddp, job.batch()).backward()
        optimizer.step()


@idiom("Dropout", MODEL, "Each group draws its own random numbers.")
def dropout(job: Job) -> None:
    *_, ddp, optimizer = set_up(
        job, torch.optim.AdamW, lr=1e-2, model=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    )
    while job.goes_on():
        optimizer.zero_grad()
        with job.random():
            loss = error(ddp, job.batch())
        loss.backward()
        optimizer.step()


@idiom("LoRA, with the adapters alone in the state", MODEL, "Then all groups have to load the same base themselves.")
def lora_adapters_only(job: Job) -> None:
    base = mlp().requires_grad_(False)
    for number, parameter in enumerate(base.parameters()):
        parameter.copy_(torch.linspace(-0.5, 0.4 + number, parameter.numel()).view_as(parameter))
    adapters = nn.ModuleDict({"down": nn.Linear(6, 2, bias=False), "up": nn.Linear(2, 3, bias=False)})
    model = Calls(
        lambda self, x: self.base(x) + self.adapters["up"](self.adapters["down"](x)), base=base, adapters=adapters
    )
    adamw = torch.optim.AdamW(adapters.parameters(), lr=1e-2)
    job.manager(*states(adapters=adapters, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    make_steps(job, ddp, optimizer)


@idiom("train() and eval() in turn, both with gradients (RL, frozen BatchNorm)", MODEL)
def modes_in_turn(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.SGD, lr=0.1, momentum=0.9)
    while job.goes_on():
        optimizer.zero_grad()
        ddp.train(job.step % 2 == 0)
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom(
    "Progressive unfreezing: parameters frozen by lr or by a zero gradient until a step",
    MODEL,
    "You tell DDP at its construction which parameters you train. So let them require a gradient from the start.",
)
def unfreeze_by_lr(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1}], momentum=0.9
    )
    manager = job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        sgd.param_groups[0]["lr"] = 0.1 if manager.current_step() >= 3 else 0.0
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()


@idiom(
    "Progressive unfreezing: requires_grad and a new DDP at a step",
    MODEL,
    "A group that returns learns the step with the state, and unfreezes then.",
    was="the group that came back, still frozen, ended with an error at every restart",
)
def unfreeze_by_flag(job: Job) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    while job.goes_on():
        if manager.current_step() >= 3 and not model[0].weight.requires_grad:
            model.requires_grad_(True)
            ddp = job.ddp(model)
        optimizer.zero_grad()
        error(ddp, job.batch()).backward()
        optimizer.step()


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6)]), nn.Linear(6, 3)

    def grow(self) -> None:
        layer = nn.utils.skip_init(nn.Linear, 6, 6)
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        self.layers.append(layer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.head(inputs)


@idiom(
    "Progressive growing: a new layer at a step, with a new DDP and a new optimizer in place of the old one",
    MODEL,
    "Your `load_state_dict` has to grow the model and make the optimizer too, if the state that it gets is of a larger one. The"
    " new weights have to be the same in all groups: seed them by the step.",
    was="the group that came back was refused before its `load_state_dict` was called, at every restart",
)
def progressive_growing(job: Job) -> None:
    model, now = Growing(), SimpleNamespace()

    def load_state_dict(state: dict[str, Any]) -> None:
        if len(state["model"]) > len(model.state_dict()):
            grow()
        model.load_state_dict(state["model"])
        now.adam.load_state_dict(state["adam"])

    def wrap() -> None:
        now.adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        now.ddp, now.optimizer = job.ddp(model), job.optimizer(now.adam)

    def grow() -> None:
        model.grow()
        wrap()

    manager = job.manager(load_state_dict, lambda: {"model": model.state_dict(), "adam": now.adam.state_dict()})
    wrap()
    while job.goes_on():
        if manager.current_step() >= 3 and len(model.layers) == 1:
            grow()
        loss = error(now.ddp, job.batch())
        now.optimizer.zero_grad()
        loss.backward()
        now.optimizer.step()


@idiom(
    "Sparse gradients: Embedding(sparse=True)",
    MODEL,
    "If an index occurs twice, its sum may be rounded differently than in one process, but equally in all groups.",
    gloo=True,
    compare="groups",
)
def sparse_embedding(job: Job) -> None:
    model = Calls(
        lambda self, x: self.head(self.table((x * 3).long().abs() % 10).mean(1)),
        table=nn.Embedding(10, 8, sparse=True),
        head=nn.Linear(8, 3),
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(model), job.optimizer(sgd)
    make_steps(job, ddp, optimizer)


@idiom("Tied weights", MODEL, "They travel once. The receiver ties them again.")
def tied_weights(job: Job) -> None:
    encoder, decoder = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
    decoder.weight = encoder.weight
    train(
        job,
        Calls(
            lambda self, x: self.head(torch.tanh(self.encoder(x)) @ self.decoder.weight),
            encoder=encoder,
            decoder=decoder,
            head=nn.Linear(6, 3),
        ),
    )


@idiom("torch.compile", MODEL, "Compile the model before or after you give it to DDP.")
def compiled(job: Job) -> None:
    model = mlp()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, adamw=adamw))
    ddp, optimizer = job.ddp(torch.compile(model, backend="eager")), job.optimizer(adamw)
    make_steps(job, ddp, optimizer)


@idiom(
    "Activation checkpointing with use_reentrant=True",
    MODEL,
    "Use `use_reentrant=False`, or `PureDistributedDataParallel`.",
    was="torch's error did not say what to do",
    refused="ConfigError",
    says="use_reentrant=False",
)
def reentrant_checkpointing(job: Job) -> None:
    train(
        job,
        Calls(
            lambda self, x: self.head(
                checkpoint(self.body, self.stem(x), use_reentrant=True, preserve_rng_state=False)
            ),
            stem=nn.Linear(6, 6),
            body=nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
            head=nn.Linear(8, 3),
        ),
    )


@idiom("Two forward passes in a step, one loss (contrastive, siamese)", MODEL)
def two_forward_passes(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    while job.goes_on():
        optimizer.zero_grad()
        first, second = ddp(job.batch()[0]), ddp(job.batch()[0])
        F.cosine_embedding_loss(first, second, torch.ones(4)).backward()
        optimizer.step()


@idiom("Distillation from a frozen teacher", MODEL)
def distillation(job: Job) -> None:
    model, teacher = mlp(), mlp().requires_grad_(False).eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, teacher=teacher, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        inputs, targets = job.batch()
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(inputs)
        outputs = ddp(inputs)
        (F.mse_loss(outputs, targets) + F.mse_loss(outputs, wanted)).backward()
        optimizer.step()


@idiom(
    "A registered teacher that is asked before the first zero_grad",
    MODEL,
    "Call the teacher after `zero_grad`: a group's first state arrives there.",
    was="in the first step of a job a group contributed gradients by the random teacher that it had before",
    compare="groups",
)
def teacher_before_zero_grad(job: Job) -> None:
    model, teacher = mlp(), mlp().requires_grad_(False).eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.manager(*states(model=model, teacher=teacher, adamw=adamw))
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)
    while job.goes_on():
        inputs, _ = job.batch()
        with torch.no_grad():
            wanted = teacher(inputs)
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), wanted).backward()
        optimizer.step()


@idiom("Cross entropy with label smoothing and class weights", MODEL)
def label_smoothing(job: Job) -> None:
    *_, ddp, optimizer = set_up(job, torch.optim.AdamW, lr=1e-2)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    while job.goes_on():
        inputs, targets = job.batch()
        optimizer.zero_grad()
        criterion(ddp(inputs), targets.argmax(1)).backward()
        optimizer.step()


REDUCERS_WORDS = "torch's error: 'Expected to mark a variable ready only once'"


@idiom("A module that returns an object of a class of your own", MODEL, was=REDUCERS_WORDS)
@idiom("A module whose forward pass is a generator", MODEL, was=REDUCERS_WORDS)
@idiom("A module that keeps what it computed in an attribute, beside what it returns", MODEL, was=REDUCERS_WORDS)
@idiom("A parameter that is used outside of the forward pass (a learned temperature)", MODEL, was=REDUCERS_WORDS)
@idiom("A penalty on all weights in the loss, while the forward pass uses some of them", MODEL, was=REDUCERS_WORDS)
def beside_what_is_returned(job: Job) -> None:
    """With torch's default for unused parameters."""

    def keep(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = self.router(x).square().mean()
        return self.net(x)

    returns_object = Calls(lambda self, x: SimpleNamespace(logits=self.net(x)), net=mlp())
    generates = Calls(lambda self, x: (self.net(row) for row in x), net=mlp())
    keeps = Calls(keep, net=mlp(), router=nn.Linear(6, 2))
    heated = Calls(lambda self, x: self.net(x), net=mlp())
    heated.temperature = nn.Parameter(torch.ones(3))
    chooses = Chosen(4, lambda: [job.step % 4])
    models = nn.ModuleList([returns_object, generates, keeps, heated, chooses])
    sgd = torch.optim.SGD(models.parameters(), lr=0.1, momentum=0.9)
    job.manager(*states(models=models, sgd=sgd))
    ddps, optimizer = [job.ddp(model, find_unused_parameters=False) for model in models], job.optimizer(sgd)
    while job.goes_on():
        optimizer.zero_grad()
        inputs, targets = job.batch()
        F.mse_loss(ddps[0](inputs).logits, targets).backward()
        F.mse_loss(torch.stack(list(ddps[1](inputs))), targets).backward()
        (error(ddps[2], (inputs, targets)) + 0.1 * keeps.auxiliary).backward()
        F.mse_loss(ddps[3](inputs) * heated.temperature, targets).backward()
        (error(ddps[4], (inputs, targets)) + 0.01 * sum(p.square().sum() for p in chooses.parameters())).backward()
        optimizer.step()


@idiom(
    "DistributedDataParallel within torch's own",
    MODEL,
    "Libraries such as accelerate wrap a model in torch's under a launcher. Wrap what they return:"
    " `DistributedDataParallel(manager, accelerator.prepare(model))`.",
    was="each group trained with its own gradients, without a word",
    refused="ConfigError",
    says="wrap in the other order",
)
def within_torchs_ddp(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = parallel.DistributedDataParallel(job.ddp(model)), job.optimizer(sgd)
    make_steps(job, ddp, optimizer)


@idiom("torch's own DistributedDataParallel within ours", MODEL)
def around_torchs_ddp(job: Job) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job.manager(*states(model=model, sgd=sgd))
    ddp, optimizer = job.ddp(parallel.DistributedDataParallel(model)), job.optimizer(sgd)
    make_steps(job, ddp, optimizer)
