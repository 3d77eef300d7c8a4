"""The algorithms as the papers write them: all replicas in one process, one after another, nothing hidden behind anything.

DiLoCo arXiv 2311.08105 algorithm 1, Streaming DiLoCo 2501.18512 algorithm 2, LocalSGD 1805.09767. What a discarded round does is
this library's own: the fragment goes back to the global parameters, the inner optimizer's state to that of the round's beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from support.fake_outer_manager import mean_of

Bits = list[torch.Tensor]


def build_model(seed: int = 5) -> nn.Sequential:
    """Six layers of different shapes, all of them small."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(6, 6, bias=index % 2 == 0) for index in range(6)]).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.double) / 4)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the tests' inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def nesterov(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the tests' outer optimizer."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def batch_of(rank: int, inner_step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(1000 * rank + inner_step), dtype=torch.double)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, inner_step: int) -> None:
    optimizer.zero_grad()
    (torch.tanh(model(batch_of(rank, inner_step))) - 0.3).square().mean().backward()
    optimizer.step()


def bits_of(model: nn.Module) -> Bits:
    return [param.detach().clone().view(torch.int64) for param in model.parameters()]


def fragments_of(model: nn.Sequential, num_fragments: int) -> list[nn.Module]:
    size = len(model) // num_fragments
    return [model[index * size : (index + 1) * size] for index in range(num_fragments)]


class Replica:
    """One replica of the reference: a model, its inner optimizer, and the inner state of each fragment's last round."""

    def __init__(self, num_fragments: int, make_inner: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.model = build_model()
        self.optimizer = make_inner(self.model)
        self.fragments = [list(fragment.parameters()) for fragment in fragments_of(self.model, num_fragments)]
        self.begun = [self.inner_state(number) for number in range(num_fragments)]

    def inner_state(self, fragment: int) -> list[dict[str, object]]:
        return [copy.deepcopy(self.optimizer.state.get(param, {})) for param in self.fragments[fragment]]

    def go_back(self, fragment: int, to: Sequence[torch.Tensor]) -> None:
        for param, value, state in zip(self.fragments[fragment], to, self.begun[fragment], strict=True):
            param.data.copy_(value)
            self.optimizer.state.pop(param, None)
            if state:
                self.optimizer.state[param] = copy.deepcopy(state)


def diloco(
    *,
    num_replicas: int,
    num_fragments: int,
    sync_every: int,
    delay: int,
    alpha: float,
    num_inner_steps: int,
    make_inner: Callable[[nn.Module], torch.optim.Optimizer],
    make_outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    shares_outer: bool = False,
    outcomes: Sequence[bool] = (),
    retries: int = 0,
) -> list[list[Bits]]:
    """Return the parameters' bits after every inner step, by replica."""
    replicas = [Replica(num_fragments, make_inner) for _ in range(num_replicas)]
    globals_ = [[nn.Parameter(p.detach().clone()) for p in fragment] for fragment in replicas[0].fragments]
    outers = [make_outer([p for fragment in globals_ for p in fragment])] * num_fragments
    if not shares_outer:
        outers = [make_outer(fragment) for fragment in globals_]
    votes = list(outcomes)
    period = sync_every // num_fragments
    taken: list[list[torch.Tensor]] = []
    num_rounds = place = 0
    history: list[list[Bits]] = [[] for _ in replicas]

    def pseudo_gradients(fragment: int) -> list[list[torch.Tensor]]:
        return [
            [g.detach() - p.detach() for g, p in zip(globals_[fragment], replica.fragments[fragment], strict=True)]
            for replica in replicas
        ]

    for inner_step in range(num_inner_steps):
        for rank, replica in enumerate(replicas):
            train_step(replica.model, replica.optimizer, rank, inner_step)
        place += 1
        fragment = num_rounds % num_fragments
        if place == period - delay:
            taken = pseudo_gradients(fragment)
        if place == period:
            place = 0
            committed = votes.pop(0) if votes else True
            for _ in range(retries):
                if not committed:
                    taken = pseudo_gradients(fragment)
                    committed = votes.pop(0) if votes else True
            if committed:
                for index, param in enumerate(globals_[fragment]):
                    param.grad = mean_of([gradients[index] for gradients in taken])
                outers[fragment].step()
                for param in globals_[fragment]:
                    param.grad = None
                num_rounds += 1
            for replica in replicas:
                if not committed:
                    replica.go_back(fragment, [param.detach() for param in globals_[fragment]])
                    continue
                for param, new in zip(replica.fragments[fragment], globals_[fragment], strict=True):
                    param.data.copy_(torch.lerp(new.detach(), param.detach(), alpha))
                replica.begun[fragment] = replica.inner_state(fragment)
        for rank, replica in enumerate(replicas):
            history[rank].append(bits_of(replica.model))
    return history


def local_sgd(
    *,
    num_replicas: int,
    sync_every: int,
    num_inner_steps: int,
    make_inner: Callable[[nn.Module], torch.optim.Optimizer],
    outcomes: Sequence[bool] = (),
) -> list[list[Bits]]:
    """Return the parameters' bits after every inner step, by replica."""
    replicas = [Replica(1, make_inner) for _ in range(num_replicas)]
    agreed = [param.detach().clone() for param in replicas[0].fragments[0]]
    votes = list(outcomes)
    history: list[list[Bits]] = [[] for _ in replicas]
    for inner_step in range(num_inner_steps):
        for rank, replica in enumerate(replicas):
            train_step(replica.model, replica.optimizer, rank, inner_step)
        if (inner_step + 1) % sync_every == 0:
            committed = votes.pop(0) if votes else True
            if committed:
                columns = zip(*(replica.fragments[0] for replica in replicas), strict=True)
                agreed = [mean_of([param.detach() for param in column]) for column in columns]
            for replica in replicas:
                if committed:
                    replica.begun[0] = replica.inner_state(0)
                    for param, value in zip(replica.fragments[0], agreed, strict=True):
                        param.data.copy_(value)
                else:
                    replica.go_back(0, agreed)
        for rank, replica in enumerate(replicas):
            history[rank].append(bits_of(replica.model))
    return history
