"""Named tuples and enums travel as names and values; this file says which class a receiver makes of them.

It is the class that the receiver's own state has at that place, or one that was registered. No name that a source sent is ever
imported, or looked up anywhere else; a class of another make than the source's is not used.
"""

from __future__ import annotations

import enum
import functools
import operator
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchft_ckpt.errors import ConfigError, StateMismatchError

_Class = TypeVar("_Class", bound=type)
_NAMED = 5
_lock = threading.Lock()
_registered: dict[str, type] = {}


def register_state_class(kind: _Class) -> _Class:
    """Have named tuples or enum members of a class come back as what they were, wherever they are in a state, in this process.

    Not needed where the state that is here has one of that class at the same place, as in most healing; needed for lists that
    grow, for state that comes later, and for what is received with no state at hand. Use it as a decorator, or call it.

    Args:
        kind: a class of named tuples, or an enum. Sources name it by module and qualified name; of one name the latest counts.

    Returns:
        the class.

    Raises:
        ConfigError: it is neither.
    """
    if not (isinstance(kind, type) and (is_named_tuple(kind) or issubclass(kind, enum.Enum))):
        raise ConfigError(f"register_state_class: {kind!r:.80} is no class of named tuples and no enum", party="kind")
    with _lock:
        _registered[name_of(kind)] = kind
    return kind


def unregister_state_class(kind: type) -> None:
    """Take a class back. Without effect if it is not registered."""
    with _lock:
        if _registered.get(name_of(kind)) is kind:
            del _registered[name_of(kind)]


def name_of(kind: type) -> str:
    """Return by which name a class travels."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_named_tuple(kind: type) -> bool:
    """Whether it is a class of named tuples."""
    fields = getattr(kind, "_fields", None)
    return issubclass(kind, tuple) and type(fields) is tuple and all(type(field) is str for field in fields)


@dataclass(frozen=True, slots=True, eq=False)
class Unmade:
    """Stands for a named tuple or an enum member whose class is not here. Nobody is handed one but by mistake."""

    path: str
    reason: str


class KnownClasses:
    """The classes that a received state may be made of.

    Args:
        at: by path, the classes that the state here has at that place, by their names; what is registered counts everywhere.
    """

    def __init__(self, at: Mapping[str, Mapping[str, type]] | None = None) -> None:
        self._at = at or {}

    def make_named(self, name: str, fields: Sequence[str], values: Sequence[Any], path: str) -> object:
        """Return a named tuple; `Unmade` where there is no class for it that has these fields."""
        kind = self._find(name, path)
        if kind is None:
            return Unmade(path, f"a named tuple {name[:120]}{_ABSENT}")
        if not is_named_tuple(kind) or list(kind._fields) != list(fields):  # type: ignore[attr-defined]
            return Unmade(path, f"a named tuple {name[:120]} of {', '.join(fields)[:120]}, {_what(kind)} here")
        return tuple.__new__(kind, values)  # not by a constructor that somebody may have given it

    def make_member(self, name: str, members: Sequence[str], path: str) -> object:
        """Return a member of an enum, or of flags several together; `Unmade` where there is no class that has them."""
        kind = self._find(name, path)
        if kind is None:
            return Unmade(path, f"a member of the enum {name[:120]}{_ABSENT}")
        known = kind.__members__ if issubclass(kind, enum.Enum) else {}
        absent = [member for member in members if member not in known]
        is_flag = issubclass(kind, enum.Flag)
        if absent or (len(members) != 1 and not is_flag):
            return Unmade(path, f"{', '.join(absent or members)[:120]} of the enum {name[:120]}, {_what(kind)} here")
        found = [known[member] for member in members]
        return functools.reduce(operator.or_, found, kind(0)) if is_flag else found[0]

    def _find(self, name: str, path: str) -> type | None:
        here = self._at.get(path, {})
        if name in here:
            return here[name]
        if name in _registered:
            return _registered[name]
        return next(iter(here.values())) if len(here) == 1 else None


_ABSENT = ": the state here has none of it at this place, and it is not registered (register_state_class)"


def _what(kind: type) -> str:
    parts = kind.__members__ if issubclass(kind, enum.Enum) else getattr(kind, "_fields", ())
    return f"{kind.__qualname__[:120]} has {', '.join(parts)[:120]}"


def unmade_in(value: object) -> Iterator[Unmade]:
    """Yield what could not be made in a decoded state or a part of it."""
    if isinstance(value, Unmade):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from unmade_in(key)
            yield from unmade_in(item)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from unmade_in(item)


def refuse_unmade(unmade: Sequence[Unmade], party: str) -> None:
    """Raise if something could not be made.

    Raises:
        StateMismatchError: it says what, by path.
    """
    if unmade:
        more = f" and {len(unmade) - _NAMED} more" if len(unmade) > _NAMED else ""
        named = "; ".join(f"{each.path[:120] or 'the state'} is {each.reason}" for each in unmade[:_NAMED])
        raise StateMismatchError(f"{named}{more}; nothing was received", party=party)
