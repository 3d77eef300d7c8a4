"""A character-level GPT, small enough for a core of a laptop, and the samples that it learns from.

The usual decoder: token and position embeddings, pre-norm blocks of causal attention and a GELU MLP, output tied to the
token embedding (so the state has shared storage, as real language models have).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from demo.corpus import VOCABULARY_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The shape of the model; `context` is in characters."""

    vocabulary_size: int = VOCABULARY_SIZE
    context: int = 64
    width: int = 128
    num_heads: int = 4
    num_blocks: int = 3


class Block(nn.Module):
    """One pre-norm transformer block; maps `(batch, time, width)` to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention_in = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class CharGPT(nn.Module):
    """Maps tokens `(batch, time)` int64 to logits `(batch, time, vocabulary)`, time up to `config.context`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.num_blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual_end = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * config.num_blocks) ** 0.5 if is_residual_end else 1.0))
        self.output.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        return self.output(self.norm(self.blocks(x)))


class Windows(Dataset[tuple[int, Tensor, Tensor]]):
    """The corpus, cut into windows: each sample is its own number, the inputs and the targets, each `(context,)` int64.

    Args:
        tokens: the corpus, 1-D uint8.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        start = index * self._context
        window = self._tokens[start : start + self._context + 1].long()
        return index, window[:-1], window[1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def write_on(model: CharGPT, prompt: Tensor, *, num_characters: int, seed: int) -> Tensor:
    """Return the prompt `(time,)` int64 continued by that many sampled characters."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_characters):
        logits = model(prompt[None, -model.config.context :])[0, -1]
        prompt = torch.cat([prompt, torch.multinomial(F.softmax(logits / 0.7, dim=-1), 1, generator=generator)])
    return prompt
