"""What is learned: a random function of a few numbers, by a stack of residual blocks; data made from step, group and rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 30  # no multiple of 4, so shards are uneven
HIDDEN = 64
NUM_BLOCKS = 3
_MANY = 100_003


class Block(nn.Module):
    """Maps `(batch, WIDTH)` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Maps `(batch, WIDTH)` float32 to `(batch, 1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)  # a single row: empty on all ranks but one
        self.scale = nn.Parameter(
            torch.full((1,), 0.5), requires_grad=False
        )  # frozen: the optimizer never has state for it

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def make_model(seed: int) -> Model:
    """Return a model with weights of that seed."""
    torch.manual_seed(seed)
    return Model()


def batch_of(step: int, group: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return inputs `(size, WIDTH)` and targets `(size, 1)`, which depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed((step * _MANY + group) * _MANY + rank)
    inputs = torch.randn(size, WIDTH, generator=generator)
    targets = torch.sin(inputs[:, :10].sum(1, keepdim=True) / 2) + inputs[:, 10:20].mean(1, keepdim=True)
    return inputs, targets
