"""What has to be fetched for the boxes that are wanted: parts, and who can give each. Nothing is fetched before all is covered.

It compares manifests; it knows neither connections nor digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.protocol import BoxRequest
from torchft_ckpt.checkpointing.state.blocks import start_blake3
from torchft_ckpt.checkpointing.state.description import Description, HeldEntry, entries_of, ties_of
from torchft_ckpt.checkpointing.state.dtypes import dtype_name
from torchft_ckpt.checkpointing.state.format import Manifest, WireTensor
from torchft_ckpt.checkpointing.state.local_state import LocalMemory, box_of, some_of
from torchft_ckpt.checkpointing.state.memory import SLICE_BYTES, ReadInto, Update
from torchft_ckpt.checkpointing.state.regions import Region, gather, region_of, scatter, slices
from torchft_ckpt.checkpointing.state.target import Want, is_same_memory
from torchft_ckpt.checkpointing.state.tree import items_of_node
from torchft_ckpt.core.boxes.geometry import Box, contains, refine, relative_to, split
from torchft_ckpt.core.transfer.scheduler import mask_of_each
from torchft_ckpt.errors import SourceRefusedError, StateFormatError, StateMismatchError

GoOn = Callable[[], None]
PART_BYTES = 4 * 1024 * 1024
MAX_PLANNED = 2**21
"""Parts of one plan: 8 TiB in whole ones, or 20,000 tensors that 100 ranks hold in shards."""
_NAMED = 5
_COMPARED_FROM_BYTES = 256 * 1024
"""A smaller part is fetched sooner than it is compared."""
SAMPLE_ELEMENTS = 64
_WHOLE_SAMPLES = 32
"""A box of so many samples is compared whole."""


class PlannedPart(NamedTuple):
    """A box to fetch, and where it goes: a region of the target's memory, counted from its first element."""

    name: str
    box: Box
    target: torch.Tensor
    memory: memoryview
    """The target's, from its first element to its last; `target` keeps it."""
    region: Region
    local: LocalMemory | None = None
    """Memory laid out as the target's, of what is here, or the target's own; None: there is none, or it is not worth a look."""


class Place(NamedTuple):
    """Where a rank has a box: the tensor and the chunk by their places in its manifest."""

    rank: int
    tensor: int
    chunk: int
    box: Box


class SourceGroup:
    """The manifests of one source group's ranks; None of a rank that did not answer."""

    def __init__(self, names: list[str], manifests: list[Manifest | None]) -> None:
        self.names = names
        self.manifests = manifests
        self._entries: dict[str, list[HeldEntry]] | None = None
        self._descriptions: dict[int, Description] = {}

    def entries(self) -> dict[str, list[HeldEntry]]:
        """Return, by name, what each rank says of each tensor."""
        if self._entries is None:
            self._entries = entries_of(self.manifests)
        return self._entries

    def description(self, rank: int) -> Description:
        """Return the state that the group holds, with the tree and the plain values of one rank.

        Args:
            rank: modulo the size of the group; of one that did not answer it is the next one.

        Raises:
            StateMismatchError, SourceRefusedError: as `tensors_of`.
        """
        first = rank % len(self.manifests)
        if first not in self._descriptions:
            tensors = tensors_of(self)
            ordered = (*self.manifests[first:], *self.manifests[:first])
            own = next(manifest for manifest in ordered if manifest is not None)
            self._descriptions[first] = Description(
                tree=own.tree,
                tensors=own.tensors,
                chunks=[entry.chunks for entry in own.tensors],
                ties=ties_of(self.entries()),
                others=tensors.keys() - {entry.fqn for entry in own.tensors},
            )
        return self._descriptions[first]


@dataclass(frozen=True, slots=True)
class Plan:
    """All parts, and who can give each: by the source's name, the part and where that source has it."""

    parts: list[PlannedPart]
    holders: dict[str, dict[int, Place]]
    group_of: dict[str, int]
    """Which group each source is in; 0 is the primary."""

    def ask_for(self, name: str, parts: Iterable[int], *, sample: int = 0) -> list[BoxRequest]:
        """Return what to ask a source for, to be given these parts. The seed of each digest is the part's number.

        Args:
            sample: so many elements of each, `sample_of`; 0: all.
        """
        places = self.holders[name]
        boxes = {part: sample_of(self.parts[part].box, sample) if sample else self.parts[part].box for part in parts}
        return [
            BoxRequest(
                tensor=places[part].tensor,
                chunk=places[part].chunk,
                seed=part,
                offsets=list(box.offsets),
                sizes=list(box.sizes),
            )
            for part, box in boxes.items()
        ]

    def copies(self, names: Iterable[str]) -> dict[str, int]:
        """Return, by source, a bit set of the parts that one before it in `names` has as well."""
        given = 0
        found: dict[str, int] = {}
        for name in names:
            parts = mask_of_each(self.holders.get(name, ()))
            if given & parts:
                found[name] = given & parts
            given |= parts
        return found

    def sample_here(self, unit: int) -> bytes:
        """Return the BLAKE3 digest of the sample of a part that has a `local`."""
        where = self.parts[unit]
        sample = sample_of(where.box)
        skipped = sum(
            (size - few) // 2 * stride
            for size, few, stride in zip(where.box.sizes, sample.sizes, where.target.stride(), strict=True)
        )
        itemsize = where.target.element_size()
        start = where.region.start + skipped * itemsize
        hasher = start_blake3()
        if where.local is not None:
            hasher.update(where.local.view[start : start + sample.volume * itemsize])
        return hasher.digest()

    def take_local(self, unit: int) -> bytes:
        """Copy a part that has a `local` to where it goes; return its BLAKE3 digest there.

        It is copied before it is looked at, so that a state that changes meanwhile does no harm.
        """
        where = self.parts[unit]
        if where.local is not None and not is_same_memory(where.local.tensor, where.target):
            scratch = memoryview(bytearray(min(where.region.num_bytes, SLICE_BYTES)))
            for piece in slices(where.region, SLICE_BYTES, 1 << 62):
                data = scratch[: piece.num_bytes]
                gather(where.local.view[piece.start : piece.stop], piece, data)
                scatter(data, where.memory[piece.start : piece.stop], piece)
        return self.blake3_of(unit)

    def receive(self, unit: int, read_into: ReadInto, scratch: memoryview, update: Update) -> None:
        """Receive a part; see `streams.Memory`."""
        where = self.parts[unit]
        is_one_run = not where.region.steps and where.region.run <= len(scratch)
        for piece in (where.region,) if is_one_run else slices(where.region, len(scratch), 1 << 62):
            memory = data = where.memory[piece.start : piece.stop]
            if piece.steps:
                data = scratch[: piece.num_bytes]
            read_into(data)
            if piece.steps:
                scatter(data, memory, piece)
            update(data)

    def wipe(self, unit: int) -> None:
        """Write zeros over a part that does not count: the next receive may look here for what it need not fetch."""
        where = self.parts[unit]
        for piece in slices(where.region, SLICE_BYTES, 1 << 62):
            scatter(memoryview(bytes(piece.num_bytes)), where.memory[piece.start : piece.stop], piece)

    def blake3_of(self, unit: int) -> bytes:
        """Return the BLAKE3 digest of a part that is here, over its elements in C order."""
        where = self.parts[unit]
        hasher = start_blake3()
        scratch = memoryview(bytearray(min(where.region.num_bytes, SLICE_BYTES)))
        for piece in slices(where.region, SLICE_BYTES, 1 << 62):
            memory = where.memory[piece.start : piece.stop]
            if piece.steps:
                gather(memory, piece, scratch[: piece.num_bytes])
                memory = scratch[: piece.num_bytes]
            hasher.update(memory)
        return hasher.digest()


def sample_of(box: Box, num_elements: int = SAMPLE_ELEMENTS) -> Box:
    """Return all of a small box, else some elements next to each other in its middle, which change if it is trained."""
    if box.volume <= _WHOLE_SAMPLES * num_elements:
        return box
    sizes = (1,) * (len(box.sizes) - 1) + tuple(min(size, num_elements) for size in box.sizes[-1:])
    offsets = (low + (size - few) // 2 for low, size, few in zip(box.offsets, box.sizes, sizes, strict=True))
    return Box(tuple(offsets), sizes)


def tensors_of(group: SourceGroup) -> dict[str, WireTensor]:
    """Return the tensors that a group holds, by name.

    Raises:
        StateMismatchError: its ranks disagree on a shape or a dtype.
    """
    tensors: dict[str, WireTensor] = {}
    wrong = []
    for name, held in group.entries().items():
        first = tensors[name] = held[0][2]
        wrong += [
            f"{name[:120]} is {first.dtype}{first.shape} on rank {held[0][0]}, {entry.dtype}{entry.shape} on rank {rank}"
            for rank, _, entry in held[1:]
            if (entry.dtype, entry.shape) != (first.dtype, first.shape)
        ]
    if wrong:
        raise StateMismatchError(
            f"the ranks of the source {group.names[0]} do not hold one state: {some_of(wrong)}; nothing was received",
            party=group.names[0],
        )
    named = {
        name: state_name(manifest) for name, manifest in zip(group.names, group.manifests, strict=True) if manifest
    }
    if len(set(map(repr, named.values()))) > 1:
        raise SourceRefusedError(
            f"the ranks of the source {group.names[0]} do not hold one state: "
            f"{some_of(f'{name} holds {own}' for name, own in named.items())}; nothing was received",
            party=group.names[0],
        )
    return tensors


def state_name(manifest: Manifest) -> object:
    """Return by what a Manager names a state beyond its step: the quorum that it was committed in. None of another state."""
    for key, node in items_of_node(manifest.tree):
        if key == "torchft":
            own = dict((key, value) for key, value in items_of_node(node) if isinstance(key, str))
            return {key: own.get(key) for key in ("step", "quorum_id", "epoch")}
    return None


def candidates_among(groups: Sequence[SourceGroup]) -> list[int]:
    """Return the groups whose state could stand for the first one's: the same tensors, tied in the same way, on every rank."""
    first = _traits(groups[0]) if len(groups) > 1 else None  # None if its ranks list different tensors
    return [
        number for number, group in enumerate(groups) if not number or (first is not None and _traits(group) == first)
    ]


def _traits(group: SourceGroup) -> dict[str, tuple[object, ...]] | None:
    """Return, by name, dtype, shape and the first tensor that it is tied to; None if the ranks differ."""
    entries = group.entries()
    num_ranks = sum(manifest is not None for manifest in group.manifests)
    twins: dict[int, str] = {}
    ties = ties_of(entries)
    own = {repr(state_name(manifest)) for manifest in group.manifests if manifest is not None}
    traits: dict[str, tuple[object, ...]] = {"": tuple(sorted(own))}
    for name, held in sorted(entries.items()):
        kinds = {(entry.dtype, *entry.shape) for _, _, entry in held}
        if len(held) != num_ranks or len(kinds) != 1:
            return None
        traits[name] = (*kinds, twins.setdefault(id(ties[name]), name))
    return traits


def plan_parts(wants: Sequence[Want], groups: Sequence[SourceGroup], go_on: GoOn = lambda: None) -> Plan:
    """Return the parts that make up what is wanted.

    Args:
        wants: each fits the tensor of its name; empty boxes need nothing.
        groups: the primary first. Others may hold their tensors in other shards; what is of another shape or dtype there is
            left aside.
        go_on: called all the time, and raises if the plan is not wanted any more: what manifests announce may take long.

    Raises:
        StateMismatchError: the primary's ranks do not hold all of it; the message names the first few tensors.
        StateFormatError: the boxes are none of any mesh, or too many.
        And what `go_on` raises.
    """
    indexes = [_places(group) for group in groups]
    shapes = {name: held[0][2].shape for name, held in groups[0].entries().items()}
    parts: list[PlannedPart] = []
    holders: dict[str, dict[int, Place]] = {}
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    holes: list[str] = []
    for want in wants:
        key = (want.name, dtype_name(want.target.dtype), *shapes.get(want.name, ()))
        places = [index.get(key, []) for index in indexes]
        go_on()
        cells = cells_of(want.name, want.box, list({place.box for of_group in places for place in of_group}))
        itemsize = want.target.element_size()
        strides = want.target.stride()
        memory = want.memory()
        for cell in cells:
            go_on()
            able = [
                (group.names[place.rank], place)
                for group, of_group in zip(groups, places, strict=True)
                for place in of_group
                if contains(place.box, cell)
            ]
            if not any(contains(place.box, cell) for place in places[0]):
                holes.append(f"{want.name[:120]} {cell}")
                break
            for box in split(cell, PART_BYTES // itemsize):
                region = region_of(0, strides, relative_to(box, want.box), itemsize)
                for name, place in able:
                    holders.setdefault(name, {})[len(parts)] = place
                local = want.local if region.num_bytes >= _COMPARED_FROM_BYTES else None
                parts.append(PlannedPart(want.name, box, want.target, memory, region, local))
        if len(parts) > MAX_PLANNED:
            raise StateFormatError(f"the sources' boxes cut the state into more than {MAX_PLANNED} parts", "source")
    if holes:
        absent = [name for name, manifest in zip(groups[0].names, groups[0].manifests, strict=True) if manifest is None]
        why = f" ({', '.join(map(str, absent[:_NAMED]))} did not answer)" if absent else ""
        raise StateMismatchError(
            f"no rank of the source group of {groups[0].names[0]} holds {some_of(holes)}{why}; nothing was received",
            party=groups[0].names[0],
        )
    return Plan(parts, holders, group_of)


def cells_of(name: str, box: Box, chunks: Sequence[Box]) -> list[Box]:
    """Cut a box of a tensor where chunks begin and end.

    Raises:
        StateFormatError: the chunks are none of any mesh.
    """
    try:
        return refine(box, chunks)
    except ValueError as error:
        raise StateFormatError(f"tensor {name[:120]}: {error}", party="source") from error


def _places(group: SourceGroup) -> dict[tuple[object, ...], list[Place]]:
    """Return where a group's ranks have what, by name, dtype and shape. A box that several ranks hold is there several times."""
    places: dict[tuple[object, ...], list[Place]] = {}
    for name, held in group.entries().items():
        for rank, index, entry in held:
            of_entry = places.setdefault((name, entry.dtype, *entry.shape), [])
            of_entry += [Place(rank, index, number, box_of(chunk)) for number, chunk in enumerate(entry.chunks)]
    return places
