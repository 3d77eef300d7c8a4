"""Says what a durable checkpoint contains, by all of its manifests together, and whether it is whole. It reads no tensors.

The parts of one checkpoint may lie in several storages, such as the local disks of the hosts. A part whose storage cannot be
reached from here still counts for whether the checkpoint is whole, but nothing is read from it.

A manifest that cannot be read, is of another checkpoint, names a file of another length, or is there twice with other contents
is left aside with a reason: the rest of the checkpoint is as it would be without it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, combinations, pairwise, repeat
from typing import Generic, NamedTuple, TypeVar

import torch

from torchft_ckpt.checkpointing.durable.format.manifest import (
    HELD_ALONE,
    MAX_MANIFEST_BYTES,
    OWNED,
    WRITTEN_BY_ONE,
    PartManifest,
    PieceEntry,
    ValueEntry,
    decode_part,
    replicas_of,
)
from torchft_ckpt.checkpointing.durable.names import METADATA, CheckpointName, PartName, parse_checkpoint, parse_part
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.containers import Path
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.core.boxes.geometry import (
    Box,
    intersect,
    max_comparisons,
    missing_boxes,
    missing_numbers,
    subtract,
    whole,
)
from torchft_ckpt.errors import CheckpointDamagedError, StorageError
from torchft_ckpt.memory import gc_paused
from torchft_ckpt.threads import parallel_map

logger = logging.getLogger(__name__)

NUM_THREADS = 8
_MAX_LOOKED_INTO = 100
_MAX_COMPARED = 300
_T = TypeVar("_T")


class SavedPart(NamedTuple):
    """A part of a checkpoint, and where it lies."""

    manifest: PartManifest
    storage: Storage | None
    """None where it cannot be reached from here."""

    @property
    def name(self) -> PartName:
        return self.manifest.name

    def path_of(self, file: int) -> str:
        """Return the path in its storage of one of its files."""
        return f"{self.manifest.checkpoint}/{self.manifest.files[file].name}"


class Piece(NamedTuple):
    """A box of a tensor that lies in a file."""

    box: Box
    part: SavedPart
    entry: PieceEntry

    @property
    def path(self) -> str:
        """The path in its storage of the file that it is in."""
        return self.part.path_of(self.entry.file)


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    fqn: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]
    """In the order of parts; they may overlap."""

    def of_rank(self, rank: int) -> SavedTensor:
        """The same, of what one rank of the groups has written."""
        return self._replace(pieces=[piece for piece in self.pieces if piece.part.name.rank == rank])


class SavedValue(NamedTuple):
    """A leaf of the state that is no tensor to DCP, in the first part that has a record of it. The value itself is in `tree`."""

    path: Path
    part: SavedPart
    entry: ValueEntry


class Holes(NamedTuple):
    """The parts that a checkpoint lacks to be whole."""

    ranks: list[range]
    """Of no replica is there a manifest of these ranks: what they hold is not known."""
    boxes: dict[str, list[Box]]
    """By fqn, what no piece covers."""
    values: list[str]
    conflicts: list[str]
    """Contradictions between its parts, as sentences: no part that is written can mend them."""

    def __bool__(self) -> bool:
        return bool(self.ranks or self.boxes or self.values or self.conflicts)


class Checkpoint:
    """The parts of one checkpoint.

    Args:
        parts: those that are there, from any number of storages.
        left_aside: what was found and does not count, as sentences that say why.
    """

    def __init__(self, name: CheckpointName, parts: Sequence[SavedPart], left_aside: Sequence[str] = ()) -> None:
        self.name = name
        self.parts = sorted(parts, key=lambda part: (part.name.fill, part.name))  # owners' shares before their backups'
        self.left_aside = [*left_aside]
        self.tensors: dict[str, SavedTensor] = {}
        """By fqn. Those that parts contradict each other on are of the first part's shape, and never read."""
        self.values: dict[str, SavedValue] = {}
        self.divergent: list[str] = []
        """Tensors of which one box is there twice, with other bytes. See `differing_copies` for who gets which."""
        self.several: set[str] = set()
        """These, and tensors whose pieces overlap without being one box, so that nobody knows whether they are equal."""
        self._expected_values: dict[str, None] = {}
        self._conflicts: dict[str, None] = {}
        with gc_paused():
            for part in self.parts:
                self._add(part)
            self._compare()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.name)!r}, {len(self.parts)} parts, {len(self.tensors)} tensors)"

    def holes(self) -> Holes:
        """Return what it lacks to be whole. That its files are there and as long as they should be was seen when it was read."""
        num_ranks = self.parts[0].manifest.num_ranks if self.parts else 1
        ranks = missing_numbers((part.manifest.rank for part in self.parts), num_ranks)
        boxes: dict[str, list[Box]] = {}
        conflicts = [*self._conflicts]
        for tensor in self.tensors.values():
            try:
                missing = missing_boxes(tensor.shape, [piece.box for piece in tensor.pieces])
            except ValueError as error:
                conflicts.append(f"{tensor.fqn[:120]} is in too many pieces: {error}")
                continue
            if missing:
                boxes[tensor.fqn] = missing
        values = [fqn for fqn in self._expected_values if fqn not in self.values]
        return Holes(ranks, boxes, values, conflicts)

    def own_part(self, replica_id: str, rank: int) -> SavedPart | None:
        """Return the share that a rank of a named replica group wrote; None where there is none, or several have no name."""
        for part in self.parts:
            is_named = bool(replica_id) or part.manifest.num_replicas == 1
            if is_named and (part.manifest.replica_id, *part.name[1:]) == (replica_id, rank, 0):
                return part
        return None

    def drifted(self, *, owned: bool = False) -> dict[str, list[PartName]]:
        """Return who held other things in a tensor than a rank of the same group that should hold the same, as far as shown.

        `owned`: only what their optimizers own, and if its bytes are others: its order does not count.
        """
        shows = (OWNED,) if owned else (OWNED, WRITTEN_BY_ONE)
        found: dict[str, list[PartName]] = {}
        known: dict[tuple[int, tuple[bytes, ...]], SavedPart] = {}
        of_groups: dict[int, list[tuple[SavedPart, tuple[bytes, ...]]]] = {}
        for part in self.parts:
            digests = tuple(replicas_of(part.manifest))
            first = known.setdefault((part.name.replica, digests), part)
            # A backup's part says nothing of it, and one that says the same as another one nothing new.
            if not part.name.fill and (part is first or part.manifest.tensors != first.manifest.tensors):
                of_groups.setdefault(part.name.replica, []).append((part, digests))
        for parts in of_groups.values():
            shared = {
                tensor.fqn
                for part, digests in (parts if len(parts) > 1 else ())
                for tensor, digest in zip(part.manifest.tensors, digests, strict=False)
                if digest.endswith(shows)
            }
            firsts: dict[str, bytes] = {}
            for part, digests in parts if shared else ():
                for tensor, digest in zip(part.manifest.tensors, digests or repeat(HELD_ALONE), strict=False):
                    if tensor.fqn in shared and tensor.boxes and (not owned or digest.endswith(OWNED)):
                        boxes = [(box.offsets, box.sizes) for box in tensor.boxes]
                        # Of other windows nothing is known, and of what one holds alone and another does not, that.
                        shown = [(digest[8:11], digest[:8])] + ([] if owned else [(b"", digest[11:-1])])
                        if any([firsts.setdefault(f"{boxes} {of!r} {tensor.fqn}", one) != one for of, one in shown]):
                            found.setdefault(tensor.fqn, []).append(part.name)
        return found

    def uncompared(self) -> list[str]:
        """Return the tensors of which ranks have not written all that they held, uncompared: earlier versions did so."""
        unwritten: Counter[str] = Counter()
        owners = {part.name.rank: part for part in self.parts if not part.name.fill}
        is_compared = len(owners) < 2 or any(replicas_of(part.manifest) for part in self.parts)
        for part in () if is_compared else owners.values():
            unwritten.update({one.fqn: sum(box.box.volume for box in one.boxes) for one in part.manifest.tensors})
        for fqn in unwritten:
            written = {(piece.part.name.rank, piece.box) for piece in self.tensors[fqn].pieces}
            unwritten[fqn] -= sum(box.volume for _, box in written)
        return [fqn for fqn, volume in unwritten.items() if volume > 0]

    def may_be_tied(self, names: Collection[str], *, in_one_place: bool) -> bool:
        """Whether tensors that differ may be tied on each rank: these differed, as is said, and no rank's own digests deny it."""
        if not {*names} <= {*self.several, *self.drifted(), *self.uncompared()}:
            return False
        for part in self.parts if in_one_place else ():
            digests = zip(part.manifest.tensors, replicas_of(part.manifest), strict=False)
            shown = {digest[:11] for one, digest in digests if one.fqn in names and digest != HELD_ALONE}
            if len(shown) > 1 and not part.name.fill:
                return False
        return True

    def _add(self, part: SavedPart) -> None:
        manifest = part.manifest
        first = self.parts[0].manifest
        if manifest.num_ranks != first.num_ranks:
            self._conflict(
                f"{first.name.manifest} is of groups of {first.num_ranks} ranks, {manifest.name.manifest} of {manifest.num_ranks}"
            )
        mine: list[SavedTensor] = []
        for entry in manifest.tensors:
            tensor = SavedTensor(entry.fqn, tuple(entry.path), parse_dtype(entry.dtype), tuple(entry.shape), [])
            known = self.tensors.setdefault(entry.fqn, tensor)
            if known[:4] != tensor[:4]:
                self._conflict(
                    f"{entry.fqn[:120]} is {known.dtype}{[*known.shape]} at {known.path} in one part, "
                    f"{tensor.dtype}{[*tensor.shape]} at {tensor.path} in {manifest.name.manifest}"
                )
                known = tensor  # what it has of it is dropped
            mine.append(known)
        for piece in manifest.pieces:
            mine[piece.tensor].pieces.append(Piece(piece.box, part, piece))
        for value in manifest.values:
            known_value = self.values.setdefault(value.fqn, SavedValue(tuple(value.path), part, value))
            if known_value.path != tuple(value.path):
                self._conflict(
                    f"the value {value.fqn[:120]} lies at {known_value.path} in one part, {value.path} in another"
                )
        self._expected_values.update(dict.fromkeys(manifest.holds_values))

    def _compare(self) -> None:
        for tensor in self.tensors.values():
            # Sorted, not looked up: numbers can be chosen so that boxes have one hash.
            digests = sorted((piece.box, piece.entry.digest) for piece in tensor.pieces)
            if any(one[0] == other[0] and one[1] != other[1] for one, other in pairwise(digests)):
                self.divergent.append(tensor.fqn)
                self.several.add(tensor.fqn)
            elif _volume([box for box, _ in digests]) > math.prod(tensor.shape):
                self.several.add(tensor.fqn)

    def _conflict(self, what: str) -> None:
        self._conflicts[what] = None


def _volume(boxes: Sequence[Box]) -> int:
    return sum(box.volume for place, box in enumerate(boxes) if not place or box != boxes[place - 1])


class PieceIndex(Generic[_T]):
    """Boxes of one tensor, found by what they overlap.

    Args:
        pieces: (box, what it stands for); where they overlap, a larger one is taken before a smaller, and one before those
            after it.
    """

    def __init__(self, pieces: Iterable[tuple[Box, _T]]) -> None:
        numbered = [(box, number, item) for number, (box, item) in enumerate(pieces) if box.volume]
        self._pieces = sorted(numbered, key=lambda piece: piece[:2])
        self._lows = [box.offsets[0] if box.offsets else 0 for box, _, _ in self._pieces]
        ends = (box.offsets[0] + box.sizes[0] if box.offsets else 1 for box, _, _ in self._pieces)
        self._reach = list(accumulate(ends, max))

    def cover(self, wanted: Box, usable: Callable[[_T], bool] | None = None) -> tuple[list[tuple[_T, Box]], list[Box]]:
        """Return what to take from which piece, each element once, and what no piece has.

        Args:
            usable: whether a piece may be taken; all may by default.

        Raises:
            ValueError: pieces lie so that too many of them have to be compared with each other.
        """
        if not wanted.volume:
            return [], []
        low, high = (wanted.offsets[0], wanted.offsets[0] + wanted.sizes[0]) if wanted.offsets else (0, 1)
        near = self._pieces[bisect_right(self._reach, low) : bisect_left(self._lows, high)]
        found: list[tuple[int, int, Box, _T]] = []
        for box, number, item in near:
            shared = intersect(wanted, box)
            if shared is not None and (usable is None or usable(item)):
                found.append((-shared.volume, number, shared, item))
        found.sort(key=lambda piece: (piece[0], piece[2].offsets, piece[1]))
        if len(found) > 1:
            tiles: dict[Box, _T] = {}
            for _, _, shared, item in found:
                tiles.setdefault(shared, item)
            if sum(box.volume for box in tiles) == wanted.volume and not subtract([wanted], tiles):
                return [(item, box) for box, item in tiles.items()], []  # of a whole checkpoint: none overlap
        taken: list[tuple[_T, Box]] = []
        left = [wanted]
        budget = max_comparisons(len(found))
        for _, _, shared, item in found:
            if not left:
                break
            budget -= len(left)
            if budget < 0:
                raise ValueError(
                    f"{len(found)} pieces lie so that too many of them have to be compared with each other"
                )
            taken += [(item, part) for one in left if (part := intersect(one, shared)) is not None]
            left = subtract(left, [shared])
        return taken, left


def list_checkpoints(storage: Storage) -> list[CheckpointName]:
    """Return the names of the checkpoints of a storage, whole or not, the newest first.

    Raises:
        StorageError: the storage failed.
    """
    return sorted((name for entry in storage.names() if (name := parse_checkpoint(entry)) is not None), reverse=True)


def beside_whole_ones(storages: Sequence[Storage]) -> str:
    """Say what is in storages that have no whole checkpoint, in a clause for a log: parts of some, and others' checkpoints.

    Empty where there is nothing. A storage that fails has nothing.
    """
    begun: list[str] = []
    others: list[str] = []
    for storage in storages:
        with contextlib.suppress(StorageError):
            entries = storage.names()
            begun += [entry for entry in entries if parse_checkpoint(entry) is not None]
            # DCP's own, and torchtitan's, have its metadata; one may lie in the place itself.
            directories = ["", *[entry for entry in entries if entry not in begun][-_MAX_LOOKED_INTO:]]
            others += [f"{storage.location}/{at}".rstrip("/") for at in directories if METADATA in storage.names(at)]
    clauses: list[str] = []
    if begun:
        clauses.append(
            f"of {len(begun)} checkpoints that were begun none is whole, the newest is {max(begun)}: does every replica group"
            " call save, into the same directory?"
        )
    if others:
        clauses.append(f"{some_of(others, ', ')} was not written by a Checkpointer: load_checkpoint reads it")
    return "; ".join(clauses)


def is_closed(storage: Storage, name: CheckpointName) -> bool:
    """Whether somebody has seen a checkpoint whole, and said so.

    Raises:
        StorageError: the storage failed.
    """
    return METADATA in storage.names(str(name))


def newest_step(storage: Storage, *, whole: bool) -> int | None:
    """Return the newest step that there is, without reading it; `whole`: that somebody has seen to be whole.

    A storage that fails has none: whether that matters depends on who else holds a state.
    """
    try:
        for name in list_checkpoints(storage):
            if not whole or is_closed(storage, name):
                return name.step
    except StorageError as error:
        logger.warning("what is in %s is not known: %s", storage.location, error)
    return None


def read_checkpoint(storages: Sequence[Storage], name: CheckpointName) -> Checkpoint:
    """Read all manifests of a checkpoint, and see that the files that they name are as long as they should be.

    Where one part lies in several storages alike, each of them can be read from.

    Args:
        storages: where to look; one that fails is left aside, as if it had no parts.
    """
    found: list[tuple[Storage, PartName]] = []
    left_aside: list[str] = []
    for storage in storages:
        try:
            entries = storage.names(str(name))
        except StorageError as error:
            left_aside.append(f"{storage.location}: {error}")
            continue
        for entry in entries:
            part = parse_part(entry)
            if part is not None and part.manifest == entry:
                found.append((storage, part))
            elif part is not None:
                left_aside.append(f"{name}/{entry}: no name of a manifest, which would be {part.manifest}")
    parts: list[SavedPart] = []
    for part_or_reason in parallel_map(lambda at: read_part(at[0], name, at[1]), found, NUM_THREADS):
        if isinstance(part_or_reason, str):
            left_aside.append(part_or_reason)
        else:
            parts.append(part_or_reason)
    return Checkpoint(name, _without_doubles(parts, left_aside), left_aside)


def why_not_whole(checkpoint: Checkpoint) -> str | None:
    """Return in a sentence what a checkpoint lacks; None where it is whole."""
    reasons: list[str] = []
    holes = checkpoint.holes()
    if not checkpoint.parts:
        reasons.append("no manifest is there")
    elif holes.ranks:
        runs = (f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in holes.ranks)
        reasons.append(f"no manifest of rank {some_of(runs, ', ')} of any replica")
    reasons += holes.conflicts[:3]
    if holes.boxes:
        reasons.append(f"missing are {some_of(f'{fqn[:120]} {boxes[0]}' for fqn, boxes in holes.boxes.items())}")
    if holes.values:
        reasons.append(f"no value of {some_of((fqn[:120] for fqn in holes.values), ', ')}")
    if not reasons:
        return None
    if checkpoint.left_aside:
        reasons.append(f"left aside: {some_of(checkpoint.left_aside)}")
    return "; ".join(reasons)


def tell_of(checkpoint: Checkpoint) -> None:
    """Log what is to be known of a whole checkpoint that is about to be read."""
    for reason in checkpoint.left_aside:
        logger.warning("checkpoint %s is whole without a part that is left aside: %s", checkpoint.name, reason)
    for told in notes_on(checkpoint):
        logger.warning("checkpoint %s: %s", checkpoint.name, told)


def notes_on(checkpoint: Checkpoint) -> list[str]:
    """Say which tensors of a whole checkpoint are not one thing that all ranks held, or may not be."""
    names = [fqn[:120] for fqn in checkpoint.uncompared()]
    early = (
        f"an earlier version saved it, which did not compare what several ranks of a group hold: {some_of(names)}. If they"
        " held other things in it (BatchNorm's statistics, a random state), all get what one of them had, or a part from each"
    )
    return [
        told for told in (differing_copies(checkpoint), drifted_replicas(checkpoint), early if names else "") if told
    ]


def drifted_replicas(checkpoint: Checkpoint, *, owned: bool = False) -> str:
    """Say which tensors ranks of a group should hold alike, and did not; else empty. `owned`: as there."""
    found = checkpoint.drifted(owned=owned)
    what = (
        f"{fqn[:120]} ({some_of((f'rank {rank} of replica {replica}' for replica, rank, _ in names), ', ')})"
        for fqn, names in found.items()
    )
    return (
        f"ranks of a group do not hold alike, or not in one order, what each of them should: {some_of(what)}; what is saved of it"
        " is put together from several ranks. If it was to be equal, find out why it drifted (are its gradients averaged in the"
        " group?) and copy one rank's to the others. If each has something else of this name (stages of a pipeline, experts by"
        " local number), save it with is_replicated=False, or under a name for each rank"
        if found
        else ""
    )


def differing_copies(checkpoint: Checkpoint) -> str:
    """Say which tensors there are several copies of that differ or may, and who gets which; empty where there are none."""
    tensors = checkpoint.tensors
    unsure = sorted(
        fqn for fqn in checkpoint.several.difference(checkpoint.divergent) if _is_of_several_ranks(tensors[fqn].pieces)
    )
    clauses = [f"did not hold the same bytes of {some_of(fqn[:120] for fqn in checkpoint.divergent)}"]
    clauses = clauses[not checkpoint.divergent :]
    if unsure:
        clauses.append(
            f"cut their copies of {some_of(fqn[:120] for fqn in unsure)} in different places, so they may differ"
        )
    if not clauses:
        return ""
    firsts: dict[tuple[int, int], None] = {}
    for fqn in (*checkpoint.divergent, *unsure):
        pieces = sorted(tensors[fqn].pieces, key=lambda piece: piece.box)  # stable: the first of a box is its first
        taken = (one for at, one in enumerate(pieces) if not at or one.box != pieces[at - 1].box)
        firsts.update(dict.fromkeys(piece.part.name[:2] for piece in taken))
    whose = some_of((f"rank {rank} of replica {replica}" for replica, rank in sorted(firsts)), ", ")
    return (
        f"those who saved it {' and '.join(clauses)}; in groups of"
        f" {checkpoint.parts[0].manifest.num_ranks} ranks each rank gets what the same rank wrote, if that is all that it wants"
        f" of a tensor; all others get the first copies ({whose})"
    )


def _is_of_several_ranks(pieces: Sequence[Piece]) -> bool:
    """Whether ranks have written the same elements; of very many pieces it is not worked out."""
    return len(pieces) > _MAX_COMPARED or any(
        one.part.name.rank != other.part.name.rank and intersect(one.box, other.box) is not None
        for one, other in combinations(pieces, 2)
    )


def read_part(storage: Storage, name: CheckpointName, part: PartName) -> SavedPart | str:
    """Return a part, or why it does not count: its manifest cannot be read, or a file of it is not as long as it should be."""
    path = f"{name}/{part.manifest}"
    try:
        num_bytes = storage.size(path)
        if num_bytes is None or num_bytes > MAX_MANIFEST_BYTES:
            return f"{path}: {'is gone' if num_bytes is None else f'has {num_bytes} bytes, which no manifest has'}"
        manifest = decode_part(storage.read(path, 0, num_bytes), name, part)
        for file in manifest.files:
            length = storage.size(f"{name}/{file.name}")
            if length != file.num_bytes:
                there = "is not there" if length is None else f"has {length} bytes"
                return f"{path}: {file.name} {there} in {storage.location}, where {file.num_bytes} were written"
    except (CheckpointDamagedError, StorageError) as error:
        return str(error)
    return SavedPart(manifest, storage)


def _without_doubles(parts: Sequence[SavedPart], left_aside: list[str]) -> list[SavedPart]:
    """Leave aside parts of one name that say different things: which of them is right is not known."""
    first: dict[PartName, SavedPart] = {}
    differing: set[PartName] = set()
    for part in parts:
        if first.setdefault(part.name, part).manifest != part.manifest:
            differing.add(part.name)
    left_aside += [f"{name.manifest} is there twice, with other contents" for name in sorted(differing)]
    return [part for part in parts if part.name not in differing]


def minimal_cover(tensor: SavedTensor) -> list[Piece]:
    """Return pieces that together cover what all of them do, without those that the others make superfluous."""
    distinct = [*{piece.box: piece for piece in reversed(tensor.pieces)}.values()][::-1]
    if sum(piece.box.volume for piece in distinct) == math.prod(tensor.shape):
        return distinct  # of a whole checkpoint: none overlap
    kept: list[Piece] = []
    left = [whole(tensor.shape)]
    for piece in sorted(distinct, key=lambda piece: -piece.box.volume):
        if any(intersect(piece.box, one) is not None for one in left):
            kept.append(piece)
            left = subtract(left, [piece.box])
    for piece in kept[::-1]:
        others = [other for other in kept if other is not piece]
        if not subtract([piece.box], [other.box for other in others]):
            kept = others
    return kept
