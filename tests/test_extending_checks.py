"""The checks that `torchft_ckpt.testing` ships for parts of a user's own: our parts pass, and a broken promise is named."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.spmd_double import Layout, SpmdAdapter, SpmdTensor, random_bits
from torch import nn

from torchft_ckpt import DiLoCo, LocalSGD
from torchft_ckpt.checkpointing.durable.storage.fsspec_storage import FsspecStorage
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.outer.fragment import AveragedFragment, PseudoGradientFragment
from torchft_ckpt.outer.loop import OuterLoop
from torchft_ckpt.outer.manager import OuterManager
from torchft_ckpt.testing import outer_conformance, storage_conformance
from torchft_ckpt.testing.conformance import ConformanceError
from torchft_ckpt.testing.fake_outer_manager import FakeOuterManager
from torchft_ckpt.testing.shard_adapter_conformance import check_shard_adapter

# Outer loops


def local_sgd(manager: OuterManager, model: nn.Module, inner: torch.optim.Optimizer) -> OuterLoop:
    return LocalSGD(manager, model, inner, sync_every=4)


def diloco(manager: OuterManager, model: nn.Module, inner: torch.optim.Optimizer) -> OuterLoop:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], inner, outer, sync_every=4, fragment_sync_delay=1)


def streaming(manager: OuterManager, model: nn.Sequential, inner: torch.optim.Optimizer) -> OuterLoop:
    outer = [torch.optim.SGD(model[at].parameters(), lr=0.7) for at in (0, 2)]
    return DiLoCo(manager, [model[0], model[2]], inner, outer, sync_every=4)


@pytest.mark.slow
@pytest.mark.parametrize("check", outer_conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [local_sgd, diloco, streaming])
def test_our_outer_loops_conform(check: outer_conformance.Check, make: outer_conformance.MakeLoop) -> None:
    check(make)


def test_a_loop_whose_replicas_differ_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: AveragedFragment, *, merge: bool) -> None:
        with torch.no_grad():
            for name, param in self.trained.items():
                self.original_parameters[name].copy_(param)  # each replica takes its own for the average

    monkeypatch.setattr(AveragedFragment, "apply", apply)
    with pytest.raises(ConformanceError, match="the replicas differ"):
        outer_conformance.check_outer_loop(local_sgd)


def test_a_loop_whose_discarded_rounds_leave_traces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PseudoGradientFragment, "restore", PseudoGradientFragment.save_parameters)
    monkeypatch.setattr(outer_conformance, "_WatchedManager", FakeOuterManager)  # which would find it, too
    with pytest.raises(ConformanceError, match="a discarded round changed"):
        outer_conformance.check_outer_loop(diloco)


def test_a_loop_that_writes_to_its_state_without_the_lock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = AveragedFragment.prepare

    def careless(self: AveragedFragment) -> None:
        prepare(self)
        for backup in self.original_parameters.values():
            backup.zero_()

    monkeypatch.setattr(AveragedFragment, "prepare", careless)
    with pytest.raises(ConformanceError, match="while the lock was not held: state"):
        outer_conformance.check_outer_loop(local_sgd)


# Storage


@pytest.mark.parametrize("check", storage_conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_places_for_checkpoints_conform(check: storage_conformance.Check, kind: str, tmp_path: Path) -> None:
    check(str(tmp_path / "place") if kind == "directory" else f"memory://{uuid.uuid4().hex}")


def test_a_place_that_shows_half_a_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FsspecStorage, "read", lambda self, path, start=0, stop=None: b"x")
    with pytest.raises(ConformanceError, match="a file holds other bytes"):
        storage_conformance.check_storage(f"memory://{uuid.uuid4().hex}")


# Tensors of other classes

TILED = Layout((2, 2))


def tiled(seed: int) -> torch.Tensor:
    return SpmdTensor.of(random_bits((5, 6), torch.float32, seed), TILED)


def test_an_adapter_conforms() -> None:
    check_shard_adapter(SpmdAdapter(), tiled)


class Overlapping(SpmdAdapter):
    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        boxes = super().boxes(tensor, path)
        return [boxes[0], *boxes[:-1]]


class Zeroing(SpmdAdapter):
    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        return super().rebuild(like, [torch.zeros_like(part) for part in data])


class Forgetful(SpmdAdapter):
    def holders(self, tensor: torch.Tensor, num_ranks: int) -> Sequence[tuple[Box, Sequence[int]]] | None:
        return [(box, [0]) for box in self.boxes(tensor, "")[1:]]


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [(Overlapping, "(are|elements)"), (Zeroing, "other bits"), (Forgetful, "nobody holds it")],
)
def test_an_adapter_that_is_wrong_is_found(adapter: Callable[[], SpmdAdapter], sentence: str) -> None:
    with pytest.raises(ConformanceError, match=sentence):
        check_shard_adapter(adapter(), tiled)
