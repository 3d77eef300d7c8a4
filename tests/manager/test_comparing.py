"""Two states are compared bit by bit; what differs is named, and small tensors that no optimizer owns are told apart."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchft_ckpt.manager.comparing import compare_states, fixed, not_returned


class Trained:
    """A model with buffers that has made a step."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.randn(4, 8)).sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "extra": {"scale": 2.0, "names": ["a", ("b", None)], "lost": float("nan"), "array": np.arange(3)},
        }

    def compare(self, there: object) -> list[str]:
        return sorted(compare_states(self.state(), there).paths)


@pytest.fixture
def trained() -> Trained:
    return Trained()


@pytest.fixture
def there(trained: Trained) -> dict[str, Any]:
    return copy.deepcopy(trained.state())


def test_equal_states_are_equal_in_whatever_order_and_with_numpys_numbers(trained, there):
    there["model"] = dict(reversed(there["model"].items()))
    there["extra"]["scale"] = np.float64(2.0)
    assert trained.compare(there) == []


def test_a_single_bit_of_a_parameter_is_seen_and_named(trained, there):
    there["model"]["0.weight"].view(torch.int32)[3, 4] ^= 1
    assert trained.compare(there) == ["model.0.weight"]


def test_zeros_of_another_sign_differ_and_nans_of_the_same_bits_do_not():
    one = {"a": torch.tensor([0.0]), "b": torch.tensor([float("nan")])}
    assert compare_states(one, {"a": torch.tensor([-0.0]), "b": one["b"].clone()}).paths == ("a",)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda extra: extra.update(scale=2.5), "extra.scale"),
        (lambda extra: extra.update(scale=torch.tensor(2.0)), "extra.scale"),
        (lambda extra: extra.update(names=["a", ("c", None)]), "extra.names.1.0"),
        (lambda extra: extra.update(names=["a"]), "extra.names"),
        (lambda extra: extra.update(array=np.arange(3) + 1), "extra.array"),
        (lambda extra: extra.update(more=1), "extra.more"),
        (lambda extra: extra.pop("lost"), "extra.lost"),
        (lambda extra: extra.update(lost=True), "extra.lost"),
    ],
)
def test_values_that_are_no_tensors_count(trained, there, change, path):
    change(there["extra"])
    assert trained.compare(there) == [path]


@pytest.mark.parametrize("there", [None, 3, [], {"other": 1}])
def test_something_else_altogether_differs(trained, there):
    assert trained.compare(there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float64, torch.int8])
def test_every_dtype_and_layout_in_memory_is_compared(dtype):
    here = torch.arange(15).reshape(3, 5).to(dtype)
    assert compare_states({"t": here.t()}, {"t": here.t().contiguous()}).paths == ()
    assert compare_states({"t": here}, {"t": here.flip(0)}).paths
    assert compare_states({"t": here}, {"t": here.reshape(5, 3)}).paths
    assert compare_states({"t": here[:0]}, {"t": here[:0].clone()}).paths == ()


def test_what_is_put_into_a_container_afterwards_is_not_in_the_fixed_state():
    live = {"norms": [1.0], "pair": (1, {"a": 2})}
    held = fixed(live)
    live["norms"].append(2.0)
    live["pair"][1]["a"] = 3
    assert held == {"norms": [1.0], "pair": (1, {"a": 2})}


def test_only_a_few_of_many_differences_are_spelled_out():
    here = {f"w{number}": number for number in range(9)}
    there = {name: -1 for name in here}
    assert str(compare_states(here, there)) == "w0, w1, w2, w3, w4 and 4 more"


def test_a_large_tensor_that_a_load_function_clamps_is_not_what_was_loaded() -> None:
    """Some values of it are compared: all of them would take too long for each load."""
    loaded = {"average": torch.randn(1100, 300), "small": torch.ones(2)}
    assert not_returned({name: tensor.clone() for name, tensor in loaded.items()}, loaded).paths == ()
    clamped = {name: tensor.clamp(-2.5, 2.5) for name, tensor in loaded.items()}
    assert not_returned(clamped, loaded).paths == ("average",)
    assert not_returned({**loaded, "average": loaded["average"].t()}, loaded).paths == ("average",)


def test_after_two_loads_a_number_that_is_not_twice_what_was_loaded_has_moved_by_itself() -> None:
    loaded = {"losses": [3.0], "count": 3, "took_s": 7, "best": 0.0, "flag": False}
    here = {"losses": [3.0, 3.0], "count": 6, "took_s": 8, "best": 0.0, "flag": True}
    assert not_returned(here, loaded, twice=True).paths == ("losses", "count", "flag")


def test_where_digests_were_equal_large_tensors_are_sampled_and_all_else_is_compared() -> None:
    here = {"w": torch.zeros(1 << 20), "small": torch.zeros(3), "lr": 0.1}
    there = {"w": torch.zeros(1 << 20), "small": torch.ones(3), "lr": 0.2}
    there["w"][7] = 1.0  # it cannot be: its digest was compared
    assert compare_states(here, there, are_digests_equal=True).paths == ("small", "lr")
    assert compare_states(here, there).paths == ("w", "small", "lr")
    there["w"] = torch.zeros(1 << 19)
    assert compare_states(here, there, are_digests_equal=True).paths == ("w", "small", "lr")
