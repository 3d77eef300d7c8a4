"""Any message that can be read, made from the types of its fields: a field that is added later is tried without a word here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION
from torchft_ckpt.errors import ProtocolError

_SMALL = st.integers(0, 3)
_EPOCHS = st.sampled_from(["now", "now", "old"])
_IDS = st.sampled_from(["a:1", "a:2", "b:1", "c:1", "d" * 510 + ":1"])
_BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "protocol": st.sampled_from([PROTOCOL_VERSION] * 3 + [1]),
    "replica_id": _IDS,
    "epoch": _EPOCHS,
    "last_epoch": _EPOCHS,
    "store_address": st.sampled_from(["", "127.0.0.1:1"]),
    "standby_store_address": st.sampled_from(["", "127.0.0.1:1"]),
    "name": st.sampled_from(["model.a", "model.b", "n" * 64]),
    "is_sampled": st.booleans(),
    "approve": st.sampled_from([True, True, False]),
}
"""Fields whose values mean something only if others name the same."""


def any_message(
    messages: Any,
    decode: Callable[[str | bytes, str], Any],
    encode: Callable[[Any], str],
    **more: st.SearchStrategy[Any],
) -> st.SearchStrategy[Any]:
    """Return a strategy for those messages of a union that its decoder takes.

    Most values are small, so that what several say fits together; the others are the ends of what the type allows. `more`:
    strategies by name of field.
    """
    kind = inspect.type_info(messages)
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    built = st.one_of([_values(one, _BY_NAME | more) for one in kinds])

    def taken(message: Any) -> Any:
        try:
            return decode(encode(message), "a test")
        except ProtocolError:
            return None

    return built.map(taken).filter(lambda message: message is not None)


def _values(kind: inspect.Type, by_name: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType():
            least = kind.ge or 0
            most = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else 2**62)
            edges = [least, min(10**9, most), min(2**40, most), min(2**52, most), min(2**53 - 1, most), most]
            small = _SMALL.map(lambda number: max(least, min(number, most)))
            return small | small | small | st.sampled_from(edges)
        case inspect.FloatType():
            return st.sampled_from([0.0, 0.5, 0.5, kind.le if kind.le is not None else 1e9])
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return st.sampled_from(["", "x", "y", "x" * min(kind.max_length or 4096, 4096)])
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.NoneType():
            return st.none()
        case inspect.ListType():
            return st.lists(_values(kind.item_type, by_name), max_size=min(3, kind.max_length or 3))
        case inspect.TupleType():
            return st.tuples(*[_values(one, by_name) for one in kind.item_types])
        case inspect.DictType():
            values = _values(kind.value_type, by_name)
            return st.dictionaries(_values(kind.key_type, by_name), values, max_size=min(3, kind.max_length or 3))
        case inspect.UnionType():
            return st.one_of([_values(one, by_name) for one in kind.types])
        case inspect.StructType():
            return _struct(kind, by_name)
    raise NotImplementedError(f"no values are known for {kind}")


def _struct(kind: inspect.StructType, by_name: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    fields = {}
    for field in kind.fields:
        values = by_name[field.name] if field.name in by_name else _values(field.type, by_name)
        if not field.required:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            values = st.just(default) | st.just(default) | values
        fields[field.name] = values
    return (
        st.fixed_dictionaries(fields).map(lambda values: _built(kind.cls, values)).filter(lambda one: one is not None)
    )


def _built(kind: type, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except ValueError:  # fields that do not fit together, which decoding refuses, too
        return None
