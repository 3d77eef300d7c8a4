"""The leaves of a state whose tensors are not here yet, by DCP's names: which tensor stands where, and the values between them.

A value may hold tensors and arrays, for DCP looks into no tuple. They are wanted with it; the value is made when they are here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchft_ckpt.checkpointing.state.classes import KnownClasses
from torchft_ckpt.checkpointing.state.containers import Path, flattened, walk
from torchft_ckpt.checkpointing.state.description import DescribedTensor
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.target import Want, memory_for, naming_lack_of_memory
from torchft_ckpt.checkpointing.state.tree import ArrayPlace, Node, TensorPlace, as_places, decode_tree
from torchft_ckpt.core.boxes.geometry import whole


class Outline:
    """A state, as one manifest describes it. On one thread.

    Args:
        tensors: that the tree refers to, in that order.
        classes: as for `decode_tree`. What cannot be made is left as `Unmade`, for who wants it to refuse.
        begin: returns the dict where names begin, of the state; what it raises is raised.
    """

    def __init__(
        self,
        tree: Node,
        tensors: Sequence[DescribedTensor],
        classes: KnownClasses | None,
        begin: Callable[[object], dict[str, Any]],
    ) -> None:
        self._tree = tree
        self._tensors = tensors
        self._classes = classes
        self._begin = begin
        self._known: dict[int, torch.Tensor] = {}
        leaves, paths = self._decode()
        self.paths: dict[str, Path] = {name: tuple(path) for name, path in paths.items()}
        """By name, the keys that lead to each leaf."""
        self.tensors = {name: leaf.number for name, leaf in leaves.items() if isinstance(leaf, TensorPlace)}
        """The leaves that are tensors: the number of each among those that the tree refers to."""
        self.values = {name: leaf for name, leaf in leaves.items() if name not in self.tensors}
        """The other leaves; `TensorPlace` and `ArrayPlace` stand for what is in them."""

    def wants_in(self, names: Collection[str]) -> list[Want]:
        """Return wants, each for all of a tensor or an array, for what is in these values. Called again, it asks for all anew.

        Raises:
            TransferError: there is not enough memory.
        """
        wants: list[Want] = []
        for number in dict.fromkeys(number for name in names for number in _numbers_in(self.values[name])):
            entry = self._tensors[number]
            if number not in self._known:
                with naming_lack_of_memory():
                    (self._known[number],) = memory_for((), [whole(entry.shape)], parse_dtype(entry.dtype))
            wants.append(Want(entry.fqn, whole(entry.shape), self._known[number]))
        return wants

    def made(self, names: Collection[str]) -> dict[str, object]:
        """Return these values, once the wants of `wants_in` are filled."""
        leaves: Mapping[str, object] = self._decode()[0] if self._known else self.values
        return {name: leaves[name] for name in names}

    def _decode(self) -> tuple[dict[str, Any], dict[str, Any]]:
        leaf = as_places(len(self._tensors), self._known)
        return flattened(self._begin(decode_tree(self._tree, leaf, self._classes, is_lenient=True)))


def _numbers_in(value: object) -> Iterator[int]:
    return (item.number for _, item in walk(value) if isinstance(item, (TensorPlace, ArrayPlace)))
