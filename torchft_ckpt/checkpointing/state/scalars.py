"""Values of the standard library, numpy and torch that hold no others: each has a tag, and travels as JSON of its own.

It knows what stands for such a value and builds it by that value's own constructor, from numbers and text that were checked. It
knows no containers and no paths. The nodes are specified in `format`.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from torchft_ckpt.checkpointing.state.dtypes import DTYPES, dtype_name, parse_dtype

MAX_TEXT = 4096
_INT64 = range(-(2**63), 2**63)
_DEVICE = re.compile(r"\A[a-z_]{1,32}(:[0-9]{1,3})?\Z")
_NUMPY = {
    np.dtype(kind): np.dtype(kind).name
    for kind in (np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
} | {np.dtype(kind): np.dtype(kind).name for kind in (np.float16, np.float32, np.float64, np.complex64, np.complex128)}
_NUMPY_NAMES = {name: dtype for dtype, name in _NUMPY.items()}
_PURE: dict[str, type[PurePath]] = {"posix": PurePosixPath, "windows": PureWindowsPath}
_MICROSECOND = timedelta(microseconds=1)


def encode_scalar(value: Any) -> dict[str, object] | None:
    """Return the node of a value; None if it is of no class that is known here.

    Raises:
        ValueError: it is of one, but cannot be carried; the message continues "it".
    """
    if isinstance(value, np.generic):
        name = _NUMPY.get(value.dtype)
        return None if name is None else {"scalar": [name, value.tobytes().hex()]}
    found = _TAGS.get(type(value))
    return None if found is None else {found[0]: found[1](value)}


def decode_scalar(tag: str, content: Any) -> object:
    """Return the value of a node.

    Raises:
        ValueError, LookupError, ArithmeticError, TypeError, RuntimeError: there is no such tag, or its content is another one.
        StateFormatError: a dtype that this torch has not.
    """
    return _MAKERS[tag](content)


def _dtype(value: torch.dtype) -> str:
    if dtype_name(value) not in DTYPES:
        raise ValueError(f"is the dtype {value}")
    return dtype_name(value)


def _text(value: object) -> str:
    text = str(value)
    text.encode()  # or it is no Unicode, which is a ValueError
    if len(text) > MAX_TEXT:
        raise ValueError(f"has more than {MAX_TEXT} characters")
    return text


def _zone(zone: tzinfo | None) -> list[object] | None:
    """Only a fixed offset: the rules of a named zone are read from files, which no peer may choose."""
    if zone is None:
        return None
    if type(zone) is not timezone:
        raise ValueError(f"has the time zone {zone!r:.80}, which is no fixed offset (datetime.timezone)")
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]  # how it is copied, and the only way to its name
    return [offset // _MICROSECOND, _text(*name) if name else None]


def _bounds(value: range | slice) -> list[int | None]:
    bounds = [value.start, value.stop, value.step]
    if any(bound is not None and (type(bound) is not int or bound not in _INT64) for bound in bounds):
        raise ValueError(f"has bounds that are no integers of 64 bits: {value!r:.80}")
    return bounds


_TAGS: dict[type, tuple[str, Callable[[Any], object]]] = {
    complex: ("c", lambda value: struct.pack(">dd", value.real, value.imag).hex()),
    bytes: ("b", lambda value: base64.b64encode(value).decode()),
    bytearray: ("bytearray", lambda value: base64.b64encode(value).decode()),
    torch.Size: ("s", list),
    torch.dtype: ("y", _dtype),
    torch.device: ("device", str),
    date: ("date", lambda value: [value.year, value.month, value.day]),
    time: ("time", lambda value: [*_clock(value), _zone(value.tzinfo)]),
    datetime: ("datetime", lambda value: [value.year, value.month, value.day, *_clock(value), _zone(value.tzinfo)]),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    timezone: ("timezone", _zone),
    Decimal: ("decimal", _text),
    type(Path()): ("path", _text),
    PurePosixPath: ("purepath", lambda value: ["posix", _text(value)]),
    PureWindowsPath: ("purepath", lambda value: ["windows", _text(value)]),
    range: ("range", _bounds),
    slice: ("slice", _bounds),
}


def _clock(value: time | datetime) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


def _list(content: Any, *lengths: int) -> list[Any]:
    if type(content) is not list or len(content) not in lengths:
        raise ValueError(f"expected a list of {' or '.join(map(str, lengths))}")
    return content


def _ints(content: Any, length: int) -> list[int]:
    if any(type(item) is not int for item in _list(content, length)):
        raise ValueError("expected integers")
    return list(content)


def _str(content: Any, max_length: int = MAX_TEXT) -> str:
    if type(content) is not str or len(content) > max_length:
        raise ValueError(f"expected a text of at most {max_length} characters")
    return content


def _bytes(content: Any) -> bytes:
    if type(content) is not str:
        raise ValueError("expected base64")
    return base64.b64decode(content, validate=True)


def _make_complex(content: Any) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(_str(content, 32))))


def _make_size(content: Any) -> torch.Size:
    if type(content) is not list or any(type(size) is not int or not 0 <= size < 2**63 for size in content):
        raise ValueError("expected sizes")
    return torch.Size(content)


def _make_device(content: Any) -> torch.device:
    text = _str(content)
    if not _DEVICE.match(text) or str(device := torch.device(text)) != text:
        raise ValueError(f"this torch knows no device {text[:40]!r}")
    return device


def _make_zone(content: Any) -> timezone | None:
    if content is None:
        return None
    offset, name = _list(content, 2)
    if type(offset) is not int or offset not in _INT64:
        raise ValueError("expected microseconds")
    since = timedelta(microseconds=offset)
    return timezone(since) if name is None else timezone(since, _str(name))


def _make_fixed_zone(content: Any) -> timezone:
    zone = _make_zone(content)
    if zone is None:
        raise ValueError("expected a time zone")
    return zone


def _make_time(content: Any) -> time:
    hour, minute, second, microsecond, fold = _ints(_list(content, 6)[:5], 5)
    return time(hour, minute, second, microsecond, _make_zone(content[5]), fold=fold)


def _make_datetime(content: Any) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold = _ints(_list(content, 9)[:8], 8)
    return datetime(year, month, day, hour, minute, second, microsecond, _make_zone(content[8]), fold=fold)


def _make_timedelta(content: Any) -> timedelta:
    days, seconds, microseconds = _ints(content, 3)
    return timedelta(days=days, seconds=seconds, microseconds=microseconds)


def _make_purepath(content: Any) -> PurePath:
    flavour, text = _list(content, 2)
    return _PURE[_str(flavour)](_str(text))


def _make_range(content: Any) -> range:
    return range(*_ints(content, 3))


def _make_slice(content: Any) -> slice:
    if any(bound is not None and type(bound) is not int for bound in _list(content, 3)):
        raise ValueError("expected integers")
    return slice(*content)


def _make_scalar(content: Any) -> np.generic:
    name, data = _list(content, 2)
    dtype = _NUMPY_NAMES.get(_str(name))
    raw = bytes.fromhex(_str(data, 32))
    if dtype is None or len(raw) != dtype.itemsize or (name == "bool" and raw not in (b"\0", b"\1")):
        raise ValueError(f"no numpy scalar {name[:40]!r} of {len(raw)} bytes")
    return dtype.type(np.frombuffer(raw, dtype)[0])


_MAKERS: dict[str, Callable[[Any], object]] = {
    "c": _make_complex,
    "b": _bytes,
    "bytearray": lambda content: bytearray(_bytes(content)),
    "s": _make_size,
    "y": lambda content: parse_dtype(_str(content)),
    "device": _make_device,
    "date": lambda content: date(*_ints(content, 3)),
    "time": _make_time,
    "datetime": _make_datetime,
    "timedelta": _make_timedelta,
    "timezone": _make_fixed_zone,
    "decimal": lambda content: Decimal(_str(content)),
    "path": lambda content: Path(_str(content)),
    "purepath": _make_purepath,
    "range": _make_range,
    "slice": _make_slice,
    "scalar": _make_scalar,
}
SCALAR_TAGS = frozenset(_MAKERS)
