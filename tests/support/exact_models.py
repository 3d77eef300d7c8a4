"""What the tests of exact steps train. It imports torch alone."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import torch
from torch import nn
from torch.nn import functional

GLOBAL_BATCH_SIZE, MICROBATCH_SIZE, SEED, CLIP = 48, 4, 3, 0.5


class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are augmented by random numbers as they are read."""

    def __init__(self, size: int = 101, *, kills: bool = False) -> None:
        self.kills = kills
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(size, 16, generator=generator)
        self.words = torch.randint(0, 32, (size, 13), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows[index] + 0.1 * torch.randn(16), self.words[index]


class Mlp(nn.Module):
    """With BatchNorm, whose statistics each forward pass moves, dropout, a buffer that nothing moves, and one of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(24, 24),
            nn.Tanh(),
            nn.Linear(24, 4),
        )
        self.register_buffer("still", torch.full((3,), 1 / 3))
        self.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
        self.unused = nn.Parameter(torch.zeros(2))


class Gpt(nn.Module):
    """One block, a tied embedding, dropout everywhere."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, width), nn.Embedding(12, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.tokens(words) + self.places.weight, 0.1, self.training)
        mask = nn.Transformer.generate_square_subsequent_mask(12)
        result: torch.Tensor = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return result


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer and its schedule, as every group begins with them."""
    torch.manual_seed(11)
    model = Mlp() if kind == "mlp" else Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    rows, words = batch
    if isinstance(model, Gpt):
        return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    return functional.cross_entropy(model.net(rows), words[:, 0] % 4)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all bits of parameters, buffers and moments."""
    found = hashlib.blake2b(digest_size=12)
    moments = [
        t for state in optimizer.state_dict()["state"].values() for _, t in sorted(state.items()) if torch.is_tensor(t)
    ]
    for tensor in [*model.parameters(), *model.buffers(), *moments]:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
