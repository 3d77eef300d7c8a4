"""Turns a state into a tree of JSON nodes plus a list of tensors, and back.

It knows Python values and the nodes that stand for them; it does not know where the bytes of a tensor lie. The nodes are
specified in `format`.
"""

from __future__ import annotations

import enum
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch

from torchft_ckpt.checkpointing.state.classes import KnownClasses, Unmade, is_named_tuple, name_of, refuse_unmade
from torchft_ckpt.checkpointing.state.dtypes import DTYPES
from torchft_ckpt.checkpointing.state.scalars import SCALAR_TAGS, decode_scalar, encode_scalar
from torchft_ckpt.errors import StateFormatError, UnsupportedValueError
from torchft_ckpt.memory import gc_paused

Node = object
MAX_DEPTH = 64
_MAX_INT_DIGITS = 4096
_MAX_ALIKE = 64
MAX_NAME = 200
MANY_LEAVES = 10_000
"""So many values that are no tensors cost whoever goes through a state a time that is felt."""
MAX_PATH_CHARS = 2**30
"""Of all leaves together: a state of 20,000 tensors has some million."""
_POSITION_CHARS = 4
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
FLAT = frozenset({bool, int, float, str, type(None)})
_INT64 = range(-(2**63), 2**63)
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple, Counter, OrderedDict, deque)
}
_FACTORY_NAMES = {kind: name for name, kind in _FACTORIES.items()}
_MAX_CLASS_NAME = 512


def is_flat(values: Iterable[object]) -> bool:
    """Whether these are plain values and nothing else. Whoever goes through a state asks for all at once, and takes such a list
    for one leaf: there may be millions of them.
    """
    return FLAT.issuperset(map(type, values))


class TreeEncoder:
    """Encodes one state. `tensors` holds (path, tensor) in the order in which the nodes refer to them.

    `arrays` are the places there of what are numpy arrays in the state, `copied_arrays` of those that do not share their tensor's
    memory. `classes` are the classes of named tuples and enum members, by their names, at each path; of a dict's keys and a set's
    elements at that of the dict or set.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.arrays: set[int] = set()
        self.copied_arrays: set[int] = set()
        self.classes: dict[str, dict[str, type]] = {}
        self.num_items = 0
        """Of all containers; a flat list counts as one."""

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
        if isinstance(value, torch.Tensor):
            return {"x": self._tensor(value, path)}
        if kind is list:
            return self._items(value, path, depth)  # type: ignore[arg-type]
        if kind is tuple:
            return {"t": self._items(value, path, depth)}  # type: ignore[arg-type]
        if kind is dict:
            return {"d": self._pairs(value, path, depth)}  # type: ignore[arg-type]
        if kind is OrderedDict:
            metadata = self.encode(getattr(value, "_metadata", None), join_path(path, "_metadata"), depth + 1)
            return {"o": [self._pairs(value, path, depth), metadata]}  # type: ignore[arg-type]
        if kind is np.ndarray:
            return {"a": self._array(value, path)}  # type: ignore[arg-type]
        return self._less_common(value, path, depth)

    def _less_common(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        if kind is Counter:
            return {"n": self._pairs(value, path, depth)}
        if kind is defaultdict:
            factory = value.default_factory
            if factory is not None and factory not in _FACTORY_NAMES:
                return {"d": self._pairs(value, path, depth)}
            return {"default": [_FACTORY_NAMES.get(factory), self._pairs(value, path, depth)]}
        if kind is deque:
            return {"deque": [value.maxlen, self._items(tuple(value), path, depth)]}
        if kind in (set, frozenset):
            return {kind.__name__: self._elements(value, path, depth)}
        if isinstance(value, enum.Enum):
            return {"enum": self._member(value, path)}
        if is_named_tuple(kind):
            return {"named": [self._class(kind, path), list(kind._fields), self._items(value, path, depth)]}
        try:
            node = encode_scalar(value)
        except ValueError as error:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: a {kind.__qualname__} that {error} cannot be carried", path
            ) from error
        if node is None:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: a {kind.__module__}.{kind.__qualname__} cannot be carried; "
                "put numbers, strings, tensors or containers of these there",
                path,
            )
        return node

    def _class(self, kind: type, path: str) -> str:
        name = name_of(kind)
        if len(name) > _MAX_CLASS_NAME:
            raise UnsupportedValueError(f"state dict{_at(path)}: the name of its class is too long", path)
        self.classes.setdefault(path, {})[name] = kind
        return name

    def _member(self, member: enum.Enum, path: str) -> list[Node]:
        kind = type(member)
        names = _flags_of(member) if isinstance(member, enum.Flag) else [member.name]
        if names is None:
            raise UnsupportedValueError(
                f"state dict{_at(path)}: {in_words(member, repr):.80} has bits without a name", path
            )
        return [self._class(kind, path), names, _value_of(member)]

    def _elements(self, values: Iterable[object], path: str, depth: int) -> list[Node]:
        """Return the nodes of a set's elements, in an order that follows from what they are."""
        is_simple = depth < MAX_DEPTH
        nodes = [i if is_simple and _is_node(i) else self._element(i, path, depth + 1) for i in tuple(values)]
        return sorted(nodes, key=None if {*map(type, nodes)} in ({int}, {str}) else repr)  # type: ignore[type-var, arg-type]

    def _element(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        if depth > MAX_DEPTH or isinstance(value, torch.Tensor):
            raise UnsupportedValueError(
                f"state dict{_at(path)}: a tensor in a set, or too deep, cannot be carried", path
            )
        if kind is tuple:
            return {"t": [self._element(item, path, depth + 1) for item in value]}
        if kind is frozenset:
            return {"frozenset": self._elements(value, path, depth)}
        if is_named_tuple(kind):
            items: list[Node] = [self._element(item, path, depth + 1) for item in value]
            return {"named": [self._class(kind, path), list(kind._fields), items]}
        return self.encode(value, path, depth)

    def _items(self, values: Sequence[Any], path: str, depth: int) -> list[Node]:
        self.num_items += 1 if is_flat(values) else len(values)
        is_simple = depth < MAX_DEPTH
        if is_simple and {*map(type, values)} == {int} and min(values) in _INT64 and max(values) in _INT64:
            return list(values)  # a permutation has millions
        return [
            item if is_simple and _is_node(item) else self.encode(item, join_path(path, index), depth + 1)
            for index, item in enumerate(values)
        ]

    def _pairs(self, mapping: dict[object, object], path: str, depth: int) -> list[Node]:
        pairs: list[Node] = []
        self.num_items += len(mapping)
        prefix = f"{path}." if path else ""
        is_shallow = depth < MAX_DEPTH
        for key, item in mapping.items():
            # Nearly everything in a large state is a tensor under a plain name, or a plain value: that is done in place.
            is_simple = is_shallow and type(key) is str and key.isascii() and len(key) <= MAX_NAME
            if is_simple and type(item) in _PLAIN_TENSORS:
                pairs.append([key, {"x": len(self.tensors)}])
                self.tensors.append((prefix + key, item))  # type: ignore[arg-type, operator]
            elif is_shallow and _is_node(item) and (is_simple or _is_node(key)):
                pairs.append([key, item])
            else:
                pairs.append([self._key(key, path), self.encode(item, join_path(path, key), depth + 1)])
        return pairs

    def _key(self, key: object, path: str) -> Node:
        if isinstance(key, tuple) and type(key) is tuple:
            return {"t": [self._key(item, path) for item in key]}
        if key is None or type(key) in (str, int, float, bool):
            return self.encode(key, path)
        raise UnsupportedValueError(
            f"state dict{_at(path)}: the key {in_words(key, repr):.80} is a {type(key).__qualname__}; "
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


def _is_node(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return -(2**63) <= value < 2**63
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool or (kind is str and value.isascii())


def _flags_of(member: enum.Flag) -> list[str] | None:
    """Return the names of the flags that make up a member; None if no names do."""
    kind, value = type(member), member.value
    names = [name for name, flag in kind.__members__.items() if flag.value and flag.value & value == flag.value]
    made = kind(0)
    for name in names:
        made |= kind[name]
    return names if made == member else None


def _value_of(member: enum.Enum) -> list[Node]:
    """Return the node of a member's value in a list, which is empty if that cannot be carried."""
    encoder = TreeEncoder()
    try:
        node = encoder.encode(member.value)
    except UnsupportedValueError:
        return []
    return [] if encoder.tensors or encoder.classes else [node]


Leaf = Callable[[object, bool], object]
"""Returns what is to stand where a tree refers to a tensor. It is called with the index that the tree has there, unchecked, and
with whether a numpy array of the tensor's memory is meant. It raises StateFormatError where there is no such tensor or array.
"""


class TensorPlace(torch.Tensor):
    """Stands for a tensor in a tree that is decoded without its tensors. It is empty; containers take it for a tensor."""

    number: int
    """Of the tensor among those that the tree refers to."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPlace:
    """Stands for a numpy array in such a tree."""

    number: int


def from_tensors(tensors: Sequence[torch.Tensor]) -> Leaf:
    """Have a decoded tree refer to these tensors, by their places."""

    def leaf(index: object, is_array: bool) -> object:
        tensor = tensors[_check_index(index, len(tensors))]
        return _as_array(tensor) if is_array else tensor

    return leaf


def as_places(num_tensors: int, known: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Leaf:
    """Have a decoded tree say which tensors belong where: a `TensorPlace` or an `ArrayPlace` stands for each.

    Args:
        known: tensors that are there already, by index; these stand for themselves.
    """

    def leaf(index: object, is_array: bool) -> object:
        number = _check_index(index, num_tensors)
        if number in known:
            return _as_array(known[number]) if is_array else known[number]
        return ArrayPlace(number) if is_array else _place(number)

    return leaf


@lru_cache(maxsize=1 << 16)
def _place(number: int) -> TensorPlace:
    """Return the place of one number, kept: a tree may refer to one tensor a million times, and is decoded several times."""
    place = torch.empty(0, device="cpu").as_subclass(TensorPlace)
    place.number = number
    return place


def decode_tree(node: Node, leaf: Leaf, classes: KnownClasses | None = None, *, is_lenient: bool = False) -> object:
    """Return the state that a tree of nodes stands for.

    Args:
        leaf: returns what stands where the tree refers to a tensor or an array: `from_tensors`, `as_places`.
        classes: what named tuples and enum members are made of. None: who only looks gets tuples for them, and plain values.
        is_lenient: leave an `Unmade` for those that cannot be made, where not all of the state is wanted.

    Raises:
        StateFormatError: a node breaks a rule of the format.
        StateMismatchError: there is no class for a named tuple or an enum.
    """
    decoder = _Decoder(leaf, classes)
    state = decoder.decode(node, 0)
    if not is_lenient:
        refuse_unmade(decoder.unmade, party="local_state")
    return state


def check_tree(node: Node, dtypes: Sequence[torch.dtype]) -> None:
    """Raise what `decode_tree` would raise, before any tensor is there. Every tensor must be referred to.

    Raises:
        StateFormatError: a node breaks a rule of the format.
    """
    _, path_chars = _measure(node, 0)
    if path_chars > MAX_PATH_CHARS:
        raise StateFormatError(
            f"the paths of the leaves have {path_chars} characters together, {MAX_PATH_CHARS} are allowed",
            party="source",
        )
    seen: set[int] = set()
    outline = from_tensors([_NOTHING[dtype] for dtype in dtypes])

    def note(index: object, is_array: bool) -> object:
        nothing = outline(index, is_array)
        seen.add(index)  # type: ignore[arg-type]  # it is an index
        return nothing

    _Decoder(note, None).decode(node, 0)
    if len(seen) != len(dtypes):
        raise StateFormatError(f"{len(dtypes) - len(seen)} tensors are in no place of the tree", party="source")


def _measure(node: Node, depth: int) -> tuple[int, int]:
    """Return how many leaves a node has, and about how many characters their paths have together. Nothing is put together.

    A long key above many leaves is short as JSON, and long for who names the leaves.
    """
    items: Any = node if isinstance(node, list) else ()
    is_dict = False
    if isinstance(node, dict) and len(node) == 1:
        tag, items = next(iter(node.items()))
        if tag in ("o", "default", "deque", "named") and isinstance(items, list) and items:
            items = items[0 if tag == "o" else -1]
        is_dict = tag in ("d", "n", "o", "default")
        if tag not in _CONTAINERS or not isinstance(items, list):
            return 1, 0
    if depth > MAX_DEPTH or not items:
        return 1, 0
    if not is_dict and is_flat(items):
        return len(items), len(items) * (_POSITION_CHARS + 1)
    num_leaves = num_chars = 0
    for item in items:
        length = _POSITION_CHARS
        if is_dict and isinstance(item, list) and len(item) == 2:
            key, item = item
            length = len(key) if isinstance(key, str) else len(repr(key))
        leaves, chars = _measure(item, depth + 1) if isinstance(item, (list, dict)) else (1, 0)
        num_leaves += leaves
        num_chars += chars + leaves * (length + 1)
    return num_leaves, num_chars


def check_classes(node: Node, dtypes: Sequence[torch.dtype], classes: KnownClasses) -> None:
    """See, before a byte is received, that all named tuples and enum members of a checked tree can be made.

    Raises:
        StateMismatchError: it says which cannot, by path.
    """
    decoder = _Decoder(from_tensors([_NOTHING[dtype] for dtype in dtypes]), classes)
    decoder.decode(node, 0)
    refuse_unmade(decoder.unmade, party="local_state")


def items_of_node(node: Node) -> list[tuple[object, Node]]:
    """Return the items of a checked container's node with their keys, or their places where it has none; of a leaf nothing.

    A set has none: its elements are no places of a state.
    """
    if isinstance(node, list):
        return list(enumerate(node))
    tag, content = next(iter(node.items())) if isinstance(node, dict) else ("", None)
    if tag in ("o", "default"):
        tag, content = "d", content[tag == "default"]  # type: ignore[index]
    elif tag in ("deque", "named"):
        tag, content = "t", content[-1]  # type: ignore[index]
    if tag in ("d", "n"):
        keys = _Decoder(_no_tensor, None)
        return [(keys.key(key, 0), item) for key, item in content]  # type: ignore[union-attr]
    return list(enumerate(content)) if tag == "t" else []  # type: ignore[arg-type]


def only_with(tree: Node, names: Collection[str]) -> Node:
    """Return a checked tree without the items of dicts that lead to none of these names, which are DCP's.

    A list stays whole, as its items have their places.
    """
    ways = {name[:end] for name in names for end, char in enumerate(name) if char == "."}
    keys = _Decoder(_no_tensor, None)

    def kept(node: Any, prefix: str) -> Node:
        tag, content = next(iter(node.items())) if isinstance(node, dict) else ("", [])
        if tag not in ("d", "o"):
            return node
        few = []
        for key, item in content if tag == "d" else content[0]:
            name = f"{prefix}{in_words(keys.key(key, 0))}"
            if name in names:
                few.append([key, item])
            elif name in ways:
                few.append([key, kept(item, f"{name}.")])
        return {tag: few if tag == "d" else [few, content[1]]}

    return kept(tree, "")


def values_of(node: Node, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the containers (as `...`) and leaves of a checked tree that are no tensors, by path; a flat list is one leaf."""
    items = [] if isinstance(node, list) and is_flat(node) else items_of_node(node)
    if not isinstance(node, dict) or node.keys().isdisjoint({"x", "a"}):
        yield path, ... if items else node
    for key, item in items:
        yield from values_of(item, join_path(path, key))


@gc_paused()
def largest_value(node: Node) -> str:
    """Return the path of the largest leaf of a checked tree, or of the container of many small ones."""
    path, size = "", len(msgspec.json.encode(node))
    while not (isinstance(node, list) and is_flat(node)) and (items := items_of_node(node)):
        num_bytes, number = max((len(msgspec.json.encode(item)), number) for number, (_, item) in enumerate(items))
        if 2 * num_bytes < size:
            break
        key, node = items[number]
        path, size = join_path(path, key), num_bytes
    return path


def plain_paths(node: Node, path: str = "") -> Iterator[str]:
    """Yield the paths of the leaves of a checked tree that are neither tensors nor arrays."""
    items = items_of_node(node)
    for key, item in items:
        yield from plain_paths(item, join_path(path, key))
    is_leaf = not isinstance(node, list) and not (isinstance(node, dict) and not node.keys().isdisjoint(_NOT_PLAIN))
    if not items and is_leaf:
        yield path


_CONTAINERS = frozenset({"t", "d", "n", "o", "default", "deque", "named"})
_NOT_PLAIN = _CONTAINERS | {"x", "a"}


class _Decoder:
    """Makes the values of one tree, and checks every rule of the format on the way.

    `unmade` is what no class was found for.
    """

    def __init__(self, leaf: Leaf, classes: KnownClasses | None) -> None:
        self._leaf = leaf
        self._classes = classes
        self._keys: list[object] = []
        self.unmade: list[Unmade] = []

    def decode(self, node: Node, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise StateFormatError(f"the tree is nested deeper than {MAX_DEPTH} levels", party="source")
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if isinstance(node, list):
            return self._items(node, depth)
        tag, content = _tagged(node)
        if tag == "x":
            return self._leaf(content, False)
        if tag == "a":
            return self._leaf(content, True)
        if tag == "t":
            return tuple(self._items(_list(content, tag), depth))
        if tag == "d":
            return self._pairs(_list(content, tag), depth)
        if tag == "o":
            pairs, metadata = _list(content, tag, 2)
            return _as_ordered(self._pairs(_list(pairs, tag), depth), self.decode(metadata, depth + 1))
        if tag == "n":
            return _as_counter(self._pairs(_list(content, tag), depth))
        if tag == "default":
            name, pairs = _list(content, tag, 2)
            return defaultdict(_factory(name), self._pairs(_list(pairs, tag), depth))
        if tag == "deque":
            length, items = _list(content, tag, 2)
            return _as_deque(self._items(_list(items, tag), depth), length)
        if tag == "set":
            return set(self._elements(_list(content, tag), depth))
        if tag == "named":
            return self._named(content, lambda items: self._items(items, depth))
        return self._plain(tag, content, depth)

    def _items(self, nodes: list[Node], depth: int) -> list[object]:
        if depth < MAX_DEPTH and is_flat(nodes):
            return list(nodes)
        keys = self._keys
        decoded: list[object] = []
        for index, item in enumerate(nodes):
            if depth < MAX_DEPTH and type(item) in FLAT:
                decoded.append(item)
                continue
            keys.append(index)
            decoded.append(self.decode(item, depth + 1))
            keys.pop()
        return decoded

    def _pairs(self, content: list[Node], depth: int) -> dict[object, object]:
        decoded: dict[object, object] = {}
        keys: list[object] = []
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2:
                raise StateFormatError("a dict entry is not a pair of key and value", party="source")
            keys.append(pair[0] if type(pair[0]) is str else self.key(pair[0], depth))
        _check_hashes([key for key in keys if type(key) is not str])
        for key, pair in zip(keys, content, strict=True):
            if key in decoded:
                raise StateFormatError(f"the key {in_words(key, repr):.80} appears twice in one dict", party="source")
            node = pair[1]  # type: ignore[index]  # it is a pair
            if type(node) in FLAT and depth < MAX_DEPTH:
                decoded[key] = node
            elif type(node) is dict and len(node) == 1 and "x" in node and depth < MAX_DEPTH:
                decoded[key] = self._leaf(node["x"], False)
            else:
                self._keys.append(key)
                decoded[key] = self.decode(node, depth + 1)
                self._keys.pop()
        return decoded

    def _elements(self, content: list[Node], depth: int) -> list[object]:
        is_plain = depth < MAX_DEPTH and is_flat(content)
        elements = content if is_plain else [self._element(node, depth + 1) for node in content]
        _check_hashes(elements)
        return elements

    def _element(self, node: Node, depth: int) -> object:
        tag, content = next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else ("", None)
        if tag == "t" and depth <= MAX_DEPTH:
            return tuple(self._element(item, depth + 1) for item in _list(content, tag))
        if tag == "named" and depth <= MAX_DEPTH:
            return self._named(content, lambda items: [self._element(item, depth + 1) for item in items])
        if tag == "enum" and self._classes is None:
            self._member(content, depth)
            name, members, _ = _list(content, tag, 3)
            return (name, *_list(members, tag))  # its value may be one that cannot be hashed
        if isinstance(node, list) or (tag and tag not in _HASHABLE_TAGS):
            raise StateFormatError(f"an element of a set has the tag {tag[:16]!r}", party="source")
        return self.decode(node, depth)

    def key(self, node: Node, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise StateFormatError(f"a key is nested deeper than {MAX_DEPTH} levels", party="source")
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        tag, content = _tagged(node)
        if tag == "t":
            return tuple(self.key(item, depth + 1) for item in _list(content, tag))
        if tag in ("f", "i"):
            return self._plain(tag, content, depth)
        raise StateFormatError(f"a key has the tag {tag[:16]!r}", party="source")

    def _plain(self, tag: str, content: object, depth: int) -> object:
        if tag == "frozenset":
            return frozenset(self._elements(_list(content, tag), depth))
        if tag == "enum":
            return self._member(content, depth)
        try:
            if tag == "f" and isinstance(content, str) and len(content) == 16:
                return struct.unpack(">d", bytes.fromhex(content))[0]
            if tag == "i" and isinstance(content, str) and len(content) <= _MAX_INT_DIGITS + 1:
                return int(content, 16)
            if tag in SCALAR_TAGS:
                return decode_scalar(tag, content)
        except (ValueError, LookupError, ArithmeticError, TypeError, RuntimeError, struct.error) as error:
            raise StateFormatError(f"the content of a {tag!r} node cannot be read: {error}", party="source") from error
        raise StateFormatError(f"unknown node: tag {tag[:16]!r} with a {type(content).__name__}", party="source")

    def _named(self, content: object, make: Callable[[list[Node]], list[object]]) -> object:
        name, fields, nodes = _list(content, "named", 3)
        names = _texts([name, *_list(fields, "named")], "named")
        values = make(_list(nodes, "named"))
        if len(values) != len(names) - 1:
            raise StateFormatError("a named tuple has another number of fields than of values", party="source")
        if self._classes is None:
            return tuple(values)
        return self._noted(self._classes.make_named(names[0], names[1:], values, self._path))

    def _member(self, content: object, depth: int) -> object:
        name, members, value = _list(content, "enum", 3)
        names = _texts([name, *_list(members, "enum")], "enum")
        values = _list(value, "enum")
        if len(values) > 1:
            raise StateFormatError("a member of an enum has several values", party="source")
        plain = _Decoder(_no_tensor, None).decode(values[0], depth + 1) if values else tuple(names[1:])
        if self._classes is None:
            return plain
        made = self._classes.make_member(names[0], names[1:], self._path)
        here = _value_of(made) if isinstance(made, enum.Enum) else []
        if values and here and repr(here) != repr(values):
            made = Unmade(
                self._path, f"{in_words(made, repr):.80} of another value than here: {in_words(plain, repr):.80}"
            )
        return self._noted(made)

    @property
    def _path(self) -> str:
        path = ""
        for key in self._keys:
            path = join_path(path, key)
        return path

    def _noted(self, made: object) -> object:
        if isinstance(made, Unmade):
            self.unmade.append(made)
        return made


_HASHABLE_TAGS = (SCALAR_TAGS - {"bytearray"}) | {"f", "i", "enum", "frozenset"}


def _no_tensor(index: object, is_array: bool) -> object:
    raise StateFormatError("a tensor is where none can be", party="source")


def _check_hashes(keys: Iterable[object]) -> None:
    # Hashes of numbers are no secret: many keys of one hash would make every look-up a search.
    try:
        hashes = [*map(hash, keys)]
    except TypeError as error:
        raise StateFormatError(f"a key or an element cannot be one: {error}", party="source") from error
    if len(hashes) > _MAX_ALIKE and max(Counter(hashes).values()) > _MAX_ALIKE:
        raise StateFormatError(f"more than {_MAX_ALIKE} keys of one dict or set have the same hash", party="source")


def _tagged(node: Node) -> tuple[str, object]:
    if not isinstance(node, dict) or len(node) != 1:
        raise StateFormatError("a tree node is not a plain value, a list or one tag", party="source")
    return next(iter(node.items()))


def _list(content: object, tag: str, length: int | None = None) -> list[Node]:
    if not isinstance(content, list) or (length is not None and len(content) != length):
        raise StateFormatError(f"the content of a {tag!r} node is not a list, or not of that length", party="source")
    return content


def _texts(content: list[Node], tag: str) -> list[str]:
    if not all(isinstance(text, str) and len(text) <= _MAX_CLASS_NAME for text in content):
        raise StateFormatError(f"a name in a {tag!r} node is none", party="source")
    return content  # type: ignore[return-value]


def _check_index(index: object, num_tensors: int) -> int:
    if type(index) is not int or not 0 <= index < num_tensors:
        raise StateFormatError(
            f"the tree refers to tensor {in_words(index, repr):.32}, there are {num_tensors}", party="source"
        )
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


def _as_ordered(pairs: dict[object, object], metadata: object) -> OrderedDict[object, object]:
    ordered = OrderedDict(pairs)
    if metadata is not None:
        if not isinstance(metadata, Mapping):
            raise StateFormatError("the metadata of an OrderedDict is no dict", party="source")
        ordered._metadata = metadata  # type: ignore[attr-defined]  # as torch's modules do
    return ordered


def _as_deque(items: list[object], length: object) -> deque[object]:
    if length is not None and (type(length) is not int or not len(items) <= length < 2**62):
        raise StateFormatError("a deque has more items than it takes", party="source")
    return deque(items, length)


def _factory(name: object) -> Callable[[], Any] | None:
    if name is not None and (not isinstance(name, str) or name not in _FACTORIES):
        raise StateFormatError(f"a defaultdict has the unknown factory {name!r:.40}", party="source")
    return None if name is None else _FACTORIES[name]


def join_path(path: str, key: object) -> str:
    """Return the path of what lies under a key of a container, or at a place of one. Long keys are cut, so paths are not long."""
    text = key if isinstance(key, str) else in_words(key)
    if len(text) > MAX_NAME or not text.isascii():
        text = text[:MAX_NAME].encode(errors="backslashreplace").decode()
    return f"{path}.{text}" if path else text


def in_words(value: object, write: Callable[[object], str] = str) -> str:
    """Return a value for a path, or with `repr` for a message; integers that Python does not write out (4300 digits) in hex."""
    try:
        return write(value)
    except ValueError:
        pass
    if isinstance(value, int):
        return f"{value:#x}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(in_words(item, repr) for item in value)})"
    return f"a {type(value).__name__} with very long integers"


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""
