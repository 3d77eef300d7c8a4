"""Reading boxes of tensors out of a checkpoint, whoever wrote it: what is taken from which piece, again where one is of no use.

That all is covered is proved before anything is read. How a piece is read is left to who derives from
`StateReader`; this file knows boxes, targets and what failed, no files.

A state dict's containers are known by what DCP takes for a leaf in them: its names are those of `flatten_state_dict`. A
structure is nested dicts and lists, of which a leaf is the name of a tensor, or None for what is no tensor to DCP.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from torchft_ckpt.checkpointing.durable.reading.checkpoint import NUM_THREADS, PieceIndex, SavedTensor
from torchft_ckpt.checkpointing.state.classes import KnownClasses
from torchft_ckpt.checkpointing.state.containers import Path, is_dcps_leaf
from torchft_ckpt.checkpointing.state.local_state import some_of
from torchft_ckpt.checkpointing.state.regions import Region, c_strides
from torchft_ckpt.checkpointing.state.space import is_plain_memory
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.checkpointing.state.tree import Node, TensorPlace, in_words, items_of_node
from torchft_ckpt.core.boxes.geometry import Box, fits, intersect
from torchft_ckpt.errors import CheckpointDamagedError, CheckpointError, StateMismatchError, torn_where_it_raises
from torchft_ckpt.threads import parallel_map


def leaves_of(container: Any, fqn: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves that are no tensors: the name of each, what it is in, and its key there."""
    for key, item in container.items() if isinstance(container, Mapping) else enumerate(container):
        name = f"{fqn}.{key}" if fqn else str(key)
        if isinstance(item, torch.Tensor):
            continue
        if is_dcps_leaf(item):
            yield name, container, key
        else:
            yield from leaves_of(item, name)


def structure_of(state: Any, names: Sequence[str]) -> Any:
    """Return the structure of a state in which a `TensorPlace` stands for each tensor; `names` are those of the tensors."""
    if isinstance(state, TensorPlace):
        return names[state.number]
    if isinstance(state, Mapping):
        return {key: structure_of(item, names) for key, item in state.items()}
    return None if is_dcps_leaf(state) else [structure_of(item, names) for item in state]


def merged(one: Any, other: Any) -> Any:
    """Return what is in either structure; the first one's where both have something else than dicts."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**other, **{key: merged(item, other[key]) if key in other else item for key, item in one.items()}}
    return other if one is None else one


def node_at(tree: Node, path: Path) -> Node:
    """Return the node at DCP's path in a checked tree; None if nothing is there."""
    for key in path:
        tree = next((item for other, item in items_of_node(tree) if in_words(other) == str(key)), None)
    return tree


def structure_of_paths(tensors: Mapping[str, Path], values: Iterable[Path], prefix: Path) -> Any:
    """Return the structure that DCP's paths show below one of them; None where nothing is.

    Args:
        tensors: the paths of tensors, by their names.
        values: the paths of the rest.
        prefix: the path. What is directly below it has keys as text.

    Raises:
        StateMismatchError: a key may have been a number or its text.
    """
    at_values = set(values)
    leaves: dict[Path, str | None] = {path: None for path in at_values if _is_in(path, prefix)}
    for fqn, path in tensors.items():
        if _is_in(path, prefix) and not any(path[:end] in at_values for end in range(1, len(path) + 1)):
            leaves[path] = fqn  # what is in a value comes with it
    doubtful = [
        ".".join(map(str, path))
        for path in leaves
        for key in path[len(prefix) + 1 :]
        if isinstance(key, str) and key.isdigit()
    ]
    if doubtful:
        raise StateMismatchError(
            f"whether keys of {some_of(doubtful)} are numbers or texts was not saved: hand in a state dict that names them",
            ".".join(map(str, prefix)),
        )
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = root
        for key in path[len(prefix) : -1]:
            at = at.setdefault(key, {})
        at[path[-1]] = leaf
    return {key: _with_lists(item) for key, item in root.items()} or None


def _is_in(path: Path, prefix: Path) -> bool:
    return len(path) > len(prefix) and path[: len(prefix)] == prefix


def _with_lists(value: Any) -> Any:
    """Make lists of dicts whose keys are numbers: of a list's items DCP's paths have the numbers."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[key] for key in sorted(items)] if items and all(isinstance(key, int) for key in items) else items


logger = logging.getLogger(__name__)

RUN_BYTES = 8 * 1024 * 1024
"""Read and checked at once."""
SMALL_BYTES = 1024 * 1024
"""Pieces of at most so much that are wanted whole are read together with those that lie beside them."""
GAP_BYTES = 4 * 1024
"""Read rather than skipped: what torch.save puts around the data of a tensor is less."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class HasBox(Protocol):
    """A piece of a tensor."""

    @property
    def box(self) -> Box:
        """The box of the tensor that it has."""


_P = TypeVar("_P", bound=HasBox)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Cell(Generic[_P]):
    """A box that is taken from one piece, and where it goes."""

    piece: _P
    box: Box
    want: Want
    """The box is a part of."""


class PlannedValues(NamedTuple):
    """Values that are no tensors, but may hold some."""

    names: Collection[str]
    """Of those that are there."""
    wants: Sequence[Want]
    """Boxes to be read for them."""
    make: Callable[[], dict[str, tuple[Path, object]]]
    """Returns them by fqn, with the keys that lead to them, once that has been read."""


class StateReader(ABC, Generic[_P]):
    """A checkpoint that can be read, whoever wrote it. For any number of `read`s, on any thread.

    Args:
        num_threads: how many reads there are at once.
    """

    bytes_read: int = 0
    """From storage so far, for tensors."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._indexes: dict[str, PieceIndex[_P]] = {}

    @property
    @abstractmethod
    def location(self) -> str:
        """The name of the checkpoint, for messages."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors that are there, by fqn. Of what DCP wrote, their `pieces` are not listed."""

    @abstractmethod
    def structure_at(self, path: Path) -> Any:
        """Return the containers that were saved below a path of DCP's, a structure; None where nothing was.

        Raises:
            StateMismatchError: they cannot be told from what was saved.
        """

    def read(self, wants: Sequence[Want], rank: int | None = None) -> None:
        """Fill targets. Autograd is not told that they change.

        Args:
            wants: boxes of tensors by fqn, and for each memory on the CPU of the same dtype, with any strides.
            rank: where there are several copies of a box, what this rank of a group saved is taken; None: the first's.

        Raises:
            StateMismatchError: no such tensor is in the checkpoint, or of another shape or dtype; nothing was read.
            CheckpointDamagedError: the pieces that can be read from here do not cover all (nothing was read), or they hold
                other bytes than were written. The message has file, tensor and box; `state_overwritten` says whether
                targets were written to.
            StorageError: a file could not be read, and no other has the same elements; `state_overwritten` as above.
        """
        started = time.monotonic()
        before = self.bytes_read
        reading: Reading[_P] = Reading(self.location, rank)
        for want in wants:
            _check_want(want, self.tensors.get(want.name), self.location)
        cells = self._plan([(want.box, want) for want in wants], reading)
        with torn_where_it_raises(f"reading {self.location}", self.location, lambda: reading.is_written):
            while cells:
                self._carry_out(cells, reading)
                cells = self._plan([(cell.box, cell.want) for cell in reading.take_failed()], reading)
        logger.debug(
            "%s: %d boxes, %d bytes read in %.3f s",
            self.location,
            len(wants),
            self.bytes_read - before,
            time.monotonic() - started,
        )

    def values(self, names: Collection[str] | None = None) -> dict[str, tuple[Path, object]]:
        """Return the values that are no tensors, by fqn, with the keys that lead to them. Arrays and tensors in them are read.

        Where ranks hold other values under one name, it is the first rank's.

        Args:
            names: of those that are wanted; default: all.

        Raises:
            CheckpointDamagedError: a record is damaged.
            UnsupportedValueError: one that DCP wrote needs more than torch loads with `weights_only=True`.
            StorageError: one could not be read.
        """
        plan = self.plan_values(names)
        self.read(plan.wants)
        return plan.make()

    @abstractmethod
    def plan_values(self, names: Collection[str] | None = None, classes: KnownClasses | None = None) -> PlannedValues:
        """As `values`, with the tensors and arrays in them left to be read by the caller.

        Args:
            classes: what named tuples and enum members are made of; None: who only looks gets tuples and plain values.

        Raises:
            StateMismatchError: there is no class for one of them.
            CheckpointError: as `values`, of those that DCP wrote: these are read now.
        """

    def may_be_tied(self, names: Collection[str], *, in_one_place: bool) -> bool:
        """Whether tensors that differ may be tied on each of the ranks of which they are put together; see `check_shared`."""
        return False

    def owners(self) -> Iterator[object]:
        """Yield, at least once, what ranks have saved of their optimizers' parameters, see `parameters.names_of`."""
        yield {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r}, bytes_read={self.bytes_read})"

    @abstractmethod
    def _pieces_of(self, name: str) -> Iterable[_P]:
        """Return the pieces of a tensor that can be read from here."""

    @abstractmethod
    def _carry_out(self, cells: Sequence[Cell[_P]], reading: Reading[_P]) -> None:
        """Read cells. Those that could not be had are with `reading` after it."""

    def _plan(self, wanted: Sequence[tuple[Box, Want]], reading: Reading[_P]) -> list[Cell[_P]]:
        """Return what to take from which piece: of boxes, each with the want that it is a part of.

        Raises:
            CheckpointError: what is wanted cannot be made up of the pieces that are left.
        """
        cells: list[Cell[_P]] = []
        holes: list[tuple[str, Box]] = []
        for box, want in wanted:
            try:
                taken, missing = self._cover(want.name, box, reading)
            except ValueError as error:
                what = f"{self.location} has {want.name[:120]} in too many pieces: {error}"
                raise CheckpointDamagedError(what, self.location) from error
            cells += [Cell(piece, part, want) for piece, part in taken]
            holes += [(want.name, missing[0])] if missing else []
        if holes:
            raise reading.error_of(holes)
        return cells

    def _cover(self, name: str, box: Box, reading: Reading[_P]) -> tuple[list[tuple[_P, Box]], list[Box]]:
        """As `PieceIndex.cover`, of the pieces that are of use."""
        return self._index(name).cover(box, reading.is_usable)

    def _index(self, name: str) -> PieceIndex[_P]:
        with self._lock:
            index = self._indexes.get(name)
            if index is None:
                index = self._indexes[name] = PieceIndex((piece.box, piece) for piece in self._pieces_of(name))
            return index

    def _parallel_map(self, units: Sequence[Callable[[], _T]]) -> list[_T]:
        return parallel_map(_call, units, self._num_threads)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_read += num_bytes


def _call(work: Callable[[], _T]) -> _T:
    return work()


class Reading(Generic[_P]):
    """State that the threads of one `read` share."""

    def __init__(self, location: str, rank: int | None = None) -> None:
        self.rank = rank
        """Whose copies are taken first."""
        self.is_written = False
        """Whether a target was written to."""
        self._location = location
        self._lock = threading.Lock()
        self._unusable: dict[int, tuple[_P, str, CheckpointError]] = {}
        self._failed: dict[int, list[Cell[_P]]] = {}

    def is_usable(self, piece: _P) -> bool:
        """Whether nothing was found to be wrong with a piece."""
        return id(piece) not in self._unusable

    def fail(self, piece: _P, cells: Sequence[Cell[_P]], error: CheckpointError) -> None:
        """Note that a piece is of no use, and what was wanted of it."""
        with self._lock:
            is_new = id(piece) not in self._unusable
            self._unusable.setdefault(id(piece), (piece, cells[0].want.name, error))
            self._failed[id(piece)] = [*cells]
        if is_new:
            logger.warning("%s: %s; another piece is looked for", self._location, error)

    def failed(self) -> set[str]:
        """Return the names of tensors of which a piece is of no use."""
        with self._lock:
            return {name for _, name, _ in self._unusable.values()}

    def take_failed(self) -> list[Cell[_P]]:
        """Return what has to come from elsewhere."""
        failed, self._failed = self._failed, {}
        return [cell for cells in failed.values() for cell in cells]

    def error_of(self, holes: Sequence[tuple[str, Box]]) -> CheckpointError:
        """Return the error of what no piece has that is of use."""
        causes = [
            error
            for piece, name, error in self._unusable.values()
            if any(name == wanted and intersect(piece.box, box) is not None for wanted, box in holes)
        ]
        kinds = {type(cause) for cause in causes}
        kind = kinds.pop() if len(kinds) == 1 else CheckpointDamagedError
        why = f" ({some_of(map(str, causes))})" if causes else ""
        what = some_of(f"{name[:120]} {box}" for name, box in holes)
        error = kind(f"{self._location}: no piece that can be read from here has {what}{why}", self._location)
        error.__cause__ = causes[0] if causes else None
        return error


# Targets


def _check_want(want: Want, tensor: SavedTensor | None, location: str) -> None:
    """See that a target is one for what is wanted.

    Raises:
        StateMismatchError: no such tensor is there, or of another shape or dtype.
    """
    if tensor is None:
        raise StateMismatchError(f"{want.name[:120]} is not in {location}; nothing was read", location)
    given = want.target
    if not fits(want.box, tensor.shape):
        raise StateMismatchError(
            f"{want.name[:120]} is of shape {[*tensor.shape]} in {location}, which has no {want.box}; nothing was read",
            location,
        )
    if given.dtype != tensor.dtype or tuple(given.shape) != want.box.sizes:
        raise StateMismatchError(
            f"{want.name[:120]} {want.box} is {tensor.dtype} in {location}, its target is {given.dtype}{[*given.shape]}; "
            "nothing was read",
            location,
        )
    if not is_plain_memory(given):
        raise StateMismatchError(f"the target of {want.name[:120]} is no plain memory on the CPU", "target")


def copy_box(data: memoryview, base: int, have: Box, box: Box, want: Want) -> None:
    """Copy a box from the C-order data of a larger one to its place in a target.

    Args:
        data: some of the bytes of `have`, from byte `base` of it on; at least those of `box`.
        base: see above.
        have: the box whose data they are.
        box: what is copied, in coordinates of the tensor.
        want: where to.
    """
    itemsize = want.target.element_size()
    words = max(itemsize // 8, 1)
    word = np.dtype(_WORDS[itemsize // words])
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    shape = (*(box.sizes[dim] for dim in dims), words)

    def view(memory: memoryview, offset: int, origin: Sequence[int], strides: Sequence[int]) -> np.ndarray:
        low = sum((at - zero) * stride for at, zero, stride in zip(box.offsets, origin, strides, strict=True))
        steps = (*(strides[dim] * itemsize for dim in dims), word.itemsize)
        return np.ndarray(shape, word, memory, offset + low * itemsize, steps)

    source = view(data, -base, have.offsets, c_strides(have.sizes))
    np.copyto(view(want.memory(), 0, want.box.offsets, want.target.stride()), source)


# Parts


def new_memory(num_bytes: int) -> memoryview:
    return np.empty(num_bytes, np.uint8).data  # not zeroed


def cut_by_span(box: Box, strides: Sequence[int], itemsize: int, max_span: int) -> Iterator[Box]:
    """Yield a box in parts, in C order, that lie within `max_span` bytes each of a C-order array."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    span = itemsize * (1 + sum((box.sizes[dim] - 1) * strides[dim] for dim in dims))
    if span <= max_span or not dims:
        yield box
        return
    dim = dims[0]
    row_span = span - itemsize * (box.sizes[dim] - 1) * strides[dim]
    at_once = max((max_span - row_span) // (strides[dim] * itemsize) + 1, 1)
    for start in range(0, box.sizes[dim], at_once):
        low = box.offsets[dim] + start
        part = Box(
            (*box.offsets[:dim], low, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], min(at_once, box.sizes[dim] - start), *box.sizes[dim + 1 :]),
        )
        if at_once == 1:
            yield from cut_by_span(part, strides, itemsize, max_span)
        else:
            yield part


def spans_of(region: Region, min_gap: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of bytes that a region of a C-order array lies in, in order, with at least `min_gap` bytes between them."""
    steps, span = list(region.steps), region.run
    while steps and steps[-1][1] - span < min_gap:
        count, stride = steps.pop()
        span += (count - 1) * stride
    for places in product(*(range(0, count * stride, stride) for count, stride in steps)):
        start = region.start + sum(places)
        yield start, start + span
