"""The state that a re-sharded fetch is for: which boxes of the sources' tensors are wanted, and the state made of them.

Tensors are matched by their path in the tree. What is here of a tensor is wanted; what is not known here is wanted whole.
Values that are no tensors, and the tree itself, are those of one rank of the source. It knows manifests, no connections.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch

from torchft_ckpt.checkpointing.resharding.plan import SourceGroup, Want, places_of, tensors_of
from torchft_ckpt.checkpointing.state.collector import collector_paused
from torchft_ckpt.checkpointing.state.dtypes import dtype_name, parse_dtype
from torchft_ckpt.checkpointing.state.format import Manifest, TensorEntry
from torchft_ckpt.checkpointing.state.local_state import (
    HeldTensor,
    LocalState,
    box_of,
    copy_to,
    describe,
    note_written,
    some_of,
)
from torchft_ckpt.checkpointing.state.regions import c_strides
from torchft_ckpt.checkpointing.state.space import span_of
from torchft_ckpt.checkpointing.state.tree import check_classes, decode_tree, items_of_node, join_path
from torchft_ckpt.core.boxes import Box, whole
from torchft_ckpt.errors import CheckpointError, StateFormatError, StateMismatchError, TransferError

_OPTIMIZER_KEYS = {"state", "param_groups"}
_MAX_PREFIX_CHARS = 16 * 1024 * 1024
"""Of the paths of all optimizers; a hundred thousand of them have less."""


class ShardedDestination:
    """Where the boxes of one state go.

    Args:
        local: the state that is here; None where nothing is: then all is wanted, whole.
        rank: whose plain values are taken, modulo the size of the source group.
        in_place: receive into the tensors of `local`, as far as they are on the CPU.
        may_share_memory: tensors may share memory here without the source's doing so: it is known to hold equal values in them.
        may_be_beside: tensors and arrays that cannot be received into arrive in memory of their own, for who hands on what is
            returned; else they are refused.
    """

    def __init__(
        self,
        local: LocalState | None,
        rank: int,
        *,
        in_place: bool,
        may_share_memory: bool = False,
        may_be_beside: bool = False,
    ) -> None:
        self._may_share_memory = may_share_memory
        self._may_be_beside = may_be_beside
        self._beside: set[str] = set()
        self._local = local
        self._rank = rank
        self._in_place = in_place
        self._targets: dict[str, list[torch.Tensor]] = {}
        self._is_into_place = False
        self._has_copied = False

    def is_overwritten(self, has_received: bool) -> bool:
        """Whether something of `local` was written to, where something was received or not."""
        return self._has_copied or (has_received and self._is_into_place)

    def want(self, group: SourceGroup) -> list[Want]:
        """Return what is wanted of a source group.

        Raises:
            StateMismatchError: names, shapes or dtypes are not those of this replica.
            TransferError: there is not enough memory.
        """
        tensors = tensors_of(group)
        principal = self._principal(group)
        self._check(tensors, principal)
        if self._local is not None:
            dtypes = [parse_dtype(entry.dtype) for entry in principal.tensors]
            check_classes(principal.tree, dtypes, self._local.classes)
        self._targets = {}
        wants: list[Want] = []
        places = places_of(group)
        shared: dict[object, str] = {}
        try:
            for entry in principal.tensors:
                held = self._get(entry.fqn)
                boxes = [whole(tuple(entry.shape))] if held is None else held.boxes
                twin = shared.setdefault((places[entry.fqn], tuple(boxes)), entry.fqn)
                if twin != entry.fqn:
                    self._targets[entry.fqn] = self._targets[twin]  # tied at the source
                    continue
                targets = self._targets[entry.fqn] = [
                    self._target(held, number, box, entry) for number, box in enumerate(boxes)
                ]
                wants += [Want(entry.fqn, box, target) for box, target in zip(boxes, targets, strict=True)]
        except CheckpointError:
            raise
        except (MemoryError, RuntimeError) as error:
            raise TransferError(
                f"no memory for the state that the source announces: {error}", party="memory"
            ) from error
        if self._in_place and not self._may_share_memory:
            self._check_apart(principal, places)
        return wants

    def assemble(self, group: SourceGroup) -> object:
        """Return the state; call it once all that is wanted is there.

        Raises:
            TransferError: a tensor could not be made of it.
        """
        try:
            return self._assemble(self._principal(group))
        except CheckpointError:
            raise
        except RuntimeError as error:  # of a device, say
            raise TransferError(f"what was received cannot be assembled: {error}", party="local_state") from error

    def _assemble(self, principal: Manifest) -> object:
        with collector_paused(), torch.no_grad():
            written: list[torch.Tensor] = []
            tensors = [self._finished(entry, written) for entry in principal.tensors]
            note_written(written)
            # With no state here somebody only looks: he gets what can be made without classes.
            return decode_tree(principal.tree, tensors, None if self._local is None else self._local.classes)

    def _principal(self, group: SourceGroup) -> Manifest:
        """Return the manifest of the rank whose values that are no tensors are taken."""
        manifests = group.manifests
        first = self._rank % len(manifests)
        return next(manifest for manifest in (*manifests[first:], *manifests[:first]) if manifest is not None)

    def _get(self, path: str) -> HeldTensor | None:
        return None if self._local is None else self._local.get(path)

    def _target(self, held: HeldTensor | None, number: int, box: Box, entry: TensorEntry) -> torch.Tensor:
        is_in_place = self._in_place and entry.fqn not in self._beside
        if is_in_place and held is not None and held.data and _has_plain_memory(held.data[number]):
            self._is_into_place = True
            return held.data[number].detach()
        return torch.empty(box.sizes, dtype=parse_dtype(entry.dtype), device="cpu")

    def _finished(self, entry: TensorEntry, written: list[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the state, as it is used here."""
        held, targets = self._get(entry.fqn), self._targets[entry.fqn]
        if held is None:
            return targets[0]
        is_in_place = self._in_place and entry.fqn not in self._beside
        if is_in_place and (held.adapter is None or held.adapter.shares_memory):
            for local, target in zip(held.data, targets, strict=True):
                if _same_view(local, target):
                    written += [local] if held.given is local else [local, held.given]
                else:
                    self._has_copied = True
                    copy_to(local, target)
            return held.given
        if held.adapter is None:
            return targets[0]
        return held.adapter.rebuild(held.given, targets)

    def _check(self, tensors: dict[str, TensorEntry], principal: Manifest) -> None:
        """Compare names, shapes and dtypes. Optimizer state may be absent on either side: it comes with the first step."""
        if self._local is None:
            missing = sorted(tensors.keys() - {entry.fqn for entry in principal.tensors})
            if missing:
                raise StateMismatchError(
                    f"the ranks hold tensors that the first does not list, such as stages of a pipeline do: "
                    f"{some_of((name[:120] for name in missing), ', ')}; fetch each rank's state by itself, or by "
                    "PeerReader",
                    party="source",
                )
            return
        optional = _Prefixes(_optimizer_state(principal))
        names = {entry.fqn for entry in principal.tensors}
        wrong = []
        for entry in principal.tensors:
            held = self._local.get(entry.fqn)
            if held is None:
                if not self._local.is_optional(entry.fqn) and not optional.begin(entry.fqn):
                    wrong.append(f"{entry.fqn[:120]} is not here")
            elif ([*held.given.shape], dtype_name(held.given.dtype)) != (entry.shape, entry.dtype):
                wrong.append(f"{entry.fqn[:120]} is {describe(held)} here, {entry.dtype}{entry.shape} there")
            elif why := self._local.why_no_like(entry.fqn):
                wrong.append(f"{entry.fqn[:120]} {why}")
            elif self._in_place and (why := self._local.why_unfillable(entry.fqn)):
                if self._may_be_beside:
                    self._beside.add(entry.fqn)
                else:
                    wrong.append(f"{entry.fqn[:120]} {why}")
        for path in self._local.paths():
            if path not in names and not self._local.is_optional(path) and not optional.begin(path):
                what = "on the rank whose state is taken" if path in tensors else "there"
                wrong.append(f"{path[:120]} is not {what}")
        if wrong:
            raise StateMismatchError(
                f"the source's state does not fit this replica: {some_of(wrong)}; nothing was received",
                party="local_state",
            )

    def _check_apart(self, principal: Manifest, places: dict[str, object]) -> None:
        """Refuse to receive into memory that tensors share here and not at the source, or not so: one would overwrite another."""
        spans: list[tuple[int, int, object, str]] = []
        for entry in principal.tensors:
            held = self._get(entry.fqn)
            chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
            boxes = [] if held is None else [box for box in held.boxes if box.volume]
            data = [] if held is None else [local for local in held.data if local.is_cpu and local.numel()]
            is_alike = len(data) == len(chunks) and boxes == [box_of(chunk) for chunk in chunks]
            for number, local in enumerate(data):
                low, high = local.data_ptr(), local.data_ptr() + span_of(local)
                place: object = (id(places[entry.fqn]), low, local.stride())
                if is_alike:
                    chunk = chunks[number]
                    strides = c_strides(chunk.sizes) if chunk.strides is None else chunk.strides
                    is_same_view = all(
                        size == 1 or here == there
                        for size, here, there in zip(local.shape, local.stride(), strides, strict=True)
                    )
                    place = (chunk.segment, low - chunk.byte_offset) if is_same_view else place
                spans.append((low, high, place, entry.fqn))
                if local.nbytes > high - low:
                    raise self._shared([entry.fqn], "elements share memory here")
        spans.sort(key=lambda span: span[:2])
        reach, at, name = 0, cast(object, None), ""
        for low, high, place, other in spans:
            if low < reach and place != at:
                raise self._shared(
                    sorted((name, other)), "tensors share memory here that do not at the source, or not so"
                )
            if high > reach:
                reach, at, name = high, place, other

    def _shared(self, names: Sequence[str], what: str) -> StateMismatchError:
        listed = ", ".join(name[:120] for name in names)
        return StateMismatchError(f"{what}: {listed}; nothing was received", party="local_state")


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are what its memory holds, on the CPU."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _has_plain_memory(one) and (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())


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
        """Whether one of them is the beginning of a path."""
        place = bisect_right(self._sorted, path)
        return place > 0 and path.startswith(self._sorted[place - 1])


def _optimizer_state(manifest: Manifest) -> Iterator[str]:
    """Yield what the paths of the state of optimizers in a source's tree begin with: of `state` beside `param_groups`."""
    keys: list[object] = []

    def search(node: object) -> Iterator[str]:
        items = items_of_node(node)
        if {key for key, _ in items if isinstance(key, str)} >= _OPTIMIZER_KEYS:
            path = ""
            for key in (*keys, "state", ""):
                path = join_path(path, key)
            yield path
        for key, item in items:
            if isinstance(item, (list, dict)):
                keys.append(key)
                yield from search(item)
                keys.pop()

    return search(manifest.tree)
