"""Turns a state into a tree of JSON nodes plus a list of tensors, and back.

It knows Python values and the nodes that stand for them; it does not know where the bytes of a tensor lie. The nodes are
specified in `format`.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from torchft_ckpt.checkpointing.state.dtypes import DTYPES, dtype_name, parse_dtype
from torchft_ckpt.errors import StateFormatError, UnsupportedValueError

Node = object
MAX_DEPTH = 64
_MAX_INT_DIGITS = 4096
_MAX_ALIKE = 64
MAX_NAME = 200
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_INT64 = range(-(2**63), 2**63)
_DICTS = (dict, OrderedDict, defaultdict)


class TreeEncoder:
    """Encodes one state. `tensors` holds (path, tensor) in the order in which the nodes refer to them.

    `arrays` are the places there of what are numpy arrays in the state, `copied_arrays` of those that do not share their tensor's
    memory.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.arrays: set[int] = set()
        self.copied_arrays: set[int] = set()

    def encode(self, value: object, path: str = "", depth: int = 0) -> Node:
        """Return the node of a value.

        Raises:
            UnsupportedValueError: something in it cannot be carried; the message has its path.
        """
        if depth > MAX_DEPTH:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: nested deeper than {MAX_DEPTH} levels (a container that holds itself?)", path
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            return value if value in _INT64 else self._big_int(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}  # type: ignore[arg-type]
        if kind is complex:
            return {"c": struct.pack(">dd", value.real, value.imag).hex()}  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor):
            return {"x": self._tensor(value, path)}
        if kind is list:
            return self._items(value, path, depth)  # type: ignore[arg-type]
        if kind is tuple:
            return {"t": self._items(value, path, depth)}  # type: ignore[arg-type]
        if kind in _DICTS:
            return {"d": self._pairs(value, path, depth)}  # type: ignore[arg-type]
        if kind is Counter:
            return {"n": self._pairs(value, path, depth)}  # type: ignore[arg-type]
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}  # type: ignore[arg-type]
        if kind is torch.Size:
            return {"s": list(value)}  # type: ignore[call-overload]
        if kind is torch.dtype:
            if dtype_name(value) not in DTYPES:
                raise UnsupportedValueError(f"state dict{_at(path)}: dtype {value} cannot be carried", path)
            return {"y": dtype_name(value)}
        if kind is np.ndarray:
            return {"a": self._array(value, path)}  # type: ignore[arg-type]
        if isinstance(value, (np.floating, np.integer, np.bool_)) and value.dtype.itemsize <= 8:
            return self.encode(value.item(), path, depth)
        raise UnsupportedValueError(
            f"state dict{_at(path)}: a {kind.__module__}.{kind.__qualname__} cannot be carried; "
            "put numbers, strings, tensors or containers of these there",
            path,
        )

    def _items(self, values: Sequence[object], path: str, depth: int) -> list[Node]:
        return [self.encode(item, _join(path, index), depth + 1) for index, item in enumerate(values)]

    def _pairs(self, mapping: dict[object, object], path: str, depth: int) -> list[Node]:
        pairs: list[Node] = []
        prefix = f"{path}." if path else ""
        is_shallow = depth < MAX_DEPTH
        for key, item in mapping.items():
            # Nearly everything in a large state is a tensor under a plain name: that is done in place.
            if (
                type(key) is str
                and key.isascii()
                and len(key) <= MAX_NAME
                and is_shallow
                and type(item) in _PLAIN_TENSORS
            ):
                pairs.append([key, {"x": len(self.tensors)}])
                self.tensors.append((prefix + key, item))  # type: ignore[arg-type]
            else:
                pairs.append([self._key(key, path), self.encode(item, _join(path, key), depth + 1)])
        return pairs

    def _key(self, key: object, path: str) -> Node:
        if isinstance(key, tuple) and type(key) is tuple:
            return {"t": [self._key(item, path) for item in key]}
        if key is None or type(key) in (str, int, float, bool):
            return self.encode(key, path)
        raise UnsupportedValueError(
            f"state dict{_at(path)}: the key {key!r:.80} is a {type(key).__qualname__}; "
            "keys can be str, int, float, bool, None or tuples of these",
            path,
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        self.tensors.append((path, tensor))
        return len(self.tensors) - 1

    def _array(self, array: np.ndarray, path: str) -> int:
        if not array.dtype.isnative or array.dtype.hasobject:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: a numpy array of {array.dtype} cannot be carried", path
            )
        usable = array if array.flags.c_contiguous and array.flags.writeable else array.copy(order="C")
        try:
            tensor = torch.from_numpy(usable)
        except TypeError as error:
            message = f"state dict{_at(path)}: a numpy array of {array.dtype} cannot be carried"
            raise UnsupportedValueError(message, path) from error
        self.arrays.add(len(self.tensors))
        if usable is not array:
            self.copied_arrays.add(len(self.tensors))
        return self._tensor(tensor, path)

    def _text(self, text: object, path: str) -> str:
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: a string that is not valid Unicode: {error}", path
            ) from error
        return str(text)

    def _big_int(self, value: object, path: str) -> Node:
        digits = f"{value:x}"
        if len(digits) > _MAX_INT_DIGITS:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: an integer of more than {_MAX_INT_DIGITS} hex digits cannot be carried", path
            )
        return {"i": digits}


def decode_tree(node: Node, tensors: Sequence[torch.Tensor]) -> object:
    """Return the state that a tree of nodes stands for.

    Args:
        node: the tree as JSON values.
        tensors: what the `x` and `a` nodes refer to.

    Raises:
        StateFormatError: a node breaks a rule of the format.
    """
    return _decode(node, 0, lambda index: tensors[_check_index(index, len(tensors))])


def check_tree(node: Node, dtypes: Sequence[torch.dtype]) -> None:
    """Raise what `decode_tree` would raise, before any tensor is there. Every tensor must be referred to.

    Args:
        node: the tree as JSON values.
        dtypes: of the tensors.

    Raises:
        StateFormatError: a node breaks a rule of the format.
    """
    num_tensors = len(dtypes)
    seen: set[int] = set()

    def note(index: object) -> torch.Tensor:
        checked = _check_index(index, num_tensors)
        seen.add(checked)
        return _NOTHING[dtypes[checked]]

    _decode(node, 0, note)
    if len(seen) != num_tensors:
        raise StateFormatError(f"{num_tensors - len(seen)} tensors are in no place of the tree", party="source")


def plain_paths(node: Node, path: str = "") -> Iterator[str]:
    """Yield the paths of the leaves of a checked tree that are neither tensors nor arrays."""
    if isinstance(node, list):
        tag, items = "t", node
    elif isinstance(node, dict):
        tag, items = next(iter(node.items()))
    else:
        tag, items = "", []
    if tag == "t":
        for index, item in enumerate(items):
            yield from plain_paths(item, _join(path, index))
    elif tag in ("d", "n"):
        for key, item in items:
            yield from plain_paths(item, _join(path, _decode_key(key, 0)))
    elif tag not in ("x", "a"):
        yield path


def _decode(node: Node, depth: int, tensor_of: Callable[[object], torch.Tensor]) -> object:
    if depth > MAX_DEPTH:
        raise StateFormatError(f"the tree is nested deeper than {MAX_DEPTH} levels", party="source")
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, list):
        return [_decode(item, depth + 1, tensor_of) for item in node]
    tag, content = _tagged(node)
    if tag == "x":
        return tensor_of(content)
    if tag == "a":
        return _as_array(tensor_of(content))
    if tag == "t":
        return tuple(_decode(item, depth + 1, tensor_of) for item in _list(content, tag))
    if tag in ("d", "n"):
        pairs = _decode_pairs(_list(content, tag), depth, tensor_of)
        return pairs if tag == "d" else _as_counter(pairs)
    return _decode_scalar(tag, content)


def _decode_pairs(content: list[Node], depth: int, tensor_of: Callable[[object], torch.Tensor]) -> dict[object, object]:
    decoded: dict[object, object] = {}
    hashes: Counter[int] = Counter()
    for pair in content:
        if not isinstance(pair, list) or len(pair) != 2:
            raise StateFormatError("a dict entry is not a pair of key and value", party="source")
        key = pair[0]
        if type(key) is not str:
            key = _decode_key(key, depth)
            # Hashes of numbers are no secret: many keys of one hash would make every look-up a search.
            hashes[hash(key)] += 1
            if hashes[hash(key)] > _MAX_ALIKE:
                raise StateFormatError(f"more than {_MAX_ALIKE} keys of one dict have the same hash", party="source")
        if key in decoded:
            raise StateFormatError(f"the key {key!r:.80} appears twice in one dict", party="source")
        node = pair[1]
        if type(node) is dict and len(node) == 1 and "x" in node and depth < MAX_DEPTH:
            decoded[key] = tensor_of(node["x"])
        else:
            decoded[key] = _decode(node, depth + 1, tensor_of)
    return decoded


def _decode_key(node: Node, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise StateFormatError(f"a key is nested deeper than {MAX_DEPTH} levels", party="source")
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    tag, content = _tagged(node)
    if tag == "t":
        return tuple(_decode_key(item, depth + 1) for item in _list(content, tag))
    if tag in ("f", "i"):
        return _decode_scalar(tag, content)
    raise StateFormatError(f"a key has the tag {tag[:16]!r}", party="source")


def _decode_scalar(tag: str, content: object) -> object:
    try:
        if tag == "f" and isinstance(content, str) and len(content) == 16:
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if tag == "c" and isinstance(content, str) and len(content) == 32:
            return complex(*struct.unpack(">dd", bytes.fromhex(content)))
        if tag == "i" and isinstance(content, str) and len(content) <= _MAX_INT_DIGITS + 1:
            return int(content, 16)
        if tag == "b" and isinstance(content, str):
            return base64.b64decode(content, validate=True)
    except (ValueError, struct.error, binascii.Error) as error:
        raise StateFormatError(f"the content of a {tag!r} node cannot be read: {error}", party="source") from error
    if tag == "y" and isinstance(content, str):
        return parse_dtype(content)
    if tag == "s" and isinstance(content, list) and all(type(n) is int and 0 <= n < 2**63 for n in content):
        return torch.Size(content)
    raise StateFormatError(f"unknown node: tag {tag[:16]!r} with a {type(content).__name__}", party="source")


def _tagged(node: Node) -> tuple[str, object]:
    if not isinstance(node, dict) or len(node) != 1:
        raise StateFormatError("a tree node is not a plain value, a list or one tag", party="source")
    return next(iter(node.items()))


def _list(content: object, tag: str) -> list[Node]:
    if not isinstance(content, list):
        raise StateFormatError(f"the content of a {tag!r} node is not a list", party="source")
    return content


def _check_index(index: object, num_tensors: int) -> int:
    if type(index) is not int or not 0 <= index < num_tensors:
        raise StateFormatError(f"the tree refers to tensor {index!r:.32}, there are {num_tensors}", party="source")
    return index


def _nothing_of_each_dtype() -> dict[torch.dtype, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dtypes that torch calls experimental
        return {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in DTYPES.values()}


_NOTHING = _nothing_of_each_dtype()
"""Made here, not where it is needed: threads must not touch the filters of warnings, which are the process's."""


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError as error:
        raise StateFormatError(
            f"an array has dtype {tensor.dtype}, which numpy does not know", party="source"
        ) from error


def _as_counter(pairs: dict[object, object]) -> Counter[object]:
    counter: Counter[object] = Counter()
    for key, count in pairs.items():
        counter[key] = count  # type: ignore[assignment]  # a Counter holds whatever it was given
    return counter


def _join(path: str, key: object) -> str:
    text = str(key)[:MAX_NAME].encode(errors="backslashreplace").decode()
    return f"{path}.{text}" if path else text


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""
