"""Reads boxes of tensors out of a durable checkpoint: only the bytes that are needed, and none that does not have its digest.

Every 64 KiB block is compared with its digest before any of it is put into a target. Where a piece is damaged or cannot be
read, others that have the same elements are taken (`pieces`). Memory is bounded: some megabytes for each thread, whatever the
size of a tensor. It knows pieces and blocks; it does not know meshes, and it unpickles nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import xxhash

from torchft_ckpt.checkpointing.durable.format.manifest import (
    DIGEST_BLOCK_BYTES,
    PartManifest,
    PlainValue,
    ValueEntry,
    decode_value,
    digest_table_bytes,
    table_of,
)
from torchft_ckpt.checkpointing.durable.format.records import record_problems
from torchft_ckpt.checkpointing.durable.reading.checkpoint import (
    NUM_THREADS,
    Checkpoint,
    Piece,
    SavedPart,
    SavedTensor,
)
from torchft_ckpt.checkpointing.durable.reading.pieces import (
    GAP_BYTES,
    RUN_BYTES,
    SMALL_BYTES,
    Cell,
    PlannedValues,
    Reading,
    StateReader,
    copy_box,
    cut_by_span,
    merged,
    new_memory,
    node_at,
    spans_of,
    structure_of,
)
from torchft_ckpt.checkpointing.durable.storage.contract import Storage
from torchft_ckpt.checkpointing.state.classes import KnownClasses, refuse_unmade, unmade_in
from torchft_ckpt.checkpointing.state.containers import Path
from torchft_ckpt.checkpointing.state.local_state import some_of, warn_of_values
from torchft_ckpt.checkpointing.state.outline import Outline
from torchft_ckpt.checkpointing.state.regions import Region, c_strides, region_of
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.checkpointing.state.tree import as_places, decode_tree, items_of_node, only_with
from torchft_ckpt.core.boxes.geometry import Box, relative_to, subtract
from torchft_ckpt.core.coordination.messages import name_some
from torchft_ckpt.errors import CheckpointDamagedError, StorageError

logger = logging.getLogger(__name__)
_DIGEST_BYTES = 16
OWNERS_KEY = "owners"
"""Of what belongs to a rank: which parameters its optimizers have."""
_UNIT_BYTES = 32 * 1024 * 1024
"""Done by one thread in one go."""


class _Work(NamedTuple):
    """All that is wanted of one piece."""

    source: _PieceSource
    cells: list[Cell[Piece]]


class CheckpointReader(StateReader[Piece]):
    """Reads one checkpoint that this library wrote. For any number of `read`s, on any thread.

    Args:
        checkpoint: whole or not: what is not there is noticed when it is wanted.
        num_threads: how many reads there are at once. Each takes up to about 16 MiB of memory.
    """

    def __init__(self, checkpoint: Checkpoint, *, num_threads: int = NUM_THREADS) -> None:
        super().__init__(num_threads)
        self.checkpoint = checkpoint
        self.rank: int | None = None
        """The rank that this process has in a group of as many ranks as saved it; None: of others, or it is not known."""

    def read_as(self, rank: int, num_ranks: int) -> None:
        """Say which rank of a group of how many reads: what differs between ranks is its own, if the group had as many."""
        parts = self.checkpoint.parts
        self.rank = rank if parts and parts[0].manifest.num_ranks == num_ranks else None
        if self.rank is None:
            warn_of_values(self.location, [part.manifest.tree for part in parts])

    def read_own(self, wants: Sequence[Want]) -> None:
        """As `read`, for the rank of `read_as`."""
        self.read(wants, self.rank)

    def is_own(self, want: Want) -> bool:
        """Whether other ranks may have other things under a name, and all that is wanted is there as this rank had it."""
        if self.rank is None or want.name not in self.checkpoint.several or not want.box.volume:
            return False
        return not self._own_cover(want.name, want.box, Reading(self.location, self.rank))[1]

    def is_own_elsewhere(self, want: Want) -> bool:
        """Whether other ranks may have other things under a name, and what this rank had cannot be reached from here."""
        return self._is_elsewhere(want.name, want.box, Reading(self.location, self.rank))

    @property
    def location(self) -> str:
        return f"checkpoint {self.checkpoint.name}"

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        return self.checkpoint.tensors

    def structure_at(self, path: Path) -> Any:
        found: Any = None
        known: set[str] = set()
        for part in self._own_first():
            manifest = part.manifest
            here = {entry.fqn for entry in manifest.tensors if tuple(entry.path[: len(path)]) == path}
            here.update(manifest.holds_values)
            if found is not None and here <= known:
                continue
            known |= here
            node = node_at(manifest.tree, path)
            state = None if node is None else decode_tree(node, as_places(len(manifest.tensors)))
            found = merged(found, structure_of(state, [entry.fqn for entry in manifest.tensors]))
        return found

    def plan_values(self, names: Collection[str] | None = None, classes: KnownClasses | None = None) -> PlannedValues:
        planned: list[tuple[Outline, list[str]]] = []
        known: set[str] = set()
        wants: list[Want] = []
        for part in self._own_first():
            manifest = part.manifest
            if known.issuperset(name for name in manifest.holds_values if names is None or name in names):
                continue
            tree = manifest.tree if names is None else only_with(manifest.tree, names)
            outline = Outline(tree, manifest.tensors, classes, partial(_dict_of, manifest))
            fresh = [fqn for fqn in outline.values if fqn not in known and (names is None or fqn in names)]
            refuse_unmade([unmade for fqn in fresh for unmade in unmade_in(outline.values[fqn])], party="state_dict")
            wants += outline.wants_in(fresh)
            known.update(outline.values)
            planned.append((outline, fresh))

        def make() -> dict[str, tuple[Path, object]]:
            return {
                fqn: (outline.paths[fqn], value)
                for outline, fresh in planned
                for fqn, value in outline.made(fresh).items()
            }

        return PlannedValues({fqn for _, fresh in planned for fqn in fresh}, wants, make)

    def may_be_tied(self, names: Collection[str], *, in_one_place: bool) -> bool:
        return self.checkpoint.may_be_tied(names, in_one_place=in_one_place)

    def owners(self) -> Iterator[object]:
        return (owners_in(part.manifest) for part in self._own_first())

    def own(self, replica_id: str, rank: int, classes: KnownClasses | None = None) -> object | None:
        """Return what belongs to one rank of a named replica group alone; None where there is nothing.

        `classes`, and what it raises: as for `plan_values`.
        """
        part = self.checkpoint.own_part(replica_id, rank)
        return None if part is None else decode_value(part.manifest.own, classes)

    def own_after_restart(
        self, replica_id: str, rank: int, num_ranks: int, num_groups: int | None = None
    ) -> object | None:
        """Return what this rank saved of itself, or None; warn where that of a rank finds nobody, or this rank finds none.

        Args:
            replica_id, rank, num_ranks: of this rank and its group now.
            num_groups: that start; None: not known.
        """
        checkpoint = self.checkpoint
        part = checkpoint.own_part(replica_id, rank)
        is_here = part is not None and part.manifest.num_ranks == num_ranks
        saved = [one.manifest for one in checkpoint.parts if has_own(one.manifest.own)]
        names = sorted({one.replica_id for one in saved})
        why = ""
        if is_here and saved and num_groups is not None and num_groups < saved[0].num_replicas:
            why = f"{saved[0].num_replicas} groups saved it ({name_some(names)}), and {num_groups} start"
        elif not checkpoint.parts:
            why = "it came from another group, and this rank can read nothing of the checkpoint"
        elif not is_here and names == [""] and saved[0].num_replicas > 1:
            why = "nobody knows whose it was: give each Manager a replica_id that is the same after a restart"
        elif not is_here and saved:
            why = (
                f"rank {rank} of {num_ranks} of {replica_id!r} is none of those who saved it:"
                f" {saved[0].num_ranks} of each of {name_some(names)}"
            )
        if why:
            logger.warning(
                "not all that ranks had of their own at step %d (rank_state, random state) is restored: %s",
                checkpoint.name.step,
                why,
            )
        return self.own(replica_id, rank, KnownClasses()) if is_here else None

    def verify(self) -> list[str]:
        """Read everything that can be reached, and return what is wrong with it, as sentences.

        Data, tables of digests and records are all looked at. A checkpoint of which something is wrong may still be read whole:
        from other pieces, or because what is wrong is read by DCP alone.
        """
        checks: list[Callable[[], list[str]]] = []
        for tensor in self.tensors.values():
            checks += [_PieceSource(piece, tensor, self._count).check for piece in tensor.pieces if piece.part.storage]
        for part in self.checkpoint.parts:
            if part.storage is not None:
                checks += [partial(_check_value, part.storage, part, entry) for entry in part.manifest.values]
        return [problem for problems in self._parallel_map(checks) for problem in problems]

    def _own_first(self) -> list[SavedPart]:
        parts = self.checkpoint.parts
        return parts if self.rank is None else sorted(parts, key=lambda part: part.name.rank != self.rank)

    def _plan(self, wanted: Sequence[tuple[Box, Want]], reading: Reading[Piece]) -> list[Cell[Piece]]:
        cells = super()._plan(wanted, reading)
        elsewhere = {want.name for box, want in wanted if self._is_elsewhere(want.name, box, reading)}
        if mixed := elsewhere | (reading.failed() & self.checkpoint.several & {cell.want.name for cell in cells}):
            logger.warning(
                "%s: there are several copies of %s, and what cannot be read of one comes from another, which may differ",
                self.location,
                some_of((name[:120] for name in sorted(mixed)), ", "),
            )
        return cells

    def _cover(self, name: str, box: Box, reading: Reading[Piece]) -> tuple[list[tuple[Piece, Box]], list[Box]]:
        if reading.rank is not None and name in self.checkpoint.several:
            taken, missing = self._own_cover(name, box, reading)
            if not missing:
                return taken, missing
        return super()._cover(name, box, reading)

    def _is_elsewhere(self, name: str, box: Box, reading: Reading[Piece]) -> bool:
        """Whether one rank of the groups has written all of a box, and not all of that can be had here."""
        if reading.rank is None or name not in self.checkpoint.several or not box.volume:
            return False
        written = [piece.box for piece in self.tensors[name].of_rank(reading.rank).pieces]
        return bool(self._own_cover(name, box, reading)[1]) and not subtract([box], written)

    def _own_cover(self, name: str, box: Box, reading: Reading[Piece]) -> tuple[list[tuple[Piece, Box]], list[Box]]:
        """As `_cover`, of what one rank of the groups has written."""
        return self._index(name).cover(
            box, lambda piece: piece.part.name.rank == reading.rank and reading.is_usable(piece)
        )

    def _pieces_of(self, name: str) -> Iterable[Piece]:
        return (piece for piece in self.tensors[name].pieces if piece.part.storage is not None)

    def _carry_out(self, cells: Sequence[Cell[Piece]], reading: Reading[Piece]) -> None:
        by_piece: dict[int, list[Cell[Piece]]] = {}
        for cell in cells:
            by_piece.setdefault(id(cell.piece), []).append(cell)
        small: list[_Work] = []
        units: list[Callable[[], None]] = []
        for of_piece in by_piece.values():
            source = _PieceSource(of_piece[0].piece, self.tensors[of_piece[0].want.name], self._count)
            needed = sum(cell.box.volume for cell in of_piece) * source.itemsize
            is_whole = needed >= source.num_bytes and source.num_bytes <= SMALL_BYTES
            if is_whole or source.num_bytes <= DIGEST_BLOCK_BYTES:
                small.append(_Work(source, of_piece))
            else:
                units += _units(_Work(source, of_piece), reading)
        units += _runs(small, reading)
        self._parallel_map(units)


class _PieceSource:
    """The data of one piece, and their digests. For several threads."""

    def __init__(self, piece: Piece, tensor: SavedTensor, count: Callable[[int], None]) -> None:
        if piece.part.storage is None:
            raise StorageError(f"{piece.path} cannot be reached from here", piece.path)
        self.piece = piece
        self.itemsize = tensor.dtype.itemsize
        self.num_bytes = piece.box.volume * self.itemsize
        self.strides = c_strides(piece.box.sizes)
        self._name = tensor.fqn
        self._storage = piece.part.storage
        self._path = piece.path
        self._count = count
        self._lock = threading.Lock()
        self._table: bytes | None = None

    @property
    def start(self) -> int:
        return self.piece.entry.data_offset

    @property
    def file(self) -> tuple[int, str]:
        return id(self._storage), self._path

    def region_of(self, box: Box) -> Region:
        return region_of(0, self.strides, relative_to(box, self.piece.box), self.itemsize)

    def fetch(self, start: int, memory: memoryview) -> None:
        """Read bytes, from `start` bytes after where the data begin; unchecked."""
        self._storage.read_into(self._path, self.start + start, memory)
        self._count(len(memory))

    def check_whole(self, data: memoryview) -> None:
        """See that all of its data are as they were written.

        Raises:
            CheckpointDamagedError: they are not.
        """
        if xxhash.xxh3_128_hexdigest(table_of(data)) != self.piece.entry.digest:
            raise self.damaged("does not hold the bytes that were written")

    def check_blocks(self, first: int, data: memoryview) -> None:
        """See that blocks, from the first of these on, are as they were written.

        Raises:
            CheckpointDamagedError: they are not; or their digests are not known, because the table is damaged as well.
        """
        table = self.table()
        for number, at in enumerate(range(0, len(data), DIGEST_BLOCK_BYTES), first):
            expected = table[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
            if xxhash.xxh3_128_digest(data[at : at + DIGEST_BLOCK_BYTES], seed=number) != expected:
                raise self.damaged(f"does not hold the bytes that were written, in block {number}")

    def table(self) -> bytes:
        """Return the table of digests. Where that is damaged it is made anew, if all of the data are right."""
        with self._lock:
            if self._table is None:
                table = self._read_table()
                if xxhash.xxh3_128_hexdigest(table) != self.piece.entry.digest:
                    table = self._make_table()
                self._table = table
            return self._table

    def check(self) -> list[str]:
        """Return what is wrong with it, its table of digests and the record that DCP reads."""
        problems: list[str] = []
        entry = self.piece.entry
        try:
            if xxhash.xxh3_128_hexdigest(self._read_table()) != entry.digest:
                problems.append(str(self.damaged("has another table of digests than was written")))
            self._make_table()
            record = self._storage.read(self._path, entry.offset, entry.offset + entry.length)
            problems += record_problems(record, f"the record in {self._path} of {self._name[:120]} {self.piece.box}")
        except (CheckpointDamagedError, StorageError) as error:
            problems.append(str(error))
        return problems

    def damaged(self, what: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"{self._path} {what}, of {self._name[:120]} {self.piece.box}", self._path)

    def _read_table(self) -> bytes:
        start = self.piece.entry.digests_offset
        stop = start + digest_table_bytes(self.num_bytes)
        self._count(stop - start)
        return self._storage.read(self._path, start, stop)

    def _make_table(self) -> bytes:
        table = b""
        memory = new_memory(min(RUN_BYTES, self.num_bytes))
        for start in range(0, self.num_bytes, RUN_BYTES):
            data = memory[: min(RUN_BYTES, self.num_bytes - start)]
            self.fetch(start, data)
            table += table_of(data, start // DIGEST_BLOCK_BYTES)
        if xxhash.xxh3_128_hexdigest(table) != self.piece.entry.digest:
            raise self.damaged("does not hold the bytes that were written")
        return table


# Reading


def _units(work: _Work, reading: Reading[Piece]) -> Iterator[Callable[[], None]]:
    """Yield what one thread does at a time of a large piece."""
    source = work.source
    batch: list[tuple[Box, Want]] = []
    num_bytes = 0
    for cell in work.cells:
        for box in cut_by_span(cell.box, source.strides, source.itemsize, RUN_BYTES - DIGEST_BLOCK_BYTES):
            batch.append((box, cell.want))
            region = source.region_of(box)
            num_bytes += region.stop - region.start
            if num_bytes >= _UNIT_BYTES:
                yield partial(_read_unit, work, batch, reading)
                batch, num_bytes = [], 0
    if batch:
        yield partial(_read_unit, work, batch, reading)


def _read_unit(work: _Work, boxes: list[tuple[Box, Want]], reading: Reading[Piece]) -> None:
    """Read boxes of one piece, the blocks of each together; the last block of one may be the first of the next."""
    source = work.source
    last: tuple[int, memoryview] | None = None
    try:
        for box, want in boxes:
            if not reading.is_usable(source.piece):
                return
            region = source.region_of(box)
            runs = _blocks_of(region)
            base = runs[0][0] * DIGEST_BLOCK_BYTES
            size = min(runs[-1][1] * DIGEST_BLOCK_BYTES, source.num_bytes) - base
            memory = new_memory(size)
            for first, stop in runs:
                low, high = first * DIGEST_BLOCK_BYTES - base, min(stop * DIGEST_BLOCK_BYTES - base, size)
                known = 0
                if last is not None and last[0] == first:
                    known = len(last[1])
                    memory[low : low + known] = last[1]
                if low + known < high:
                    source.fetch(base + low + known, memory[low + known : high])
                    if high - low == source.num_bytes and not known:
                        source.check_whole(memory)
                    else:
                        source.check_blocks(first + bool(known), memory[low + known : high])
                at = (stop - 1) * DIGEST_BLOCK_BYTES - base
                last = (stop - 1, memory[at:high])
            reading.is_written = True
            copy_box(memory, base, source.piece.box, box, want)
    except (CheckpointDamagedError, StorageError) as error:
        reading.fail(source.piece, work.cells, error)


def _runs(works: Sequence[_Work], reading: Reading[Piece]) -> Iterator[Callable[[], None]]:
    run: list[_Work] = []
    for work in sorted(works, key=lambda work: (work.source.file, work.source.start)):
        if run:
            begin, before = run[0].source, run[-1].source
            gap = work.source.start - before.start - before.num_bytes
            length = work.source.start + work.source.num_bytes - begin.start
            if work.source.file != begin.file or gap > GAP_BYTES or length > RUN_BYTES:
                yield partial(_read_run, run, reading)
                run = []
        run.append(work)
    if run:
        yield partial(_read_run, run, reading)


def _read_run(works: list[_Work], reading: Reading[Piece]) -> None:
    """Read small pieces of one file in one go. Where that fails, each by itself."""
    first, last = works[0].source, works[-1].source
    memory = new_memory(last.start + last.num_bytes - first.start)
    try:
        first.fetch(0, memory)
    except StorageError as error:
        if len(works) == 1:
            reading.fail(first.piece, works[0].cells, error)
        else:
            for work in works:
                _read_run([work], reading)
        return
    for work in works:
        source = work.source
        data = memory[source.start - first.start :][: source.num_bytes]
        try:
            source.check_whole(data)
        except CheckpointDamagedError as error:
            reading.fail(source.piece, work.cells, error)
            continue
        reading.is_written = True
        for cell in work.cells:
            copy_box(data, 0, source.piece.box, cell.box, cell.want)


def _blocks_of(region: Region) -> list[tuple[int, int]]:
    """Return the runs of blocks that a region touches: the first, and the one after the last."""
    runs: list[tuple[int, int]] = []
    for low, high in spans_of(region, DIGEST_BLOCK_BYTES):  # else no whole block lies between
        first, stop = low // DIGEST_BLOCK_BYTES, -(-high // DIGEST_BLOCK_BYTES)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((first, stop))
    return runs


# Values and records


def has_own(own: PlainValue) -> bool:
    """Whether a rank has saved something of its own: its `rank_state`, or its random state."""
    return any(item is not None for key, item in items_of_node(own.node) if key in ("user", "random"))


def owners_in(manifest: PartManifest) -> object:
    """Return what a rank has saved of the parameters that its optimizers have; an older one has saved nothing."""
    own = decode_value(manifest.own)
    return own.get(OWNERS_KEY, {}) if isinstance(own, dict) else {}


def _dict_of(manifest: PartManifest, state: object) -> dict[str, Any]:
    if not isinstance(state, dict):
        where = f"{manifest.checkpoint}/{manifest.name.manifest}"
        raise CheckpointDamagedError(f"{where} is of a state that is no dict", where)
    return state


def _check_value(storage: Storage, part: SavedPart, entry: ValueEntry) -> list[str]:
    path = part.path_of(entry.file)
    try:
        record = storage.read(path, entry.offset, entry.offset + entry.length)
    except StorageError as error:
        return [str(error)]
    if xxhash.xxh3_128_hexdigest(record) != entry.digest:
        return [f"{path} does not hold the record that was written of the value {entry.fqn[:120]}"]
    return []
