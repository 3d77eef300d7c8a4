"""Sharded tensors as plain tensors plus boxes: the one place that knows what a DTensor is, and where others join it.

An adapter says, for the tensors of one class, which boxes of the global tensor this process holds, gives their data, and
makes a tensor of the same class and layout from data that arrived. So no mesh, placement or process group ever travels: the
receiver keeps its own. Other SPMD tensors take part by an adapter of their own (`register_shard_adapter`).

`torch.distributed.tensor` takes a second to import, so that is left to who has a DTensor: it is imported then.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from torchft_ckpt.core.boxes import Box
from torchft_ckpt.errors import UnsupportedValueError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class ShardAdapter(ABC):
    """Tensors of one class, seen as boxes of a global tensor of `tensor.shape` and `tensor.dtype`. From any thread."""

    shares_memory: bool = False
    """Whether `data` are views of the tensor's own memory: then the state is read, and written to, in place."""

    @abstractmethod
    def handles(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of this class. Called often, so it should be quick."""

    @abstractmethod
    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        """Return the boxes that this process holds, each once, whatever the number of its replicas. Moves no data.

        Empty on a rank that holds nothing of the tensor. A box may be empty.

        Raises:
            UnsupportedValueError: what is here is no box, or no part of the value; the message has the path.
        """

    @abstractmethod
    def data(self, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        """Return a plain tensor for each of `boxes`, in that order. Data of a device is moved to the host at most once.

        Raises: as `boxes`.
        """

    def boxes_and_data(self, tensor: torch.Tensor, path: str) -> tuple[list[Box], list[torch.Tensor]]:
        """Return `boxes` and `data` together, where that is less work.

        Raises: as these.
        """
        return self.boxes(tensor, path), self.data(tensor, path)

    def holders(self, tensor: torch.Tensor, num_ranks: int) -> Sequence[tuple[Box, Sequence[int]]] | None:
        """Return the boxes of the whole tensor, and which ranks of this replica group hold each; None where that is not known.

        Optional. A durable save divides what is known among those who hold it. What is not is stored once by every rank that
        holds it, since nobody is asked.

        Args:
            tensor: one of this class.
            num_ranks: of the group; they are numbered from 0.

        The boxes are apart from each other and make up the whole tensor; empty ones may be left out. What is said of this rank
        is what `boxes` says. If any of that is not so, nothing of it counts. Nobody may be asked: the answer follows from what
        all ranks know alike, such as a mesh, and all of them give the same one. Where one rank says None all must: else
        they divide the save in different ways, and the hole is found and filled late, after `fill_after`.

        Called on the trainer's thread for each tensor of a save, so it should be quick; the answer must not change afterwards.
        """
        return None

    @abstractmethod
    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the class and layout of `like` that holds these shards, all of them, one for each of its boxes.

        It may use the memory of `data`, which are plain tensors on the host. Without communication.
        """


class DTensorAdapter(ShardAdapter):
    """`torch.distributed.tensor.DTensor`: each rank holds one box, or nothing where it is outside of the mesh."""

    shares_memory = True

    def handles(self, tensor: torch.Tensor) -> bool:
        return is_dtensor(tensor)

    def boxes(self, tensor: torch.Tensor, path: str) -> list[Box]:
        box = _box_of(cast("DTensor", tensor), path)
        return [] if box is None else [box]

    def data(self, tensor: torch.Tensor, path: str) -> list[torch.Tensor]:
        return self.boxes_and_data(tensor, path)[1]

    def boxes_and_data(self, tensor: torch.Tensor, path: str) -> tuple[list[Box], list[torch.Tensor]]:
        dtensor = cast("DTensor", tensor)
        box = _box_of(dtensor, path)
        if box is None:
            return [], []
        local = _local_of(dtensor)
        if tuple(local.shape) != box.sizes:
            raise UnsupportedValueError(
                f"state dict at {path!r}: the local shard has shape {tuple(local.shape)}, its placements say {box.sizes}",
                path,
            )
        return [box], [local]

    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        template = cast("DTensor", like)
        if not data:
            return template.detach()  # this rank is outside of the mesh: it holds nothing that could change
        (local,) = data
        with torch.no_grad():
            return DTensor.from_local(
                local.to(template.device),
                template.device_mesh,
                template.placements,
                run_check=False,
                shape=template.shape,
                stride=template.stride(),
            )


_known_boxes: weakref.WeakKeyDictionary[Any, dict[object, Box | None]] = weakref.WeakKeyDictionary()
"""By mesh, then by place in it, shape and placements: a model has few, and the trainer may be waiting. Keeps no mesh alive."""
_lock = threading.Lock()
_adapters: tuple[ShardAdapter, ...] = (DTensorAdapter(),)


def register_shard_adapter(adapter: ShardAdapter) -> None:
    """Have tensors of another class carried shard by shard, in this process. The latest registered is asked first."""
    global _adapters
    with _lock:
        _adapters = (adapter, *(known for known in _adapters if known is not adapter))


def unregister_shard_adapter(adapter: ShardAdapter) -> None:
    """Take an adapter back. Without effect where it is not registered."""
    global _adapters
    with _lock:
        _adapters = tuple(known for known in _adapters if known is not adapter)


def adapter_of(tensor: torch.Tensor) -> ShardAdapter | None:
    """Return the adapter that handles a tensor; None for one that is whole."""
    if type(tensor) in _PLAIN and (tensor.is_cpu or tensor.is_cuda):
        return None
    return next((adapter for adapter in _adapters if adapter.handles(tensor)), None)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors whose bytes a tensor has here; none where it has none, or an adapter copies them at capture."""
    adapter = adapter_of(tensor)
    if adapter is None:
        parts = [tensor]
    elif isinstance(adapter, DTensorAdapter):
        parts = [tensor._local_tensor]  # type: ignore[attr-defined]
    elif adapter.shares_memory:
        try:
            parts = adapter.data(tensor, "")
        except UnsupportedValueError:  # the capture names it
            parts = []
    else:
        parts = []
    return [part for part in parts if part.layout is torch.strided and part.numel()]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Where nobody has imported that module, nobody can have made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local_of(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        local = tensor.to_local()
    if type(local) is not torch.Tensor:  # a replicated result that is still being gathered
        wait = getattr(local, "wait", None)
        local = wait() if callable(wait) else local
    return local


def _box_of(tensor: DTensor, path: str) -> Box | None:
    """Return the box of a DTensor that this rank holds; None outside of its mesh."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    coordinate = mesh.get_coordinate()
    known = _known_boxes.get(mesh)
    if known is None:
        known = _known_boxes.setdefault(mesh, {})
    # Meshes are equal whatever rank this is; a process that joins again may be another.
    key = (None if coordinate is None else tuple(coordinate), tensor.shape, placements)
    if key in known:
        return known[key]
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedValueError(f"state dict at {path!r}: a DTensor with unreduced (Partial) values", path)
    box: Box | None = None
    if coordinate is not None:
        with torch.device("cpu"):  # it counts rows in a tensor, on the default device
            shape, offsets = compute_local_shape_and_global_offset(tuple(tensor.shape), mesh, placements)
        box = Box(tuple(offsets), tuple(shape))
        if any(hasattr(placement, "split_factor") for placement in placements):
            _check_one_box(tensor, list(coordinate), box, path)
    known[key] = box
    return box


def _check_one_box(tensor: DTensor, coordinate: list[int], box: Box, path: str) -> None:
    """Shard the row numbers of every dimension as the placements do, and see that they come out as one run.

    Strided shards (FSDP2 over tensor parallelism) can be one box or not, depending on their order.
    """
    for dim, size in enumerate(tensor.shape):
        rows = torch.arange(size, device="cpu")
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == dim:
                rows = _split_rows(placement, rows, tensor.device_mesh.size(mesh_dim))[coordinate[mesh_dim]]
        if rows.numel() and not torch.equal(
            rows, torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim], device="cpu")
        ):
            raise UnsupportedValueError(
                f"state dict at {path!r}: the local shard is not one box of the global tensor in dimension {dim} "
                f"(placements {tensor.placements})",
                path,
            )


def _split_rows(placement: Any, rows: torch.Tensor, num_shards: int) -> list[torch.Tensor]:
    """Cut row numbers as a placement cuts its dimension."""
    from torch.distributed.tensor import Shard

    split_factor = getattr(placement, "split_factor", None)
    flat = Shard(0) if split_factor is None else type(placement)(0, split_factor=split_factor)
    parts, _ = flat._split_tensor(rows, num_shards, with_padding=False)
    return list(parts)
