"""What is learned: the demo's character GPT on the source of Python's standard library, of which a part is held out.

Every replica group draws its own batches. Which ones follows from its number and its inner step alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from demo.corpus import encode, read_standard_library
from demo.digest import digest_state
from demo.model import CharGPT, GPTConfig, loss_of
from torch import Tensor, nn

from diloco.options import Options
from torchft_ckpt import Manager

_NUM_HELD_OUT = 500_000
_NUM_HELD_OUT_BATCHES = 8
_HELD_OUT_BATCH_SIZE = 64
_WARM_UP = 0.05
_LAST_RATE = 0.05


class Task:
    """A model and what it learns from, in one replica group.

    Args:
        options: of the run.
        group: the replica group's number.
    """

    def __init__(self, options: Options, group: int) -> None:
        torch.manual_seed(options.seed + group)  # every group begins with other weights: who joins takes the others'
        self.model = CharGPT(GPTConfig(width=options.width, num_blocks=options.blocks, context=options.context))
        self._options = options
        self._group = group
        text = torch.frombuffer(bytearray(encode(read_standard_library())), dtype=torch.uint8)
        self._text, self._held_out = text[:-_NUM_HELD_OUT], text[-_NUM_HELD_OUT:]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of an inner step, each `(batch, context)` int64."""
        return self._sample(self._text, self._options.seed, self._group, step, self._options.batch_size)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats a character."""
        return loss_of(model(inputs), targets)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean cross-entropy of the model as it is now, on text that nobody trained on."""
        losses = [
            self.loss(self.model, *self._sample(self._held_out, 0, 0, number, _HELD_OUT_BATCH_SIZE))
            for number in range(_NUM_HELD_OUT_BATCHES)
        ]
        return torch.stack(losses).mean().item()

    def _sample(self, text: Tensor, seed: int, group: int, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + group)
        starts = torch.randint(len(text) - self._options.context, (batch_size, 1), generator=generator)
        windows = text[starts + torch.arange(self._options.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def make_inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW; its rate is set at every step."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, progress: float) -> None:
    """Set the rate for this part of the run (0 to 1): up to the peak first, then down along a cosine."""
    progress = min(progress, 1.0)
    rate = peak * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)
    for parameters in optimizer.param_groups:
        parameters["lr"] = rate * min(1.0, (progress + 1e-3) / _WARM_UP)


def split(model: CharGPT, num_fragments: int) -> list[nn.Module]:
    """Return the model's parts without a parameter in common: the embeddings with the first blocks, and so on.

    (The output layer's weight is the token embedding's.)
    """
    blocks = list(model.blocks)
    edges = [len(blocks) * number // num_fragments for number in range(num_fragments + 1)]
    parts: list[list[nn.Module]] = [blocks[low:high] for low, high in pairwise(edges)]
    parts[0] = [model.token_embedding, model.position_embedding, *parts[0]]
    parts[-1].append(model.norm)
    return [nn.ModuleList(part) for part in parts]


def progress_of(manager: Manager, options: Options, steps_a_round: int) -> float:
    """Return how much of the planned tokens went into committed rounds, of all groups together.

    Every group gets the same number: it is part of the state that they have in common.
    """
    return manager.batches_committed() * steps_a_round / options.num_planned


def digest_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return a fingerprint of a model and optimizers, to compare groups by."""
    state: Mapping[str, object] = {
        "parameters": dict(model.named_parameters()),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    return digest_state(state)
