"""Whether a state that arrives fits the one that is here. All of it is known before a byte is received.

A state arrives in one of two ways. As blocks, its boxes are those of the rank that it comes from (`check_layout`). As boxes,
what is here of each tensor is wanted (`check_tensors`). In both, memory that tensors share here may be received into only
where they share it there in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from torchft_ckpt.checkpointing.state import device_memory
from torchft_ckpt.checkpointing.state.containers import Path
from torchft_ckpt.checkpointing.state.description import DescribedTensor, Description, entries_of, ties_of
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.format import Chunk, Manifest, WireTensor
from torchft_ckpt.checkpointing.state.local_state import (
    HeldTensor,
    LocalState,
    box_of,
    describe,
    describe_entry,
    has_shape_of,
    is_whole,
    some_of,
)
from torchft_ckpt.checkpointing.state.parameters import names_from, why_not_of
from torchft_ckpt.checkpointing.state.regions import c_strides
from torchft_ckpt.checkpointing.state.space import lies_apart, span_of
from torchft_ckpt.checkpointing.state.tree import (
    Node,
    as_places,
    check_classes,
    decode_tree,
    in_words,
    is_flat,
    items_of_node,
    join_path,
    plain_paths,
)
from torchft_ckpt.errors import LayoutMismatchError, StateFormatError, StateMismatchError

_OPTIMIZER_KEYS = {"state", "param_groups"}
_MAX_TENSORS = 2**62
_MAX_PREFIX_CHARS = 16 * 1024 * 1024
"""Of the paths of all optimizers; a hundred thousand of them have less."""


# By blocks


def check_layout(local: LocalState, manifest: Manifest, *, in_place: bool) -> set[str]:
    """See that a state can be received as the boxes of it lie in a source's byte space.

    Args:
        in_place: whether it is to be received into the tensors that are here. Else a whole tensor may have another shape or
            dtype there, and names may differ: the state arrives as it is.

    Returns:
        the names of the tensors that have another shape or dtype there, and arrive as they are.

    Raises:
        LayoutMismatchError: the same tensors are there, but other boxes of them than here.
        StateMismatchError: tensors of the same name have other shapes or dtypes, cannot be received into, or are no tensors
            there, or tensors that are separate at the source share memory here; or there is no class here for a named tuple or
            an enum. The message names the first few.
    """
    check_classes(manifest.tree, [parse_dtype(entry.dtype) for entry in manifest.tensors], local.classes)
    wrong = _of_other_parameters(local, manifest.tree, None)
    elsewhere: list[str] = []
    unknown: list[str] = []
    as_they_are: set[str] = set()
    for entry in manifest.tensors:
        held = local.get(entry.fqn)
        if held is None:
            if why := local.why_not_made(entry):
                unknown.append(f"{entry.fqn[:120]} is {describe_entry(entry)} there, {why}")
        elif not has_shape_of(held, entry):
            if in_place or not is_whole(entry):
                wrong.append(_difference(held, entry, describe_entry(entry)))
            as_they_are.add(entry.fqn)
        elif why := local.why_unfillable(entry.fqn) if in_place else local.why_no_like(entry.fqn):
            wrong.append(f"{entry.fqn[:120]} {why}")
        elif not _same_boxes(held, entry):
            elsewhere.append(_difference(held, entry, describe_entry(entry)))
    if in_place and (absent := local.paths() - {entry.fqn for entry in manifest.tensors}):
        wrong += [
            f"{path[:120]} is a tensor here and none there" for path in plain_paths(manifest.tree) if path in absent
        ]
    _refuse(wrong)
    if elsewhere:
        raise LayoutMismatchError(
            f"the source's ranks hold other parts of the tensors than this one: {some_of(elsewhere)}; nothing was received",
            party="local_state",
        )
    if unknown:
        # Part of a tensor would be taken for all of it.
        raise StateMismatchError(
            f"no tensors are here that say what is wanted of sharded ones: {some_of(unknown)}; nothing was received. State "
            "of an optimizer is made where the Manager knows it: wrap it, guard it, or name it with the state's functions. "
            "A transport by itself knows the state that is here by HTTPTransport(state_dict=...)",
            party="local_state",
        )
    if in_place:
        chunks = [(entry.fqn, entry.chunks) for entry in manifest.tensors]
        _check_apart(local, chunks, lambda: ties_of(entries_of([manifest])))
    return as_they_are


def _same_boxes(held: HeldTensor, entry: WireTensor) -> bool:
    """Whether the boxes of a tensor of that shape are the same ones; where empty ones lie does not matter."""
    boxes, chunks = held.boxes, entry.chunks
    if held.adapter is None and len(chunks) == 1 and chunks[0].sizes == entry.shape:
        return True
    there = [box_of(chunk) for chunk in chunks]
    return len(boxes) == len(there) and all(
        a == b or (a.sizes == b.sizes and not a.volume) for a, b in zip(boxes, there, strict=True)
    )


# By boxes


def check_tensors(
    local: LocalState | None, description: Description, *, in_place: bool, may_be_beside: bool = False
) -> set[str]:
    """See that names, shapes and dtypes are the same. The state of an optimizer may be absent on either side: it comes with the
    first step.

    Args:
        local: the state that is here; None if nothing is.
        in_place: whether it is to be received into the tensors that are here.
        may_be_beside: what the rank that is described holds whole, and cannot be received into, arrives beside: who hands it to
            `load_state_dict` need have no such tensor. So of another shape; and what is here alone stays. Else it is refused.

    Returns:
        the names of those that arrive beside.

    Raises:
        StateMismatchError: the state does not fit, or there is no class here for a named tuple or an enum. The message names
            the first few.
    """
    beside: set[str] = set()
    if local is None:
        if description.others:
            missing = some_of((name[:120] for name in sorted(description.others)), ", ")
            raise StateMismatchError(
                f"the ranks hold tensors that the first does not list, such as stages of a pipeline do: {missing}; fetch each "
                "rank's state by itself, or by PeerReader",
                party="source",
            )
        return beside
    optional = _Prefixes(_optimizer_state(description.tree))
    wrong = _of_other_parameters(local, description.tree, description.owners)
    wrong += local.expect(description.tensors)
    for entry in description.tensors:
        held = local.get(entry.fqn)
        arrives_whole = may_be_beside and entry.fqn not in description.sharded
        if held is None:
            if not arrives_whole and not local.is_optional(entry.fqn) and not optional.begin(entry.fqn):
                wrong.append(f"{entry.fqn[:120]} is not here")
        elif not has_shape_of(held, entry):
            if arrives_whole and held.adapter is None:
                beside.add(entry.fqn)
            else:
                wrong.append(_difference(held, entry, f"{entry.dtype}{[*entry.shape]}"))
        elif why := local.why_no_like(entry.fqn):
            wrong.append(f"{entry.fqn[:120]} {why}")
        elif in_place and (why := local.why_unfillable(entry.fqn)):
            if may_be_beside:
                beside.add(entry.fqn)
            else:
                wrong.append(f"{entry.fqn[:120]} {why}")
    names = {entry.fqn for entry in description.tensors}
    for path in () if may_be_beside else local.paths():
        if path not in names and not local.is_optional(path) and not optional.begin(path):
            where = "on the rank whose state is taken" if path in description.others else "there"
            wrong.append(f"{path[:120]} is not {where}")
    _refuse(wrong)
    check_classes(description.tree, [parse_dtype(entry.dtype) for entry in description.tensors], local.classes)
    if in_place and description.chunks is not None:
        named = zip(description.tensors, description.chunks, strict=True)
        _check_apart(local, [(entry.fqn, chunks) for entry, chunks in named], lambda: description.ties)
    return beside


def _of_other_parameters(local: LocalState, tree: Node, owners: object) -> list[str]:
    """Return in sentences which optimizers' state is of other parameters there, or of these in another order.

    `owners`: of a checkpoint, see `Description`; None: the tree has it.
    """
    said = _value_at(tree, ("torchft", "owners")) if owners is None and local.owned else owners
    found = ((path, owned, _value_at(tree, (*owned.path, "param_groups"))) for path, owned in local.owned.items())
    return [
        why
        for path, owned, groups in found
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
        for why in why_not_of(
            path,
            groups,
            names_from(said, path),
            here=owned,
            is_checkpoint=owners is not None,
            may_grow=True,
            may_lengthen=not local.shared,  # else it may be another model, of which less is tied
        )
    ]


def _value_at(tree: Node, path: Path) -> object:
    """Return what is at a path of a checked tree; None if nothing is."""
    for name in path:
        items = (item for key, item in items_of_node(tree) if in_words(key) == str(name))
        tree = next(items, None)
    return decode_tree(tree, as_places(_MAX_TENSORS))


def _difference(held: HeldTensor, entry: DescribedTensor, there: str) -> str:
    return f"{entry.fqn[:120]} is {describe(held)} here, {there} there"


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        raise StateMismatchError(
            f"the source's state does not fit this replica: {some_of(wrong)}; nothing was received", "local_state"
        )


class _Prefixes:
    """Paths that others may begin with.

    Raises:
        StateFormatError: together they are longer than those of any state.
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        found: list[str] = []
        num_chars = 0
        for prefix in prefixes:
            found.append(prefix)
            num_chars += len(prefix)
            if num_chars > _MAX_PREFIX_CHARS:
                raise StateFormatError(f"the source's tree has more than {len(found)} optimizers", party="source")
        # Of one that begins with another the other one is enough; then only the last before a path can be its beginning.
        self._sorted: list[str] = []
        for prefix in sorted(found):
            if not self._sorted or not prefix.startswith(self._sorted[-1]):
                self._sorted.append(prefix)

    def begin(self, path: str) -> bool:
        place = bisect_right(self._sorted, path)
        return place > 0 and path.startswith(self._sorted[place - 1])


def _optimizer_state(tree: Node) -> Iterator[str]:
    """Yield what the paths of the state of optimizers in a tree begin with: of `state` beside `param_groups`."""
    keys: list[object] = []

    def search(node: Node) -> Iterator[str]:
        items = items_of_node(node)
        if {key for key, _ in items if isinstance(key, str)} >= _OPTIMIZER_KEYS:
            path = ""
            for key in (*keys, "state", ""):
                path = join_path(path, key)
            yield path
        for key, item in items:
            if isinstance(item, dict) or (isinstance(item, list) and not is_flat(item)):
                keys.append(key)
                yield from search(item)
                keys.pop()

    return search(tree)


# Shared memory


class _Span(NamedTuple):
    """Memory that one box of a tensor has here."""

    low: int
    high: int
    lies: object
    """Its place at the source: what lies in one place there may share memory here."""
    name: str


def _check_apart(
    local: LocalState,
    tensors: Sequence[tuple[str, Sequence[Chunk]]],
    ties: Callable[[], Mapping[str, object]],
) -> None:
    """Refuse to receive into memory that tensors share here and not at the source, or not so: one would overwrite another.

    A strided tensor is taken for all that lies between its first and its last byte.

    Args:
        tensors: each by name, with where its boxes lie at the source.
        ties: returns the ties of tensors, which are needed only if some share memory here.

    Raises:
        StateMismatchError: two tensors, or elements of one, cannot both be received.
    """
    if not local.shared and len({name for name, _ in tensors}) == len(tensors):
        return
    known = ties()
    spans: list[_Span] = []
    for name, all_chunks in tensors:
        held = local.get(name)
        if held is None:
            continue
        chunks = [chunk for chunk in all_chunks if 0 not in chunk.sizes]
        boxes = [box for box in held.boxes if box.volume]
        data = [part for part in held.data if part.numel() and not part.is_meta]
        is_alike = len(data) == len(chunks) and boxes == [box_of(chunk) for chunk in chunks]
        for number, part in enumerate(data):
            low = device_memory.accelerator.place_of(part)
            high = low + span_of(part)
            is_strided_alike = is_alike and _is_strided_as(part, chunks[number])
            if part.nbytes > high - low or not (is_strided_alike or lies_apart(part)):
                raise _shared("elements share memory here", [name])
            if is_strided_alike:
                lies: object = (chunks[number].segment, low - chunks[number].byte_offset)
            else:
                lies = (id(known.get(name, held)), low, part.stride())
            spans.append(_Span(low, high, lies, name))
    spans.sort(key=lambda span: span[:2])
    furthest: _Span | None = None
    for span in spans:
        if furthest is not None and span.low < furthest.high and span.lies != furthest.lies:
            raise _shared(
                "tensors share memory here that do not at the source, or not so", sorted((furthest.name, span.name))
            )
        if furthest is None or span.high > furthest.high:
            furthest = span


def _is_strided_as(part: torch.Tensor, chunk: Chunk) -> bool:
    """Whether a box has its elements in memory in the order in which the source has them."""
    there = c_strides(chunk.sizes) if chunk.strides is None else chunk.strides
    return all(
        size == 1 or stride == other for size, stride, other in zip(part.shape, part.stride(), there, strict=True)
    )


def _shared(what: str, names: Iterable[str]) -> StateMismatchError:
    listed = ", ".join(name[:120] for name in names)
    return StateMismatchError(f"{what}: {listed}; nothing was received", party="local_state")
