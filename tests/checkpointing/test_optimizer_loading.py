"""Every optimizer of torch holds its source's very state after it was loaded, whatever its parameters' dtype."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.state.optimizer_state import dtypes_kept
from torchft_ckpt.manager.state_registry import StateRegistry
from torchft_ckpt.testing.transport_conformance import differences

SETTINGS: dict[str, dict[str, Any]] = {
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
}
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
)
"""SparseAdam wants sparse gradients of an embedding, which bfloat16 does not change."""


class Trained:
    """A parameter and its optimizer. All of its kind see the same gradients."""

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.parameter = nn.Parameter(torch.linspace(-1, 1, 24).reshape(6, 4).to(dtype))
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([self.parameter], **SETTINGS.get(name, {}))

    def train(self, num_steps: int) -> None:
        def loss() -> float:
            self.parameter.grad = self.parameter.detach() * 0.3 + 0.1
            return float((self.parameter.detach().float() ** 2).sum())

        for _ in range(num_steps):
            loss()
            self.optimizer.step(loss if isinstance(self.optimizer, torch.optim.LBFGS) else None)

    def state(self) -> dict[str, Any]:
        return {"weight": self.parameter.detach(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.parameter.data.copy_(state["weight"])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("name", NAMES)
def test_a_bfloat16_replica_that_healed_is_bit_equal_and_stays_so(name: str) -> None:
    source, healed = Trained(name), Trained(name)
    source.train(3)
    registry = StateRegistry(StateDictLock(timedelta(seconds=60)))
    registry.register("default", healed.load, healed.state, optimizers=[healed.optimizer])
    registry.load({"default": copy.deepcopy(source.state())})
    assert differences(healed.state(), source.state()) == []
    source.train(2)
    healed.train(2)
    assert differences(healed.state(), source.state()) == []


def test_what_a_script_loads_by_itself_is_loaded_as_torch_does() -> None:
    source, loaded = Trained("NAdam"), Trained("NAdam")
    source.train(2)
    with dtypes_kept([loaded.optimizer, loaded.optimizer]):
        pass
    loaded.load(source.state())
    assert loaded.optimizer.state[loaded.parameter]["mu_product"].dtype is torch.bfloat16


def test_a_hook_of_the_script_has_the_last_word_on_values() -> None:
    source, loaded = Trained("NAdam"), Trained("NAdam")
    source.train(2)
    loaded.optimizer.register_load_state_dict_post_hook(
        lambda optimizer: optimizer.state[loaded.parameter]["exp_avg"].zero_()
    )
    with dtypes_kept([loaded.optimizer]):
        loaded.load(copy.deepcopy(source.state()))
    state = loaded.optimizer.state[loaded.parameter]
    assert (state["mu_product"].dtype, bool(state["exp_avg"].any())) == (torch.float32, False)
