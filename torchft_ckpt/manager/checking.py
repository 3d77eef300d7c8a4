"""Makes what the lighthouse compares of replica groups: the layout of their parameters, and digests of their state at a step.

Before groups train together the lighthouse compares the layout of each rank's parameters, in words and as a digest
(`layout_of`).

Digests are of the memory that optimizers own, of their settings, and of what else is known to be equal in all groups
(`showing.KnownLeaves`). Arrays and the states of Python's and numpy's random generators are left out. Of a state that only its
owner changes, between two steps, all counts.

Of a large state each step takes a part, the number of which follows from the step alone, until all have had their turn: no vote
waits for long.

Values are taken on the training thread, as the loop may change them at once. Tensors are read on a thread of this library's,
before the vote, after which an optimizer may write to them; whoever takes the write lock before that waits until they are read.
One that was written to without the lock is found by its version, and the state is not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

from torchft_ckpt.checkpointing import StateDictLock
from torchft_ckpt.checkpointing.state.containers import SEQUENCES, is_one_leaf
from torchft_ckpt.checkpointing.state.shards import adapter_of, memory_of
from torchft_ckpt.checkpointing.state.tree import in_words, is_flat
from torchft_ckpt.checkpointing.state.versions import Counted, count_writes, is_changed
from torchft_ckpt.core.coordination.equality import runs_of
from torchft_ckpt.core.coordination.layouts import SEPARATOR
from torchft_ckpt.core.coordination.messages import LeafDigests, LeavesWanted, StateVersion
from torchft_ckpt.errors import StateChangedError
from torchft_ckpt.manager.comparing import is_random_state, value_in_words
from torchft_ckpt.manager.showing import CheckedLeaf, Glance, KnownLeaves, digest_of
from torchft_ckpt.manager.volatile import owned_by
from torchft_ckpt.memory import gc_paused
from torchft_ckpt.threads import Threads, is_done

logger = logging.getLogger(__name__)

Found: TypeAlias = "tuple[str, torch.Tensor | str]"
"""A tensor, or a value in words, and where it is."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_LEAF_CHARS = 16
PART_BYTES, MOST_PARTS = 64 << 20, 8
"""A part takes some 20 ms of a thread. To look for the state in each of many steps would take longer than larger parts."""
_MAX_TEXT_CHARS = 3000
_MAX_PLACE_CHARS = 900
_MAX_FROZEN_CHARS = 150


@gc_paused()
def leaves_to_compare(
    state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer], *, still: Collection[str] = ()
) -> list[CheckedLeaf]:
    """Return the leaves by which groups are compared, with values in words and tensors as they are.

    Args:
        state: what the registered functions returned, by key.
        optimizers: what they own is compared, whether it is in the state or not.
        still: keys whose state changes between two steps only: all of it has to be equal.
    """
    owned = owned_by(optimizers)
    names: dict[int, str] = {}
    leaves: list[CheckedLeaf] = []
    for key, item in state.items():
        for path, value in _leaves(item, key):
            addresses = [part.data_ptr() for part in memory_of(value)] if isinstance(value, torch.Tensor) else []
            if key in still or not any(address in owned for address in addresses):
                leaves.append(CheckedLeaf(path, path, value, is_owned=key in still))
            names.update((address, path) for address in addresses)
    seen: set[int] = set()
    for number, optimizer in enumerate(optimizers):
        for path, value in _owned(optimizer, f"optimizer {number}"):
            if id(value) in seen:
                continue  # two optimizers hold the parameter, as one that steps others does
            seen.update([id(value)] if isinstance(value, torch.Tensor) else [])
            parts = memory_of(value) if isinstance(value, torch.Tensor) else ()
            name = next((names[part.data_ptr()] for part in parts if part.data_ptr() in names), path)
            leaves.append(CheckedLeaf(path, name, value))
    return sorted(leaves, key=lambda leaf: leaf.place)


def _leaves(value: Any, path: str, num_beside: int = 0) -> Iterator[Found]:
    """Yield the tensors and plain values of a state. A sequence of values and nothing else is one of them; see `is_one_leaf`."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_meta:
            yield path, value
    elif is_random_state(value) or isinstance(value, np.ndarray):
        return
    elif isinstance(value, Mapping) and not is_one_leaf(value, num_beside):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}", len(value))
    elif isinstance(value, SEQUENCES) and not is_flat(value) and not all(isinstance(item, _PLAIN) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}", len(value))
    else:
        # The order in which a mapping was filled is a group's own.
        by_key = isinstance(value, Mapping) and {key: value[key] for key in sorted(value, key=in_words)}
        words = value_in_words(by_key or value)
        if words is not None:  # else another process may have other words for the same
            yield path, words


def _owned(optimizer: torch.optim.Optimizer, path: str) -> Iterator[Found]:
    """Yield parameters, settings and state of an optimizer, parameters by their number as in its state dict."""
    number = 0
    for place, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        yield from _leaves(settings, f"{path}.param_groups.{place}")
        for parameter in group["params"]:
            yield f"{path}.parameter {number}", parameter
            yield from _leaves(optimizer.state.get(parameter, {}), f"{path}.state.{number}")
            number += 1
    for key, item in optimizer.state.items():
        if not isinstance(key, torch.Tensor):  # an entry of the optimizer's own, beside those of parameters
            yield from _leaves(item, f"{path}.state.{key}")


def _parts_of(leaves: Sequence[CheckedLeaf]) -> list[list[CheckedLeaf]]:
    """Return the parts in which leaves are compared, at least one. They follow from shapes and dtypes, as in all groups."""
    most = max(PART_BYTES, -(-sum(map(_num_bytes, leaves)) // MOST_PARTS))
    parts: list[list[CheckedLeaf]] = [[]]
    num_bytes = 0
    for leaf in leaves:
        for piece in _pieces_of(leaf, most):
            if num_bytes + _num_bytes(piece) > most and parts[-1]:
                parts.append([])
                num_bytes = 0
            parts[-1].append(piece)
            num_bytes += _num_bytes(piece)
    return parts


def _num_bytes(leaf: CheckedLeaf) -> int:
    return leaf.value.nbytes if isinstance(leaf.value, torch.Tensor) else 0


def _pieces_of(leaf: CheckedLeaf, most: int) -> list[CheckedLeaf]:
    """Cut a large tensor by its first dimension, however it lies in memory."""
    value = leaf.value
    if isinstance(value, str) or value.nbytes <= most or adapter_of(value):
        return [leaf]
    num_rows = max(1, most * len(value) // value.nbytes)
    return [
        leaf._replace(name=f"{leaf.name} (part {n})", place=f"{leaf.place} {n}", value=piece)
        for n, piece in enumerate(value.detach().split(num_rows))
    ]


def _digest_of_all(digests: Sequence[str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _digests(leaves: Sequence[CheckedLeaf], counted: Sequence[Sequence[Counted]], step: int) -> list[str]:
    digests: list[str] = []
    for leaf, versions in zip(leaves, counted, strict=True):
        digests.append(digest_of(leaf.value))
        if is_changed(versions):
            raise StateChangedError(
                f"{leaf.name} was written to while the state of step {step} was digested: hold Manager.state_dict_lock.write()"
                " around each change outside of the optimizer's step",
                party=leaf.name,
            )
    return digests


class EqualityCheck:
    """The digests of one state at a time. The training thread begins and votes; any thread answers.

    Args:
        lock: who is about to hold its write side waits for the digests.
        known: which leaves have to be equal.
    """

    def __init__(self, lock: StateDictLock, known: KnownLeaves) -> None:
        lock.add_before_write(self._finish)
        self.glance = Glance()
        self._known = known
        self._worker = Threads("torchft_ckpt-check")
        self._work: Future[list[str]] | None = None
        self._version = StateVersion()
        self._names: list[str] = []
        self._places: list[str] = []
        self._done: tuple[StateVersion, list[tuple[str, str]]] | None = None
        self._due_until = -1

    def is_due(self, step: int) -> bool:
        """Whether a part is to be compared of the state of this step, after an earlier one."""
        return step <= self._due_until

    def begin(self, version: StateVersion, leaves: Sequence[CheckedLeaf], *, is_new: bool = True) -> None:
        """A step begins with a state that is to be compared. Nothing of it may change before `digest` has returned.

        `is_new`: all of it, in this step and those that follow.
        """
        parts = _parts_of([leaf for leaf in leaves if self._known.counts(leaf)])
        if is_new:
            self._due_until = version.step + len(parts) - 1
        counting = parts[version.step % len(parts)]
        # A forward pass may write to what no optimizer owns, so that is read now.
        leaves = [leaf if leaf.is_owned else leaf._replace(value=digest_of(leaf.value)) for leaf in counting]
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the thread has a stream of its own
        self._version = version
        self._names, self._places = [leaf.name for leaf in leaves], [leaf.place for leaf in leaves]
        counted = [count_writes(leaf.value) if isinstance(leaf.value, torch.Tensor) else () for leaf in leaves]
        self._work = self._worker.submit(_digests, leaves, counted, version.step) if leaves else None

    def _finish(self) -> None:
        if (work := self._work) is not None:
            is_done(work)

    def forget(self) -> None:
        """A step begins with a state of which no more is compared than what every vote shows."""
        self._work = None

    def digest(self) -> str:
        """Return what the vote shows of the state that the step began with; empty where it is not compared.

        It begins with what it shows at every step.
        """
        work, self._work = self._work, None
        glance = self.glance.digest()
        if work is None:
            return glance
        try:
            digests = work.result()
        except Exception as error:  # noqa: BLE001 - whatever a tensor's class raises: not compared, and no more
            logger.warning("the state of step %d is not compared: %s", self._version.step, error)
            return glance
        self._done = self._version, list(zip(self._names, digests, strict=True))
        return f"{glance:16}{_digest_of_all([*self._places, *digests])[:16]}"

    def answer(self, wanted: LeavesWanted) -> LeafDigests:
        """Say which digests the leaves of a state had, as far as they are known still."""
        done = self._done
        leaves = [] if done is None or done[0] != wanted.version else done[1]
        runs = runs_of(leaves, lambda some: some[0] if len(some) == 1 else _digest_of_all(some)[:_LEAF_CHARS])
        return LeafDigests(version=wanted.version, group_rank=wanted.group_rank, leaves=runs)

    def shutdown(self, timeout_s: float) -> None:
        self._worker.shutdown(timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Shapes, dtypes and boxes of the parameters that one rank trains."""

    digest: str = ""
    """Equal exactly where the parameters are alike; empty where nothing is known of them."""
    text: str = ""
    """The same in words, one item a parameter, as far as there is room."""
    is_sharded: bool = False


def layout_of(
    parameters: Iterable[tuple[str, torch.Tensor]], *, only_sharded: bool, beside: str = ""
) -> ParameterLayout:
    """Describe parameters.

    Args:
        parameters: with what each is called, and after a comma where it is in the state, which counts too if it is known of all.
        only_sharded: look at those that are sharded alone: which of the others have to be alike is not known.
        beside: what has to be alike beside them, in words.

    Raises:
        UnsupportedValueError: what is here of a parameter is no box.
    """
    hasher, placer = xxhash.xxh3_64(beside.encode()), xxhash.xxh3_64()
    items: list[str] = [beside] if beside else []
    num_chars, num_place_chars = len(beside), 0
    has_places = True
    is_sharded = False
    for name, parameter in parameters:
        adapter = adapter_of(parameter)
        if adapter is None and only_sharded:
            continue
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        item = f": {shape} {str(parameter.dtype).removeprefix('torch.')}"
        if adapter is not None:
            is_sharded = True
            item += f" [{' '.join(map(str, adapter.boxes(parameter, name)))}]"
        number, _, place = name.partition(", ")
        hasher.update(f"{number}{item};".encode())
        placer.update(f"{place};".encode())
        has_places = has_places and bool(place)
        num_chars += len(number) + len(item) + len(SEPARATOR)
        num_place_chars += len(place)
        if num_chars <= _MAX_TEXT_CHARS:
            items.append(f"{name if num_place_chars <= _MAX_PLACE_CHARS else number}{item}")
    digest = f"{hasher.hexdigest()}.{placer.hexdigest()}" if has_places else hasher.hexdigest()
    return ParameterLayout(digest if num_chars > len(beside) else "", SEPARATOR.join(items), is_sharded)


def frozen_in_words(flags: Sequence[bool]) -> str:
    """Say which parameters need no gradient: equal texts exactly for equal flags. Empty where there is no parameter.

    Args:
        flags: whether each parameter needs a gradient.
    """
    if not flags:
        return ""
    runs: list[list[int]] = []
    for number, trains in enumerate(flags):
        if trains:
            continue
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
    if len(text) > _MAX_FROZEN_CHARS:
        text = f"{text[:_MAX_FROZEN_CHARS]}... ({xxhash.xxh3_64_hexdigest(bytes(flags))})"
    return f"frozen parameters: {text or 'none'}"
