"""Reads records that `torch.save` wrote, or anybody: by torch's unpickler for weights, and none that is more than it has.

`torch.load(weights_only=True)` executes nothing. But it calls what a pickle says, of a list of classes and functions:
`bytearray(2**40)` takes that memory, torch 2.7 reads beyond the bytes of a storage that is said to be longer, and a key that is
nested often enough is hashed for ever. So the pickle is read here first without doing what it says (`inert_pickle`), and each
call is compared with those that `torch.save` writes. Together they may stand for some times as many bytes as the record has.

torch is then given an archive that is made anew of what was looked at: two readers of a crafted zip file may find two contents.
Classes that a program allows by `torch.serialization.add_safe_globals` are called as torch does it, unchecked.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from torchft_ckpt.checkpointing.durable.format.records import ArchiveError, Entry, entries_of, record_problems
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.errors import CheckpointDamagedError, UnsupportedValueError
from torchft_ckpt.integrations.dcp.inert_pickle import (
    InertPickleError,
    InertUnpickler,
    Pairs,
    check_hashes,
)

_TIMES = 16
_FREE_BYTES = 64 * 1024
_MAX_KEY_DEPTH = 64
_COPIED = ("data.pkl", "byteorder", "version", ".format_version", ".storage_alignment", ".data/serialization_id")
_KEY = re.compile(r"\A[0-9]{1,9}\Z")
_ITEMSIZES = {
    **dict.fromkeys([f"torch.{kind}Storage" for kind in ("Char", "Byte", "Bool", "QInt8", "QUInt8")], 1),
    **dict.fromkeys([f"torch.{kind}Storage" for kind in ("QUInt4x2", "QUInt2x4")], 1),
    **dict.fromkeys([f"torch.{kind}Storage" for kind in ("Short", "Half", "BFloat16")], 2),
    **dict.fromkeys([f"torch.{kind}Storage" for kind in ("Int", "Float", "QInt32")], 4),
    **dict.fromkeys([f"torch.{kind}Storage" for kind in ("Long", "Double", "ComplexFloat")], 8),
    "torch.ComplexDoubleStorage": 16,
    "torch.storage.UntypedStorage": 1,
}
"""Bytes of an element of a storage, by its class."""
_TORCH_LOAD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The exceptions that `torch.load` raises on a crafted record."""
_REFUSED = re.compile(r"GLOBAL ([\w.]{1,200})")


def load_record(record: bytes, what: str) -> object:
    """Return what `torch.save` wrote, as far as `torch.load(weights_only=True)` takes it. Memory and time are proportional to
    it.

    Args:
        record: all of it.
        what: it is, for messages.

    Raises:
        CheckpointDamagedError: it is no record, is damaged, or stands for more than it has.
        UnsupportedValueError: it is whole, and needs a class that is not known to be harmless; the message names it.
    """
    problems = record_problems(record, what)
    if problems:
        raise CheckpointDamagedError(problems[0], what)
    try:
        archive = _bounded(record)
    except _UnknownCallError as error:
        raise _not_read(what, str(error)) from error
    except (ArchiveError, InertPickleError) as error:
        raise CheckpointDamagedError(f"{what} cannot be read: {error}", what) from error
    del record  # it may be large, and the archive has all of it that is needed
    try:
        return torch.load(archive, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = _REFUSED.search(str(error))
        raise _not_read(what, "more than weights" if named is None else named[1]) from error
    except _TORCH_LOAD_ERRORS as error:
        raise CheckpointDamagedError(f"{what} cannot be read: {str(error)[:200]}", what) from error


def _not_read(what: str, needed: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"{what} is not read, because it could execute code: it needs {needed}", what)


def _bounded(record: bytes) -> io.BytesIO:
    """Return a record anew, if what torch makes of it is bounded by what is there."""
    entries = entries_of(record)
    if "data.pkl" not in entries:
        raise ArchiveError("it has no data.pkl")
    checks = _Checks(entries, len(record))
    checks.run(_Unpickler(bytes(entries["data.pkl"].content)).load())
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name in (*_COPIED, *(f"data/{key}" for key in sorted(checks.keys))):
            if name in entries:
                file.writestr(f"archive/{name}", entries[name].content)
    archive.seek(0)
    return archive


class Name(NamedTuple):
    """A class or function, by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module[:80]}.{self.name[:80]}"


class Made:
    """The object that a call of a class or function would have made.

    Attributes:
        of: what the pickle calls.
        arguments: what it would have been called with.
        state: what would have been set afterwards; None where nothing was.
        items: what would have been put into it.
    """

    __slots__ = ("arguments", "items", "of", "state")

    def __init__(self, of: Name, arguments: tuple[object, ...]) -> None:
        self.of = of
        self.arguments = arguments
        self.state: object = None
        self.items = Pairs()


class Persistent(NamedTuple):
    """A reference to something outside of the pickle."""

    key: object


class _Unpickler(InertUnpickler):
    """Returns what a pickle describes, with each call and reference as what it is."""

    def find_class(self, module: str, name: str) -> Name:
        return Name(module, name)

    def persistent_load(self, pid: object) -> Persistent:
        return Persistent(pid)

    def make(self, of: Any, arguments: tuple[object, ...]) -> Made:
        if type(of) is not Name:
            raise InertPickleError("it calls what is no class")
        return Made(of, arguments)

    def build(self, made: Any, state: object) -> None:
        if type(made) is not Made or made.state is not None:
            raise InertPickleError("it sets the state of what is no new object")
        made.state = state

    def items_of(self, made: Any) -> Pairs | None:
        return made.items if type(made) is Made else None


class _UnknownCallError(ValueError):
    """A pickle calls what is not known to be harmless: the message is its name."""


class _Checks:
    """The value that a pickle of a record describes, looked at call by call.

    Args:
        entries: of the record.
        num_bytes: of the record.

    Attributes:
        keys: of the entries with data that it refers to.
    """

    def __init__(self, entries: Mapping[str, Entry], num_bytes: int) -> None:
        self.keys: set[str] = set()
        self._entries = entries
        self._room = _TIMES * num_bytes + _FREE_BYTES
        self._weights: dict[int, tuple[int, int]] = {}
        self._allowed_here = {_full_name(each) for each in torch.serialization.get_safe_globals()}

    def run(self, root: object) -> None:
        """Look at all that is reached from the root, each object once.

        Raises:
            InertPickleError: something is there that `torch.save` does not write, or it stands for too much.
            _UnknownCallError: it calls something else.
        """
        seen: set[int] = set()
        left = [root]
        while left:
            value = left.pop()
            if not isinstance(value, (list, tuple, Made)) or type(value) is Name or id(value) in seen:
                continue
            seen.add(id(value))  # alive, because the root holds it
            if isinstance(value, Made):
                self._check_call(value.of, value.arguments, value.state)
                self._check_keys([key for key, _ in value.items])
                left += [value.arguments, value.state, *(part for pair in value.items for part in pair)]
            elif isinstance(value, Persistent):
                self._check_storage(value.key)
            elif isinstance(value, Pairs):
                self._check_keys([key for key, _ in value])
                left += [part for pair in value for part in pair]
            else:
                left += value

    def _charge(self, num_bytes: int) -> None:
        self._room -= num_bytes
        if self._room < 0:
            raise InertPickleError("it stands for more than it has")

    def _check_call(self, of: Name, arguments: tuple[object, ...], state: object) -> None:
        for given in (*arguments, *(state if type(state) is tuple else (state,))):
            # Each call may copy them, however often they are referred to.
            self._charge(len(given) if isinstance(given, (str, bytes, list, tuple)) else 1)
        of = _today(of)
        full = f"{of.module}.{of.name}"
        is_known = full in _CALLS
        if not is_known and full not in self._allowed_here:
            raise _UnknownCallError(str(of))
        if is_known and not _CALLS[full](self, arguments):
            raise InertPickleError(f"it calls {full} with what torch.save does not write")
        if is_known and state is not None and full != "collections.OrderedDict":
            raise InertPickleError(f"it sets the state of a {full}")

    def _check_storage(self, key: object) -> None:
        """See that a storage has the bytes that it is said to have: torch does not look."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[1]) is not Name:
            raise InertPickleError("it refers to what is no storage")
        _, kind, number, device, count = key
        if (
            type(device) is not str
            or type(number) is not str
            or _KEY.match(number) is None
            or type(count) is not int
            or str(kind) not in _ITEMSIZES
        ):
            raise InertPickleError(f"it refers to a storage that torch.save does not write: {kind}")
        entry = self._entries.get(f"data/{number}")
        num_bytes = 0 if entry is None else len(entry.content)
        if not 0 <= count * _ITEMSIZES[str(kind)] <= num_bytes:
            raise InertPickleError(f"it has {num_bytes} bytes for a storage of {count} elements")
        self.keys.add(number)

    def _check_keys(self, keys: Iterable[object]) -> None:
        """See that a dict or set of these can be made in little time."""
        check_hashes((self._hash_of(key) for key in keys), "keys")

    def _hash_of(self, key: object) -> int:
        """Return a hash that is alike where those of two keys are, after charging what it costs to hash this one."""
        self._charge(self._weight(key, 0)[0])
        return hash(_shadow(key))

    def _weight(self, value: object, depth: int) -> tuple[int, int]:
        """Return how many values are hashed for one, and how deep they are nested."""
        if not isinstance(value, (tuple, Made)) or type(value) is Name:
            return 1, 0
        if depth > _MAX_KEY_DEPTH:
            raise InertPickleError("it has keys that are nested too deep")
        found = self._weights.get(id(value))
        if found is None:
            inner = (*value.arguments, *_members(value.state)) if isinstance(value, Made) else value
            parts = [self._weight(part, depth + 1) for part in inner]
            found = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
            self._weights[id(value)] = found
        if depth + found[1] > _MAX_KEY_DEPTH:
            raise InertPickleError("it has keys that are nested too deep")
        return found

    # Calls. Each returns whether the arguments are such as torch.save writes.

    def _is_text(self, arguments: Sequence[object]) -> bool:
        return len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1")

    def _is_bytes_or_nothing(self, arguments: Sequence[object]) -> bool:
        if not arguments:
            return True
        text = arguments[0]
        if len(arguments) != 1 or not isinstance(text, Made) or str(text.of) != "_codecs.encode":
            return False
        if not self._is_text(text.arguments):
            return False
        self._charge(len(cast("str", text.arguments[0])))
        return True

    def _is_list_of_keys(self, arguments: Sequence[object]) -> bool:
        if len(arguments) != 1 or type(arguments[0]) is not list:
            return False
        self._check_keys(arguments[0])
        return True

    def _are_literals(self, arguments: Sequence[object]) -> bool:
        return len(arguments) <= 2 and all(type(given) in (str, int, float) for given in arguments)

    def _is_view(self, arguments: Sequence[object]) -> bool:
        return len(arguments) >= 6 and type(arguments[0]) is Persistent and _volume(arguments[2]) is not None

    def _is_quantized(self, arguments: Sequence[object]) -> bool:
        if not self._is_view(arguments):
            return False
        self._charge(4 * cast("int", _volume(arguments[2])))  # it is made first, then becomes a view
        return True

    def _is_copy_of_view(self, arguments: Sequence[object]) -> bool:
        data, dtype = arguments[0] if arguments else None, arguments[1] if len(arguments) > 1 else None
        if not isinstance(data, Made) or str(data.of) not in _VIEWS or not self._is_view(data.arguments):
            return False
        known = DTYPES.get(dtype.name) if type(dtype) is Name else None
        self._charge((16 if known is None else known.itemsize) * cast("int", _volume(data.arguments[2])))
        return True

    def _is_subclass(self, arguments: Sequence[object]) -> bool:
        if len(arguments) != 4 or type(arguments[0]) is not Name or type(arguments[2]) is not tuple:
            return False
        if _CALLS.get(f"{arguments[0].module}.{arguments[0].name}") is _Checks._is_subclass:
            return False  # of itself, without an end
        self._check_call(arguments[0], arguments[2], None)
        return True


_VIEWS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_WITHOUT_ELEMENTS = (
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
    *("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor"),
    *("torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass"),
    "torch._utils._rebuild_device_tensor_from_numpy",
)
"""They take no memory for elements."""
_CALLS: dict[str, Callable[[_Checks, Sequence[object]], bool]] = {
    "_codecs.encode": _Checks._is_text,
    "builtins.bytearray": _Checks._is_bytes_or_nothing,
    "builtins.set": _Checks._is_list_of_keys,
    "builtins.complex": _Checks._are_literals,
    "collections.OrderedDict": lambda _, given: not given,
    "collections.Counter": lambda _, given: not given or (len(given) == 1 and type(given[0]) is Pairs),
    "torch.Size": lambda _, given: len(given) == 1 and _volume(given[0]) is not None,
    "torch.device": _Checks._are_literals,
    "torch.serialization._get_layout": _Checks._are_literals,
    **dict.fromkeys(_VIEWS, _Checks._is_view),
    "torch._utils._rebuild_qtensor": _Checks._is_quantized,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Checks._is_copy_of_view,
    "torch._tensor._rebuild_from_type_v2": _Checks._is_subclass,
    **dict.fromkeys(_WITHOUT_ELEMENTS, lambda *_: True),
}
"""The calls of `torch.save` for when a value is loaded. torch allows more: storages and tensors of any length, to begin with."""


def _volume(dims: object) -> int | None:
    """Return how many elements a shape has; None where it is none."""
    if isinstance(dims, Made) and dims.of == Name("torch", "Size") and len(dims.arguments) == 1:
        dims = dims.arguments[0]
    if type(dims) is not tuple or not all(type(size) is int and 0 <= size < 2**62 for size in dims):
        return None
    return math.prod(dims) if len(dims) <= 64 else None


def _shadow(value: object) -> object:
    """Return something hashable whose hashes are alike where those of what a key stands for are."""
    if isinstance(value, Made):
        return (value.of, *map(_shadow, value.arguments), *map(_shadow, _members(value.state)))
    if type(value) is tuple:
        return tuple(map(_shadow, value))
    return id(value) if isinstance(value, (list, Persistent)) else value


def _members(state: object) -> Sequence[object]:
    """Return what a program's own class may hash: its attributes, which are pairs; of one with slots, in a tuple with these."""
    parts = state if type(state) is tuple else (state,)
    return [member for part in parts for member in (part if isinstance(part, Pairs) else (part,))]


def _today(of: Name) -> Name:
    """Return the name that Python 3 has for what protocol 2, which `torch.save` writes, calls by Python 2's."""
    if (of.module, of.name) in NAME_MAPPING:
        return Name(*NAME_MAPPING[of.module, of.name])
    return Name(IMPORT_MAPPING.get(of.module, of.module), of.name)


def _full_name(allowed: object) -> str:
    if isinstance(allowed, tuple):
        return str(allowed[1])
    return f"{getattr(allowed, '__module__', '')}.{getattr(allowed, '__qualname__', '')}"
