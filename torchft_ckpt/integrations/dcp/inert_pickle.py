"""Python's own unpickler, held to plain values: by itself it imports, calls and changes nothing.

A subclass says which classes and functions a pickle may name (`find_class`), and what becomes of a call of one (`make`) and of
the state of an object (`build`). Opcodes other than those of plain values and of objects are refused. A dict stays a list of
pairs, because a hostile key may be nested without end, or be chosen for its hash: a subclass looks at keys before it hashes them.

A `find_class` alone would not do. The unpickler would still set attributes of the classes that are let through, call them with
any arguments and hash any key. The one that is written in C would also take memory for a memo of 2**32 places.
"""

from __future__ import annotations

import io
import pickle
import struct
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar


class Pairs(list[tuple[object, object]]):
    """A dict, as its (key, value) pairs."""

    __slots__ = ()


class InertPickleError(ValueError):
    """It is no pickle of plain values and objects that were allowed."""


_MAX_ALIKE = 64
"""Keys of one hash, of which each is compared with all others."""
_AS_IN_PYTHON = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.SHORT_BINBYTES, pickle.BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
)
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
"""The exceptions that Python's unpickler raises on a crafted pickle."""


class InertUnpickler(pickle._Unpickler):
    """Reads one pickle.

    Args:
        data: of protocols 2 to 5. What follows its end is ignored.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def load(self) -> object:
        """Return what the pickle describes.

        Raises:
            InertPickleError: it is damaged, or has something else than plain values and what the subclass lets through.
        """
        try:
            loaded = super().load()
        except InertPickleError:
            raise
        except KeyError as error:
            raise InertPickleError(f"it uses the opcode {error}") from error
        except _DAMAGE as error:
            raise InertPickleError(f"it is no pickle, or damaged: {str(error)[:200]}") from error
        if self.stack or self.metastack:  # who looks at what is loaded would not see it
            raise InertPickleError("it leaves several values")
        return loaded

    @abstractmethod
    def find_class(self, module: str, name: str) -> object:
        """Return what stands for a class or function that the pickle names, or raise `InertPickleError`."""

    @abstractmethod
    def make(self, of: Any, arguments: tuple[object, ...]) -> object:
        """Return what stands for the result of a call, or raise `InertPickleError`.

        Args:
            of: what the pickle calls: any value of it, not only one that `find_class` returned.
            arguments: what it calls it with.
        """

    @abstractmethod
    def build(self, made: Any, state: object) -> None:
        """Take the state of an object, or raise `InertPickleError`.

        Args:
            made: any value of the pickle, not only one that `make` returned.
            state: what the pickle sets.
        """

    @abstractmethod
    def items_of(self, made: Any) -> Pairs | None:
        """Return the pairs to which items of a value that is no plain dict are added; None where it has no items."""

    def _make(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise InertPickleError("it calls something without arguments")
        self.stack[-1] = self.make(self.stack[-1], arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        self.build(self.stack[-1], state)

    def _append(self, values: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise InertPickleError("it appends to what is no list")
        target += values

    def _set_items(self, flat: list[object]) -> None:
        target = self.stack[-1]
        items = target if type(target) is Pairs else self.items_of(target)
        if items is None:
            raise InertPickleError("it sets items of what is no dict")
        items += zip(flat[::2], flat[1::2], strict=True)

    def _take(self, count: int) -> list[object]:
        return [self.stack.pop() for _ in range(count)][::-1]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _AS_IN_PYTHON},
        pickle.EMPTY_DICT[0]: lambda self: self.stack.append(Pairs()),
        pickle.APPEND[0]: lambda self: self._append(self._take(1)),
        pickle.APPENDS[0]: lambda self: self._append(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._set_items(self._take(2)),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.BUILD[0]: _build,
    }


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
