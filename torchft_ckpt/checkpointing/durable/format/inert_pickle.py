"""Reads a pickle without doing what it says: names of classes and functions stay names, and nothing is called, made or imported.

What a pickle describes comes back as plain values, and for everything else as `Made`: which class or function it names, with what
arguments and state. Whoever asked checks these and makes what it expects. Only names that the caller knows are let through;
pickles that use anything but the opcodes of plain values and of objects are refused.

Python's own unpickler, restricted to some classes, still sets attributes of these, calls them with any arguments, and takes
memory for a memo as large as the pickle says.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple


class Name(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module[:80]}.{self.name[:80]}"


class Made:
    """What calling a class or function would have made.

    Attributes:
        of: its name.
        arguments: what it would have been called with.
        state: what would have been set afterwards; None where nothing was.
        items: (key, value) pairs that would have been put into it.
    """

    __slots__ = ("arguments", "items", "of", "state")

    def __init__(self, of: Name, arguments: tuple[object, ...]) -> None:
        self.of = of
        self.arguments = arguments
        self.state: object = None
        self.items: list[tuple[object, object]] = []


class Mapping(list[tuple[object, object]]):
    """A dict, as its (key, value) pairs: nothing is hashed, because a hostile key may be nested without end."""

    __slots__ = ()


class Persistent(NamedTuple):
    """A reference to something outside of the pickle."""

    key: object


class InertPickleError(ValueError):
    """It is no pickle of plain values and objects that were allowed."""


_MAX_ALIKE = 64
"""Keys of one hash, of which each is compared with all others."""
_MARK = object()
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES")
_LITERALS = frozenset((*_NUMBERS, *_STRINGS))
_IGNORED = frozenset(("PROTO", "FRAME"))


def read_pickle(data: bytes, allowed: Collection[Name] | None) -> object:
    """Return what a pickle describes.

    Args:
        data: of protocols 2 to 5. What follows its end is ignored.
        allowed: the names of classes and functions that it may have; None: any, and the caller looks at each `Made`.

    Raises:
        InertPickleError: it is damaged, or has something else than plain values and these.
    """
    machine = _Machine(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.do(opcode.name, argument)
    except InertPickleError:
        raise
    except (ValueError, OverflowError) as error:  # of genops: no opcode, or one that is cut off
        raise InertPickleError(f"it is no pickle, or damaged: {str(error)[:200]}") from error
    return machine.result()


class _Machine:
    def __init__(self, allowed: Collection[Name] | None) -> None:
        self._allowed = allowed
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}
        self._actions: dict[str, Callable[[], None]] = {
            "EMPTY_LIST": lambda: self._stack.append([]),
            "EMPTY_DICT": lambda: self._stack.append(Mapping()),
            "MARK": lambda: self._stack.append(_MARK),
            "TUPLE": lambda: self._stack.append(tuple(self._above_mark())),
            "APPEND": lambda: self._append([self._pop()]),
            "APPENDS": lambda: self._append(self._above_mark()),
            "SETITEM": self._set_item,
            "SETITEMS": lambda: self._set_items(self._above_mark()),
            "MEMOIZE": lambda: self._remember(len(self._memo)),
            "STACK_GLOBAL": self._stack_global,
            "REDUCE": self._make,
            "NEWOBJ": self._make,
            "BUILD": self._build,
            "BINPERSID": lambda: self._stack.append(Persistent(self._pop())),
            "STOP": lambda: None,
        }

    def result(self) -> object:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise InertPickleError("it leaves no value, or several")
        return self._stack[0]

    def do(self, name: str, argument: object) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise InertPickleError("it refers to a value that it does not have")
            stack.append(self._memo[argument])
        elif name in _TUPLES:
            count = _TUPLES[name]
            values = [self._pop() for _ in range(count)]
            stack.append(tuple(reversed(values)))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._remember(argument)
        elif name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            self._name(module, attribute)
        elif name in self._actions:
            self._actions[name]()
        elif name not in _IGNORED:
            raise InertPickleError(f"it uses the opcode {name}")

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise InertPickleError("it takes a value that is not there")
        return self._stack.pop()

    def _above_mark(self) -> list[object]:
        values: list[object] = []
        stack = self._stack
        while stack:
            value = stack.pop()
            if value is _MARK:
                values.reverse()
                return values
            values.append(value)
        raise InertPickleError("it takes values from a mark that is not there")

    def _top(self) -> object:
        if not self._stack or self._stack[-1] is _MARK:
            raise InertPickleError("it changes a value that is not there")
        return self._stack[-1]

    def _remember(self, key: object) -> None:
        if not isinstance(key, int):
            raise InertPickleError("it remembers a value under no number")
        self._memo[key] = self._top()

    def _append(self, values: list[object]) -> None:
        target = self._top()
        if type(target) is not list:
            raise InertPickleError("it appends to what is no list")
        target += values

    def _set_item(self) -> None:
        value = self._pop()
        self._set_items([self._pop(), value])

    def _set_items(self, flat: list[object]) -> None:
        target = self._top()
        if len(flat) % 2:
            raise InertPickleError("it sets a key without a value")
        if not isinstance(target, (Made, Mapping)):
            raise InertPickleError("it sets items of what is no dict")
        items = target.items if isinstance(target, Made) else target
        items += zip(flat[::2], flat[1::2], strict=True)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise InertPickleError("it names a class by what is no name")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        found = Name(module, name)
        if self._allowed is not None and found not in self._allowed:
            raise InertPickleError(f"it names {found}, which has no place there; nothing was executed")
        self._stack.append(found)

    def _make(self) -> None:
        arguments, of = self._pop(), self._pop()
        if type(of) is not Name or type(arguments) is not tuple:
            raise InertPickleError("it calls what is no class")
        self._stack.append(Made(of, arguments))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if not isinstance(target, Made) or target.state is not None:
            raise InertPickleError("it sets the state of what is no new object")
        target.state = state


def check_hashes(hashes: Iterable[int], what: str) -> None:
    """See that a dict or set of what has these hashes is made in little time.

    Args:
        hashes: of its keys or elements.
        what: they are, for the error.

    Raises:
        InertPickleError: too many are alike.
    """
    if max(Counter(hashes).values(), default=0) > _MAX_ALIKE:
        raise InertPickleError(f"it has {what} that were chosen to have one hash")
