"""Sharded tensors as plain tensors plus boxes: the one place that knows what a DTensor is, and where others join it.

An adapter says, for the tensors of one class, which boxes of the global tensor this process holds, gives their data, and
makes a tensor of the same class and layout from data that arrived. So no process group or rank ever travels: the
receiver keeps its own. What does travel of a DTensor is how it lies on its mesh, in sizes and numbers (`MeshLayout`): where the
state that is here has none of that name, one is made on a mesh of that shape, if this process has one. Other SPMD tensors take
part by an adapter of their own (`register_shard_adapter`).

`torch.distributed.tensor` takes a second to import, so that is left to who has a DTensor: it is imported then.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import torch

from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import UnsupportedValueError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_MAX_MESH_DIMS = 8
_MAX_STRIDED_ROWS = 1 << 24
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class MeshLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The layout of a DTensor on its mesh."""

    device: _Name
    """Kind of the mesh's devices: `cpu`, `cuda`."""
    mesh: Annotated[list[_Count], msgspec.Meta(min_length=1, max_length=_MAX_MESH_DIMS)]
    """Its shape."""
    names: Annotated[list[_Name], msgspec.Meta(max_length=_MAX_MESH_DIMS)] | None
    """Of its dimensions."""
    placements: Annotated[list[list[_Count]], msgspec.Meta(max_length=_MAX_MESH_DIMS)]
    """For each of its dimensions: nothing if the tensor is replicated, the tensor's dimension if it is sharded, and the
    factor behind it if the shards are strided."""
    stride: Annotated[list[_Count], msgspec.Meta(max_length=64)]
    """Of the whole tensor, in items."""


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
        """Return `boxes` and `data` together, if that is less work.

        Raises: as these.
        """
        return self.boxes(tensor, path), self.data(tensor, path)

    def holders(self, tensor: torch.Tensor, num_ranks: int) -> Sequence[tuple[Box, Sequence[int]]] | None:
        """Return the boxes of the whole tensor, and which ranks of this replica group hold each; None if that is not known.

        Optional. A durable save divides what is known among those who hold it. What is not is stored once by every rank that
        holds it, since nobody is asked.

        Args:
            tensor: one of this class.
            num_ranks: of the group; they are numbered from 0.

        The boxes are apart from each other and make up the whole tensor; empty ones may be left out. What is said of this rank
        is what `boxes` says. If any of that is not so, nothing of it counts. Nobody may be asked: the answer follows from what
        all ranks know alike, such as a mesh, and all of them give the same one. If one rank says None all must: else
        they divide the save in different ways, and a checkpoint with a hole is not closed: its writers get an error.

        Called on the trainer's thread for each tensor of a save, so it should be quick; the answer must not change afterwards.
        """
        return None

    def layout(self, tensor: torch.Tensor) -> MeshLayout | None:
        """Return how a tensor lies on a device mesh; None if it lies on none, or otherwise. Of this library's own adapters."""
        return None

    @abstractmethod
    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the class and layout of `like` that holds these shards, all of them, one for each of its boxes.

        It may use the memory of `data`, which are plain tensors on the host. Without communication.
        """


class DTensorAdapter(ShardAdapter):
    """`torch.distributed.tensor.DTensor`: each rank holds one box, or nothing if it is outside of the mesh."""

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

    def layout(self, tensor: torch.Tensor) -> MeshLayout | None:
        from torch.distributed.tensor import Replicate, Shard

        dtensor = cast("DTensor", tensor)
        mesh = dtensor.device_mesh
        placements: list[list[int]] = []
        for placement in dtensor.placements:
            factor = getattr(placement, "split_factor", None)
            if isinstance(placement, Replicate):
                placements.append([])
            elif factor is not None:
                placements.append([placement.dim, factor])  # type: ignore[attr-defined]
            elif type(placement) is Shard:
                placements.append([placement.dim])
            else:
                return None
        names = mesh.mesh_dim_names
        return MeshLayout(
            device=mesh.device_type,
            mesh=list(mesh.shape),
            names=None if names is None else list(names),
            placements=placements,
            stride=list(dtensor.stride()),
        )

    def rebuild(self, like: torch.Tensor, data: Sequence[torch.Tensor]) -> torch.Tensor:
        template = cast("DTensor", like)
        if not data:
            return template.detach()  # this rank is outside of the mesh: it holds nothing that could change
        (local,) = data
        mesh, placements = template.device_mesh, template.placements
        return _dtensor(local.to(template.device), mesh, placements, template.shape, template.stride())


_known_boxes: weakref.WeakKeyDictionary[Any, dict[object, Box | None]] = weakref.WeakKeyDictionary()
"""By mesh, then by place in it, shape and placements: a model has few, and the trainer may be waiting. Keeps no mesh alive."""
_lock = threading.Lock()
_adapters: tuple[ShardAdapter, ...] = (DTensorAdapter(),)


def register_shard_adapter(adapter: ShardAdapter) -> None:
    """Have tensors of another class carried shard by shard, in this process. The latest registered is asked first."""
    global _adapters
    with _lock:
        _adapters = (adapter, *(known for known in _adapters if known is not adapter))


def register_own_adapter(adapter: ShardAdapter) -> None:
    """Have tensors of another class carried, as `register_shard_adapter`. An adapter of this library: users' are asked first."""
    global _adapters
    with _lock:
        _adapters = (*_adapters[:-1], adapter, _adapters[-1])


def unregister_shard_adapter(adapter: ShardAdapter) -> None:
    """Take an adapter back. Without effect if it is not registered."""
    global _adapters
    with _lock:
        _adapters = tuple(known for known in _adapters if known is not adapter)


def adapter_of(tensor: torch.Tensor) -> ShardAdapter | None:
    """Return the adapter that handles a tensor; None for one that is whole."""
    if type(tensor) in _PLAIN and (tensor.is_cpu or tensor.is_cuda):
        return None
    if tensor.device.type == "xla":
        _import_xla()
    return next((adapter for adapter in _adapters if adapter.handles(tensor)), None)


@functools.cache
def _import_xla() -> None:
    """Import torch_xla's adapter, which registers itself: a process without a tensor on such a device does without."""
    import torchft_ckpt.integrations.xla  # noqa: F401


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors whose bytes a tensor has here; none if it has none, or an adapter copies them at capture."""
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


class KnownMeshes:
    """The device meshes of this process that a received DTensor may be made on.

    Those of the DTensors of a state that is here; else the mesh of one dimension over the default process group.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if is_dtensor(tensor)}  # type: ignore[attr-defined]
        self._meshes: list[DeviceMesh] = list(found.values())

    def why_not(self, layout: MeshLayout, shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
        """Return why no DTensor can be made that has these boxes, to be said of it; None if it can."""
        mesh = self._find(layout)
        names = "" if layout.names is None else f" ({', '.join(layout.names)})"
        what = f"mesh {'x'.join(map(str, layout.mesh))}{names} of {layout.device}"
        if mesh is None:
            return f"of a {what}, of which none is known in this process"
        try:
            placements = _placements_of(layout, len(shape))
            _check_strided(layout, shape)
            here = _box_on(mesh, placements, tuple(shape))
        except (ValueError, RuntimeError) as error:
            return f"laid out as nothing can be ({error})"
        if [here] != list(boxes) and not (here is None and not boxes):
            return f"of a {what}, of which this rank's part is {here or 'none'}"
        return None

    def make(self, layout: MeshLayout, shape: Sequence[int], data: torch.Tensor) -> torch.Tensor:
        """Return the DTensor that has this shard here, where `why_not` says nothing. Without communication."""
        mesh = cast("DeviceMesh", self._find(layout))
        return _dtensor(data.to(mesh.device_type), mesh, _placements_of(layout, len(shape)), shape, layout.stride)

    def _find(self, layout: MeshLayout) -> DeviceMesh | None:
        names = None if layout.names is None else tuple(layout.names)
        for mesh in self._meshes:
            if (mesh.device_type, list(mesh.shape), mesh.mesh_dim_names) == (layout.device, layout.mesh, names):
                return mesh
        world = _world_mesh(layout, names)
        if world is not None:
            self._meshes.append(world)
        return world


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


def _world_mesh(layout: MeshLayout, names: tuple[str, ...] | None) -> DeviceMesh | None:
    """Return the default process group as a mesh, if it is of that shape. Nobody else is asked."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", *([accelerator.type] if accelerator is not None else [])}
    world = torch.distributed.group.WORLD
    if world is None or layout.mesh != [torch.distributed.get_world_size()] or layout.device not in kinds:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    try:
        return DeviceMesh.from_group(world, layout.device, mesh_dim_names=names)
    except (RuntimeError, ValueError):  # the group has no backend for such devices
        return None


def _placements_of(layout: MeshLayout, num_dims: int) -> list[Any]:
    """Return torch's placements.

    Raises:
        ValueError: there are none such for a tensor of so many dimensions.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Any] = []
    for numbers in layout.placements:
        if len(numbers) > 2 or (numbers and numbers[0] >= num_dims) or 0 in numbers[1:]:
            raise ValueError(f"placement {numbers} of a tensor of {num_dims} dimensions")
        if not numbers:
            placements.append(Replicate())
        else:
            placements.append(
                Shard(numbers[0]) if len(numbers) == 1 else _StridedShard(numbers[0], split_factor=numbers[1])
            )
    if len(placements) != len(layout.mesh) or len(layout.stride) != num_dims:
        raise ValueError(
            "it has not one placement for each dimension of its mesh, or not one stride for each of its own"
        )
    return placements


def _check_strided(layout: MeshLayout, shape: Sequence[int]) -> None:
    """To say where strided shards lie, torch makes a tensor of all rows: who announces many must not choose how much memory."""
    if any(len(numbers) == 2 and shape[numbers[0]] > _MAX_STRIDED_ROWS for numbers in layout.placements):
        raise ValueError(f"strided shards of more than {_MAX_STRIDED_ROWS} rows")


def _box_on(mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...]) -> Box | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:
        return None
    with torch.device("cpu"):  # it counts rows in a tensor, on the default device
        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(sizes))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. If nobody has imported that module, nobody can have made one."""
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
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    coordinate = mesh.get_coordinate()
    known = _known_boxes.get(mesh)
    if known is None:
        known = _known_boxes.setdefault(mesh, {})
    # Meshes are equal whatever rank this is; a process that comes back may be another.
    key = (None if coordinate is None else tuple(coordinate), tensor.shape, placements)
    if key in known:
        return known[key]
    from torch.distributed.tensor import Partial

    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedValueError(f"state dict at {path!r}: a DTensor with unreduced (Partial) values", path)
    box: Box | None = None
    if coordinate is not None:
        box = cast(Box, _box_on(mesh, placements, tuple(tensor.shape)))
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
    from torch.distributed.tensor import Shard

    split_factor = getattr(placement, "split_factor", None)
    flat = Shard(0) if split_factor is None else type(placement)(0, split_factor=split_factor)
    parts, _ = flat._split_tensor(rows, num_shards, with_padding=False)
    return list(parts)
