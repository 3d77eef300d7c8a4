"""The models that are trained here, and their input. Same seed, same numbers, whichever library trains them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def small_mlp() -> nn.Module:
    """Return 0.4 M parameters: steps so short that a kill's cost cannot hide in one."""
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))


def hundred_megabytes() -> nn.Module:
    """Return 25.2 M fp32 parameters (100.8 MB) in 48 tensors, all of them trained."""
    layers: list[nn.Module] = []
    for _ in range(24):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers)


def hundred_megabytes_mostly_frozen() -> nn.Module:
    """Return the same 100.8 MB, of which only the last layer's 4.2 MB are trained, as in fine-tuning."""
    model = hundred_megabytes()
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    return model


class LargeTable(nn.Module):
    """A layer of 4.2 MB that is trained, beside 1 GiB of frozen tables of 64 MiB each that steps do not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024)
        tables = [nn.Parameter(torch.rand(4096, 4096), requires_grad=False) for _ in range(16)]
        self.tables = nn.ParameterList(tables)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, 1024]` to the same shape."""
        return self.layer(x)


class SmallTransformer(nn.Module):
    """A decoder-only transformer over characters with 2.6 M fp32 parameters: 10.4 MB of gradients a step."""

    def __init__(self, num_characters: int = 256, width: int = 256, num_layers: int = 3, context: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[batch, length]` (int64) to logits `[batch, length, num_characters]`."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.embed(tokens) + self.position[:length], mask=mask, is_causal=True)
        return self.head(hidden)


def stack(num_layers: int, num_trained: int) -> nn.Module:
    """Return layers of 1 M fp32 parameters (4.2 MB) each, of which the last `num_trained` are trained."""
    layers: list[nn.Module] = []
    for number in range(num_layers):
        layer = nn.Linear(1024, 1024)
        layer.requires_grad_(number >= num_layers - num_trained)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": small_mlp,
    "100mb": hundred_megabytes,
    "100mb_frozen": hundred_megabytes_mostly_frozen,
    "1gib_frozen": LargeTable,
    "transformer": SmallTransformer,
}


class Task:
    """A model, and a loss over a batch that follows from the seed, the group and the step alone.

    Args:
        name: a key of `MODELS`, or `stack:LAYERS:TRAINED`.
        seed: of the weights and of the input.
        group: number of the replica group; each sees its own input.
    """

    def __init__(self, name: str, seed: int, group: int) -> None:
        torch.manual_seed(seed)
        if name.startswith("stack:"):
            _, num_layers, num_trained = name.split(":")
            self.model = stack(int(num_layers), int(num_trained))
        else:
            self.model = MODELS[name]()
        self._name = name
        self._random = torch.Generator().manual_seed(seed * 1000 + group)

    def loss(self, forward: nn.Module) -> Tensor:
        """Run the (wrapped) model on the next batch."""
        if self._name == "transformer":
            tokens = torch.randint(0, 256, (3, 97), generator=self._random)
            logits = forward(tokens[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        width = 256 if self._name == "small" else 1024
        return forward(torch.randn(8, width, generator=self._random)).square().mean()
