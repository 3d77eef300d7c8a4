"""Says whether a pickle of `torch.save`'s claims more than is there, before torch reads it. It makes nothing of what it says.

torch 2.7 reads beyond the bytes of a storage that is said to be longer. A key of tuples that are nested deep ends the process
when it is hashed, and one of few tuples, each twice in the next, is hashed for ever while no other thread runs.
"""

from __future__ import annotations

import pickletools
from collections.abc import Mapping
from typing import Any, cast

import torch

from torchft_ckpt.errors import UnsupportedValueError

_MAX_DEPTH = 500
_TIMES = 64
_FREE = 2**20
"""Values that may be referred to again, each of what refers to it, beside `_TIMES` as many as the pickle has bytes."""
_IN_PLACE = frozenset(["APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"])
_NO_VALUES = (pickletools.markobject, pickletools.stackslice)
_ITEMSIZES = {
    f"{kind.__module__} {kind.__name__}": kind._dtype.itemsize
    for kind in cast("Any", torch)._storage_classes
    if isinstance(getattr(kind, "_dtype", None), torch.dtype)
} | {"torch.storage UntypedStorage": 1}
"""Bytes of an element of a storage, by its class."""


class _Value:
    """Something on the stack: what it is, if that is plain, how deep it is nested, and how many values are in it."""

    __slots__ = ("depth", "plain", "weight")

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.depth, self.weight = 0, 1

    def take(self, values: list[_Value]) -> None:
        self.depth = max(self.depth, 1 + max((value.depth for value in values), default=-1))
        self.weight += sum(value.weight for value in values)


def check_claims(pickled: bytes, lengths: Mapping[str, int], what: str) -> None:
    """See that each storage has its bytes, and that nothing is nested or repeated without bounds.

    Args:
        lengths: of the entries of the record, by name.

    Raises:
        UnsupportedValueError: it is nested too deep, or is repeated too often.
        LookupError, TypeError, ValueError: it is no pickle, or claims storages that are not there.
    """
    stack: list[_Value] = []
    outer: list[list[_Value]] = []
    memo: dict[object, _Value] = {}
    room = _TIMES * len(pickled) + _FREE
    for opcode, plain, _ in pickletools.genops(pickled):
        if opcode.name == "MARK":
            outer.append(stack)
            stack = []
        elif "PUT" in opcode.name:
            memo[plain] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo[plain])
            room -= stack[-1].weight
        else:
            taken: list[_Value] = []
            if pickletools.stackslice in opcode.stack_before:
                taken, stack = stack, outer.pop()
            for kind in opcode.stack_before:
                if kind not in _NO_VALUES:
                    taken.insert(0, stack.pop())
            if opcode.name == "BINPERSID":
                _check_storage(taken[0].plain, lengths)
            value = taken.pop(0) if opcode.name in _IN_PLACE else _Value(plain)
            if taken:
                value.take(taken)
            if "TUPLE" in opcode.name:
                value.plain = [each.plain for each in taken]
            stack += [value] * len(opcode.stack_after)
            if value.depth > _MAX_DEPTH:
                room = -1
        if room < 0:
            raise UnsupportedValueError(
                f"{what} is not read: it is nested too deep, or the same is in it too often", what
            )


def _check_storage(reference: Any, lengths: Mapping[str, int]) -> None:
    _, kind, key, _, count = reference
    length = lengths.get(f"data/{key}", 0)
    if type(key) is not str or type(count) is not int or not 0 <= count * _ITEMSIZES[kind] <= length:
        raise ValueError(f"it has {length} bytes for a storage of {str(count)[:20]} elements")
