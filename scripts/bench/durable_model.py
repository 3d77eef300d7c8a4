"""The state that the durable benchmark saves, and what is in each element. It knows no processes and no checkpoints.

Parameters of a small transformer with Adam's moments: matrices and biases sharded as FSDP2 shards them, norms and a table of
positions plain and the same on all ranks, one `step` for each parameter, and plain values. Every element's bits follow from
its place in the whole tensor and a version, so any rank of any layout can check what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

HSDP = "hsdp"
"""Two groups of half the ranks each: replicated over the groups, sharded within."""
FSDP = "fsdp"
WHOLE = "whole"
"""Plain tensors, all of them whole."""

_ODD = 2_654_435_761
_INT32 = 1 << 32
_WIDTH, _QUICK_WIDTH = 512, 256
_NUM_LAYERS, _QUICK_NUM_LAYERS = 6, 3
_VOCABULARY = 12_287
_INTEGERS = {4: torch.int32, 2: torch.int16}
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shape:
    """One parameter."""

    name: str
    sizes: tuple[int, ...]
    is_sharded: bool = True
    dtype: torch.dtype = torch.float32


def parameters(*, quick: bool, width: int = 0) -> list[Shape]:
    """Return the parameters; with their moments they are 300 MB, or 42 MB, where no width is given."""
    width = width or (_QUICK_WIDTH if quick else _WIDTH)
    shapes = [
        Shape("embedding.weight", (_VOCABULARY, width)),
        Shape("positions", (1024, width), is_sharded=False, dtype=torch.bfloat16),
    ]
    for layer in range(_QUICK_NUM_LAYERS if quick else _NUM_LAYERS):
        for name, rows, columns in (
            ("attention.in", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            shapes.append(Shape(f"layers.{layer}.{name}.weight", (rows, columns)))
            shapes.append(Shape(f"layers.{layer}.{name}.bias", (rows,)))
        shapes += [Shape(f"layers.{layer}.norm.{name}", (width,), is_sharded=False) for name in ("weight", "bias")]
    return shapes


@dataclass(slots=True)
class Held:
    """A tensor as one rank holds it."""

    name: str
    given: Tensor
    local: Tensor
    """The memory of this rank; contiguous."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the whole tensor."""
    number: int


class Model:
    """What one rank holds.

    Args:
        layout: of `HSDP`, `FSDP` and `WHOLE`; the first two need a process group, which is asked nothing.
        dim: along which matrices are sharded.
        quick: a small one.
        width: of its layers; 0: the usual one.
    """

    def __init__(self, layout: str, *, dim: int, quick: bool, width: int = 0) -> None:
        self._mesh = _mesh(layout)
        self._dim = dim
        self._names: list[str] = []
        self.held: list[Held] = []
        self._parameters: dict[str, Tensor] = {}
        self._moments: dict[str, dict[str, Tensor]] = {}
        self._values: dict[str, Any] = {}
        for shape in parameters(quick=quick, width=width):
            self._parameters[shape.name] = self._hold(shape.name, shape)
            self._moments[shape.name] = {
                "step": self._hold(f"{shape.name}.step", Shape("", (), is_sharded=False)),
                **{moment: self._hold(f"{shape.name}.{moment}", shape) for moment in _MOMENTS},
            }
        self.version = 0
        self.set_values(0)

    @property
    def held_bytes(self) -> int:
        """What this rank holds."""
        return sum(held.local.nbytes for held in self.held)

    @property
    def unique_bytes(self) -> int:
        """What all ranks hold, each element once."""
        return sum(torch.Size(held.sizes).numel() * held.local.element_size() for held in self.held)

    def set_values(self, version: int) -> None:
        """Have the plain values say a version."""
        self.version = version
        self._values = {
            "groups": [{"lr": 3e-4 / (version + 1), "betas": (0.9, 0.95), "eps": 1e-8, "params": [*self._parameters]}],
            "scheduler": {"last_epoch": version, "base_lrs": [3e-4]},
            "tokens_seen": 4096 * version,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors are those that are held."""
        return {
            "model": dict(self._parameters),
            "optimizer": {
                "state": {name: dict(moments) for name, moments in self._moments.items()},
                "param_groups": [dict(group) for group in self._values["groups"]],
            },
            "scheduler": dict(self._values["scheduler"]),
            "tokens_seen": self._values["tokens_seen"],
        }

    def fill(self, version: int) -> None:
        """Give every element the bits of a version; with another version none keeps its own."""
        for held, integers in self._integers():
            integers.copy_(_bits(held, version))
        self.set_values(version)

    def add_one(self) -> None:
        """Go on to the next version, fast, as an optimizer's step would."""
        for _, integers in self._integers():
            integers.add_(1)
        self.set_values(self.version + 1)

    def clear(self) -> None:
        """Forget what is held."""
        for _, integers in self._integers():
            integers.zero_()
        self.set_values(-1_000_000)

    def wrong(self, version: int, state: dict[str, Any]) -> list[str]:
        """Return the tensors that do not have, bit by bit, those of a version, and the values of a state that are wrong."""
        names = [held.name for held, integers in self._integers() if not torch.equal(integers, _bits(held, version))]
        self.set_values(version)
        expected = self.state_dict()
        names += [key for key in ("scheduler", "tokens_seen") if state[key] != expected[key]]
        groups = [{**group, "betas": tuple(group["betas"])} for group in state["optimizer"]["param_groups"]]
        return names + ([] if groups == expected["optimizer"]["param_groups"] else ["param_groups"])

    def optimizer(self) -> torch.optim.Optimizer:
        """Return one that owns the state, and whose step goes on to the next version."""
        optimizer = _Stepper(self)
        for name, parameter in self._parameters.items():
            optimizer.state[parameter].update(self._moments[name])
        return optimizer

    def parameters(self) -> list[Tensor]:
        """Return what an optimizer is given."""
        return [*self._parameters.values()]

    def _integers(self) -> Iterator[tuple[Held, Tensor]]:
        for held in self.held:
            yield held, held.local.view(_INTEGERS[held.local.element_size()])

    def _hold(self, name: str, shape: Shape) -> Tensor:
        number = len(self.held)
        if self._mesh is None or not shape.is_sharded:
            local = torch.ones(shape.sizes, dtype=shape.dtype)
            self.held.append(Held(name, local, local, (0,) * len(shape.sizes), shape.sizes, number))
            return local
        dim = self._dim if len(shape.sizes) > self._dim else 0
        placements: list[Placement] = [Replicate()] * (self._mesh.ndim - 1) + [Shard(dim)]
        sizes, offsets = compute_local_shape_and_global_offset(shape.sizes, self._mesh, placements)
        local = torch.ones(sizes, dtype=shape.dtype)
        given = DTensor.from_local(
            local,
            self._mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape.sizes),
            stride=torch.empty(shape.sizes, device="meta").stride(),
        )
        self.held.append(Held(name, given, local, tuple(offsets), shape.sizes, number))
        return given


class _Stepper(torch.optim.Optimizer):
    def __init__(self, model: Model) -> None:
        super().__init__(model.parameters(), {"lr": 3e-4})
        self._model = model

    def step(self, closure: Any = None) -> None:
        self._model.add_one()


def _mesh(layout: str) -> DeviceMesh | None:
    if layout == WHOLE:
        return None
    world_size = torch.distributed.get_world_size()
    if layout == HSDP:
        return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))


def _bits(held: Held, version: int) -> Tensor:
    """Return what a rank's part of a tensor has in a version, as integers."""
    here = held.local.shape
    if len(here) == 2:
        rows, columns = (torch.arange(low, low + size) for low, size in zip(held.offsets, here, strict=True))
        num_columns = held.sizes[1]
    else:
        rows, num_columns = torch.zeros(1, dtype=torch.int64), 1
        low = held.offsets[0] if held.offsets else 0
        columns = torch.arange(low, low + held.local.numel())
    start = held.number * 104_729 + version
    bits = _wrapped(rows * num_columns, start).unsqueeze(1) + _wrapped(columns, 0).unsqueeze(0)
    return bits.reshape(here).to(_INTEGERS[held.local.element_size()])


def _wrapped(places: Tensor, start: int) -> Tensor:
    """Return `places * _ODD + start` as 32-bit integers, so that the sum of two of them is that of their places."""
    half = _INT32 // 2
    return ((places * _ODD + start + half) % _INT32 - half).to(torch.int32)
