"""Weights that change outside of `optimizer.step` while a save writes them: it holds the state of the call, or fails by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchft_ckpt import Checkpointer, load_checkpoint
from torchft_ckpt.checkpointing.durable.saving import saver
from torchft_ckpt.checkpointing.durable.saving.capture import CapturedState
from torchft_ckpt.errors import StateChangedError

LONG_S = 60.0


class Scene:
    """A model whose optimizer the checkpointer guards, and averaged weights to evaluate with."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(3)
        self.directory = directory
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        self.averaged = [torch.full_like(parameter, 7.0) for parameter in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(directory)
        self.checkpointer.guard_optimizer(self.optimizer)
        self.step = 0

    def save(self) -> Any:
        self.step += 1
        return self.checkpointer.save({"model": self.model.state_dict()}, step=self.step)

    def swap(self) -> None:
        with torch.no_grad():
            for parameter, averaged in zip(self.model.parameters(), self.averaged, strict=True):
                parameter.copy_(averaged)

    def forward(self) -> None:
        self.model(torch.randn(8, 64)).sum().backward()

    def bits(self) -> dict[str, list[int]]:
        return bits_of(self.model.state_dict())

    def saved_bits(self, name: str) -> dict[str, list[int]]:
        state = {"model": {key: torch.zeros_like(value) for key, value in self.model.state_dict().items()}}
        load_checkpoint(self.directory / name, state)
        return bits_of(state["model"])


def bits_of(state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: tensor.detach().reshape(-1).view(torch.uint8).tolist() for name, tensor in state.items()}


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(saver, "_HEAD_START_S", 0.0)
    made = Scene(tmp_path)
    yield made
    made.checkpointer.shutdown()


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves read nothing before this is set."""
    may_read = threading.Event()
    read = CapturedState.read

    def late(self: CapturedState, *arguments: Any) -> None:
        assert may_read.wait(LONG_S)
        read(self, *arguments)

    monkeypatch.setattr(CapturedState, "read", late)
    return may_read


def test_averaged_weights_that_are_swapped_in_after_the_call_fail_the_save_by_name(
    scene: Scene, writing: threading.Event
) -> None:
    future = scene.save()
    scene.swap()
    writing.set()
    with pytest.raises(
        StateChangedError, match=r"'model\.0\.weight' was written to in place.*state_dict_lock\.write"
    ) as caught:
        future.result(LONG_S)
    assert caught.value.party == "model.0.weight"


def test_after_that_each_save_copies_at_the_call_and_holds_the_state_of_it(
    scene: Scene, writing: threading.Event
) -> None:
    future = scene.save()
    scene.swap()
    writing.set()
    assert isinstance(future.exception(LONG_S), StateChangedError)
    scene.checkpointer.wait()
    writing.clear()
    scene.averaged = [torch.full_like(parameter, 8.0) for parameter in scene.averaged]
    before = scene.bits()
    future = scene.save()
    scene.swap()
    writing.set()
    assert scene.saved_bits(future.result(LONG_S).name) == before


def test_a_swap_under_the_lock_costs_the_save_nothing(scene: Scene, writing: threading.Event) -> None:
    before = scene.bits()
    future = scene.save()
    with scene.checkpointer.state_dict_lock.write():
        scene.swap()
    writing.set()
    assert scene.saved_bits(future.result(LONG_S).name) == before


def test_a_swap_after_everything_was_copied_ahead_costs_the_save_nothing(
    scene: Scene, writing: threading.Event
) -> None:
    before = scene.bits()
    future = scene.save()
    worker = scene.checkpointer._worker
    assert worker is not None
    worker.stage()
    while worker._state.snapshot.copy_ahead():
        pass
    scene.swap()
    scene.optimizer.step()
    writing.set()
    assert scene.saved_bits(future.result(LONG_S).name) == before


def test_forward_passes_and_guarded_steps_meanwhile_are_no_change(scene: Scene, writing: threading.Event) -> None:
    """Statistics are written by the forward pass, weights by the step, under the lock."""
    before = scene.bits()
    future = scene.save()
    scene.forward()
    scene.optimizer.step()
    scene.swap()
    writing.set()
    assert scene.saved_bits(future.result(LONG_S).name) == before


def test_a_parameter_is_found_changed_where_the_state_has_its_data_alone(
    scene: Scene, writing: threading.Event
) -> None:
    """`x.data` has a counter of its own; the optimizer's parameter has the one that counts."""
    future = scene.checkpointer.save({name: p.data for name, p in scene.model.named_parameters()}, step=1)
    scene.swap()
    writing.set()
    with pytest.raises(StateChangedError, match=r"0\.weight"):
        future.result(LONG_S)


def test_inference_tensors_have_no_version_and_are_saved_as_they_are(scene: Scene) -> None:
    with torch.inference_mode():
        frozen = torch.full((5000,), 3.0)
    future = scene.checkpointer.save({"frozen": frozen, "model": scene.model.state_dict()}, step=1)
    read = {"frozen": torch.zeros(5000)}
    load_checkpoint(scene.directory / future.result(LONG_S).name, read)
    assert read["frozen"].unique().tolist() == [3.0]
