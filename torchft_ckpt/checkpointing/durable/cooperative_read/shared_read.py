"""Reading a checkpoint once in a group of several ranks: each reads a share from storage, the rest travels between them.

What several ranks want is cut into equal shares by arithmetic (`core/durable/assignment.py`), each read by one of those who want
it and can read it. Each rank works that out alone, from the checkpoint and what all of them have said that they want and see. A
share is read straight into this rank's own tensors where it wants it itself, and served from there; what others have read is
fetched by the transport. So no byte is read twice, and none is kept twice. What ranks have saved otherwise under one name is not
shared: each reads what its own rank saved, or has it read by one who can.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch

from torchft_ckpt.checkpointing.durable.cooperative_read.lookup import Found
from torchft_ckpt.checkpointing.durable.cooperative_read.ranks import Ranks
from torchft_ckpt.checkpointing.durable.format.manifest import BoxEntry
from torchft_ckpt.checkpointing.durable.names import PartName
from torchft_ckpt.checkpointing.durable.reading.checkpoint import NUM_THREADS, SavedTensor
from torchft_ckpt.checkpointing.durable.reading.reader import CheckpointReader
from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.state.blocks import start_blake3
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import Box, are_told_apart, contains, fits, refine, subtract, whole
from torchft_ckpt.core.durable.assignment import Item, assign_writes
from torchft_ckpt.errors import CheckpointError, torn_where_it_raises
from torchft_ckpt.threads import parallel_map

Boxes = Mapping[str, Sequence[Box]]
"""By the name of a tensor, boxes of it."""


def deal_reading(
    tensors: Mapping[str, SavedTensor],
    wanted: Sequence[Boxes],
    readers: Mapping[PartName, frozenset[int]] | None,
) -> list[list[tuple[str, Box]]]:
    """Return what each rank reads: everything that is wanted once, as far as anybody can read it.

    A share lies wholly inside or outside of every box that is wanted.

    Args:
        wanted: by rank, what it wants; the checkpoint has that.
        readers: who can read which part; None where all ranks can read all of them.
    """
    everybody = frozenset(range(len(wanted)))
    by_name: dict[str, dict[Box, set[int]]] = {}
    for rank, boxes in enumerate(wanted):
        for name, of_name in boxes.items():
            for box in of_name:
                if box.volume:
                    by_name.setdefault(name, {}).setdefault(box, set()).add(rank)
    items: list[Item] = []
    for name in sorted(by_name):
        tensor = tensors[name]
        for box, wanting in _apart(tensor.shape, by_name[name]):
            for cell, able in _by_readers(tensor, box, readers, everybody):
                holders = (wanting & able) or able
                if holders:
                    items.append(Item(name, cell, tensor.dtype.itemsize, tensor.shape, tuple(sorted(holders))))
    shares = assign_writes(items, len(wanted))
    return [[(items[share.item].name, share.box) for share in of_rank] for of_rank in shares]


def _apart(shape: Sequence[int], wanted: Mapping[Box, set[int]]) -> Iterable[tuple[Box, frozenset[int]]]:
    """Return boxes that do not overlap and make up all that is wanted, each with those who want it."""
    boxes = sorted(wanted)
    if not are_told_apart(boxes):
        try:
            cells = refine(whole(shape), boxes)
        except ValueError:
            cells = boxes  # no mesh's: what overlaps is read more than once
        around = ((cell, [box for box in boxes if contains(box, cell)]) for cell in cells)
        return [(cell, frozenset().union(*(wanted[box] for box in outer))) for cell, outer in around if outer]
    return [(box, frozenset(wanted[box])) for box in boxes]


def _by_readers(
    tensor: SavedTensor, box: Box, readers: Mapping[PartName, frozenset[int]] | None, everybody: frozenset[int]
) -> Iterable[tuple[Box, frozenset[int]]]:
    """Cut a box where those who can read it change."""
    if readers is None:
        return [(box, everybody)]
    pieces = [(piece.box, readers.get(piece.part.name, frozenset()) & everybody) for piece in tensor.pieces]
    try:
        cells = refine(box, [piece for piece, _ in pieces])
    except ValueError:
        return []
    return [(cell, frozenset().union(*(able for piece, able in pieces if contains(piece, cell)))) for cell in cells]


logger = logging.getLogger(__name__)
_DIGESTED_AT_ONCE = 64 * 1024 * 1024
_LEASE = timedelta(days=1)
"""Longer than any read: what is served ends with the read, or with the transport."""


class _Wants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank wants, by the name of a tensor; and where it serves what it reads."""

    boxes: dict[str, list[BoxEntry]]
    address: str
    own: dict[str, list[BoxEntry]] = {}
    """What it wants as its own rank saved it, and others can read."""


class _Share(NamedTuple):
    """A box that one rank reads for all that want it."""

    name: str
    box: Box
    own_of: int | None = None
    """As this rank saved it, which alone wants that."""


class _Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank has done its part: it has read, or has, all of it."""

    digests: list[str] = []
    """BLAKE3 of each box of its share, if there is a token: who stands on the way between two ranks alters nothing unseen."""


_decode_wants = msgspec.json.Decoder(_Wants).decode
_decode_done = msgspec.json.Decoder(_Done).decode


class SharedRead:
    """One rank's part in reading one checkpoint. `read` once; all ranks of the group do the same.

    Args:
        timeout: how long fetching from the others may take.
    """

    def __init__(self, found: Found, reader: CheckpointReader, ranks: Ranks, *, timeout: timedelta) -> None:
        self._found = found
        self._reader = reader
        self._ranks = ranks
        self._timeout = timeout
        self.bytes_from_peers = self._digested_bytes = 0
        self._fetched: dict[int, int] = {}
        """By rank, the bytes that have come from it so far."""

    @property
    def done_bytes(self) -> int:
        """How many bytes were digested or have come from other ranks: it grows for as long as that goes on. From any thread."""
        return self._digested_bytes + sum([*self._fetched.values()])

    def read(self, wants: Sequence[Want]) -> None:
        """Fill targets. Returns when all ranks have what they want.

        Args:
            wants: boxes of tensors, and memory on the CPU for each. It must not change meanwhile: it is served.

        Raises:
            CheckpointError: as `CheckpointReader.read`, or as `Ranks.say`.
        """
        reader, ranks, transport = self._reader, self._ranks, self._ranks.transport
        if ranks.num_ranks == 1 or transport is None:
            reader.read_own(wants)
            return
        if misfits := [want for want in wants if not _is_there(want, reader)]:
            reader.read(misfits)
        alone = [want for want in wants if reader.is_own(want)]
        together = [want for want in wants if not reader.is_own(want)]
        own = _OwnWants(together, [ranks.rank if reader.is_own_elsewhere(want) else None for want in together])
        wishes = _Wants(own.entries(None), transport.metadata(), own.entries(ranks.rank))
        said = ranks.say("what it wants", wishes, _decode_wants)
        shares = self._deal(said)
        mine = shares[ranks.rank]
        state = _read_share(reader, own, mine)  # by the number of each box in the share
        with torn_where_it_raises(f"reading {reader.location}", reader.location):
            if alone:
                reader.read_own(alone)
            transport.send_checkpoint([], self._found.checkpoint.name.step, state, _LEASE)
            digests = parallel_map(self._digest, [*state.values()] if transport.token else [], NUM_THREADS)
            try:
                has_read = ranks.say("what it reads", _Done(digests), _decode_done)
                left = own.outside(shares)
                if left:
                    logger.warning("nobody else can read %d boxes that rank %d wants", len(left), ranks.rank)
                tasks = [
                    (transport, rank, said[rank].address, needed)
                    for rank, share in enumerate(shares)
                    if rank != ranks.rank and (needed := own.needed(share, has_read[rank].digests))
                ]
                left += [want for wants in parallel_map(self._fetch, tasks, NUM_THREADS) for want in wants]
                if left:
                    reader.read_own(left)
                own.copy_doubles()
                ranks.say_done("what it has")
            finally:
                transport.withdraw_checkpoint()

    def _deal(self, said: Sequence[_Wants]) -> list[list[_Share]]:
        """Return what each rank reads."""
        tensors, readers = self._reader.tensors, self._found.readers
        dealt = deal_reading(tensors, [_boxes_of(one.boxes) for one in said], readers)
        shares = [[_Share(name, box) for name, box in of_rank] for of_rank in dealt]
        for rank, one in enumerate(said):
            if one.own:
                saved = {name: tensors[name].of_rank(rank) for name in one.own}
                wanted = [_boxes_of(one.own) if other == rank else {} for other in range(len(said))]
                for share, of_rank in zip(shares, deal_reading(saved, wanted, readers), strict=True):
                    share += [_Share(name, box, rank) for name, box in of_rank]
        return shares

    def _fetch(self, source: tuple[HTTPTransport[Any], int, str, list[tuple[Want, Want, str]]]) -> list[Want]:
        """Fetch what another rank has read for this one; return what could not be had. See `_OwnWants.needed`."""
        transport, rank, address, needed = source
        left = wants = [want for want, _, _ in needed]

        def note(progress: TransferProgress) -> None:
            self._fetched[rank] = progress.received_bytes

        try:
            served = [there for _, there, _ in needed]
            transport.fetch_boxes(address, served, self._found.checkpoint.name.step, self._timeout, note)
            left = [want for want, _, digest in needed if digest and self._digest(want.target) != digest]
            why: object = "it was altered on the way"
        except CheckpointError as error:
            why = error
        num_left = sum(want.target.nbytes for want in left)
        if left:
            what = f"{num_left} bytes by itself that rank {rank} was to give it"
            logger.warning("rank %d reads %s: %s", self._ranks.rank, what, why)
        self.bytes_from_peers += sum(want.target.nbytes for want in wants) - num_left
        return left

    def _digest(self, tensor: torch.Tensor) -> str:
        hasher, data = start_blake3(), as_bytes(tensor.contiguous()).numpy().data
        for at in range(0, len(data), _DIGESTED_AT_ONCE):
            piece = data[at : at + _DIGESTED_AT_ONCE]
            hasher.update(piece)
            self._digested_bytes += len(piece)
        return hasher.hexdigest()


def _boxes_of(entries: Mapping[str, Sequence[BoxEntry]]) -> Boxes:
    return {name: [entry.box for entry in boxes] for name, boxes in entries.items()}


class _OwnWants:
    """What this rank wants, by name and whose copy it is to be (`_Share.own_of`); each box once."""

    def __init__(self, wants: Sequence[Want], own_of: Sequence[int | None]) -> None:
        self._by_name: dict[tuple[str, int | None], dict[Box, Want]] = {}
        self._doubles: list[tuple[Want, Want]] = []
        for want, rank in zip(wants, own_of, strict=True):
            first = self._by_name.setdefault((want.name, rank), {}).setdefault(want.box, want)
            if first.target is not want.target:
                self._doubles.append((first, want))

    def wants_of(self, share: _Share) -> list[Want]:
        wants = self._by_name.get((share.name, share.own_of), {}).values()
        return [want.part(share.box) for want in wants if contains(want.box, share.box)]

    def needed(self, share: Sequence[_Share], digests: Sequence[str]) -> list[tuple[Want, Want, str]]:
        """Return what is wanted here of another rank's share: as it is in the checkpoint, as it is served, and its digest."""
        told = digests if len(digests) == len(share) else [""] * len(share)
        return [
            (want, Want(str(number), whole(want.box.sizes), want.target), digest)
            for number, (one, digest) in enumerate(zip(share, told, strict=True))
            for want in self.wants_of(one)
        ]

    def outside(self, shares: Sequence[Sequence[_Share]]) -> list[Want]:
        dealt: dict[tuple[str, int | None], list[Box]] = {}
        for share in (share for of_rank in shares for share in of_rank):
            if (share.name, share.own_of) in self._by_name:
                dealt.setdefault((share.name, share.own_of), []).append(share.box)
        return [
            want.part(box)
            for key, wants in self._by_name.items()
            for want in wants.values()
            for box in subtract([want.box], dealt.get(key, ()))
        ]

    def copy_doubles(self) -> None:
        with torch.no_grad():
            for first, other in self._doubles:
                other.target.copy_(first.target)

    def entries(self, own_of: int | None) -> dict[str, list[BoxEntry]]:
        return {
            name: [BoxEntry(offsets=[*box.offsets], sizes=[*box.sizes]) for box in wants]
            for (name, rank), wants in self._by_name.items()
            if rank == own_of
        }


def _read_share(reader: CheckpointReader, own: _OwnWants, share: Sequence[_Share]) -> dict[str, torch.Tensor]:
    """Read a share, to where it is wanted here, and return its boxes, to serve them."""
    wants: dict[int | None, list[Want]] = {}
    state: dict[str, torch.Tensor] = {}
    for number, one in enumerate(share):
        here = own.wants_of(one)
        if not here:
            memory = torch.empty(one.box.sizes, dtype=reader.tensors[one.name].dtype, device="cpu")
            here = [Want(one.name, one.box, memory)]
        wants.setdefault(one.own_of, []).extend(here)
        state[str(number)] = here[0].target
    for rank, of_rank in wants.items():
        reader.read(of_rank, rank)
    return state


def _is_there(want: Want, reader: CheckpointReader) -> bool:
    tensor = reader.tensors.get(want.name)
    return tensor is not None and fits(want.box, tensor.shape) and tensor.dtype == want.target.dtype
