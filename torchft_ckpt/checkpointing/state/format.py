"""The state format, version 4: a JSON manifest, then one space of raw bytes. Nothing in it is ever executed.

This file specifies the format, writes manifests and checks those of others. It does not know how bytes travel.

Manifest
--------
UTF-8 JSON, one object with exactly these members:

- `format`: the string `torchft_ckpt.state`. `version`: 4. A reader MUST refuse another version before it looks further.
- `step`: the step that this state is the state of. `snapshot`: 1 to 64 of `[0-9A-Za-z._-]`, different for each serving.
- `block_bytes`: length of a block, 4 KiB to 64 MiB. `total_bytes`: length of the byte space.
- `segments`: list of `[offset, length]`, in order. Each MUST start at the end of the one before, rounded up to 64 (the first
  at 0). The last MUST end at `total_bytes`. So they neither overlap nor leave holes; the padding between them is zeros.
- `tensors`: list of `{fqn, dtype, shape, chunks}`. `fqn` is the path in the tree, for people. `dtype` is torch's name.
  `shape` is the global shape. `chunks` are the boxes of it that the source holds: one, the whole, of a tensor that is not
  sharded; of a sharded one those of this process, which may be none. No two of them MAY share an element. A DTensor has
  `layout`
  as well: `{device, mesh, names, placements, stride}`, what `shards.MeshLayout` says. A receiver uses it where its own state
      has
  no tensor of that name, and only with a mesh of its own on which this rank's part is just these chunks.
- a chunk: `{offsets, sizes, segment, byte_offset, strides}`. The box MUST lie within the global shape. Its bytes start
  `byte_offset` into the segment, which MUST be a multiple of the item size. Where `strides` is null they are little-endian
  items in C order; else they are addressed with these strides (in items, not negative), and the box MUST NOT have more bytes
  than the segment. Every addressed byte MUST lie within the segment. Chunks of one segment share memory (tied weights,
  views), and the receiver MUST tie them again. Each segment MUST be reached by a chunk to its very last byte.
- `elsewhere`: null or absent, or `{hosts, key}`: up to 8 further IP addresses, as text, none twice, at which the server of this
  state listens on the port that it was asked at, and 32 hex digits by which it proves there that it is that server (`protocol`).
  They MUST NOT be of loopback, link-local, multicast or unspecified. A receiver MUST have it prove that before it sends more.
- `tree`: a node. Every tensor MUST be referred to by it, and at most 64 levels nest. The paths of all leaves MUST NOT have more
  than 2**30 characters together; a position counts for 4.

A node is null, a boolean, a JSON integer, a finite JSON number with a fraction or exponent (a float), a string, an array of
nodes (a list), or an object with exactly one member:

- containers: `t` array of nodes: tuple. `d` array of `[key, node]` pairs: dict, no key twice; `n` the same: Counter. `o`
  `[pairs, node]`: OrderedDict, with the `_metadata` that torch's modules give theirs, or null. `default` `[name, pairs]`:
  defaultdict; the name is null or that of a built-in type or container (`tree` lists them). `deque` `[maxlen or null, nodes]`.
- `set`, `frozenset`: array of elements, without tensors in them. Those that are equal count once.
- tensors: `x` index: tensor; `a` index: numpy array.
- numbers: `i` hex digits: an integer outside 64 bits; `f` 16 hex digits: the IEEE bits of a float that is not finite; `c` 32
  hex
  digits: a complex number; `scalar` `[dtype, hex of its little-endian bytes]`: a numpy scalar; `decimal` text.
- bytes in base64: `b` bytes, `bytearray`.
- times: `date` `[year, month, day]`; `time` `[hour, minute, second, microsecond, fold, zone]`; `datetime` both together;
  `timedelta` `[days, seconds, microseconds]`; `timezone` a zone. A zone is null or `[microseconds, name or null]`.
- of torch: `s` integers: torch.Size; `y` dtype name: torch.dtype; `device` text: torch.device.
- others: `path` text: the receiver's `pathlib.Path`; `purepath` `["posix" or "windows", text]`; `range`, `slice` of three
  integers, or null in a slice.
- `named` `[class, fields, nodes]`: a named tuple. `enum` `[class, members, [node] or []]`: a member of an enum, or the flags
  that one is made of, with its value where that can be carried.

A key is null, boolean, number, string, `i`, `f`, or `t` of keys. An element is a node that is hashable: no list, dict or
bytearray, nor `t`, `named` or `frozenset` with one in it.

The class of `named` and `enum` is a name. A receiver MUST NOT import it, nor look it up anywhere but in what it has: the class
that its own state has at that place, else one that was registered (`classes`). If there is none, or it has other fields or
members or another value, the state is refused before its bytes are received. Who only looks at a state takes tuples and plain
values.

What changes on the way: `Parameter` arrives as tensor, a `defaultdict` with a function of one's own as `dict`, an expanded view
as a tensor of its own; memory on an accelerator arrives on the CPU. A tensor that is sharded arrives with the layout of the one
of that name that is here, or as a DTensor on a mesh of that shape, or is refused. All else arrives equal in type and every bit.

Byte space
----------
`total_bytes` bytes in blocks of `block_bytes`, the last one shorter. A block is verified by its xxh3_128 digest (canonical,
big-endian, 16 bytes) with the block's index as seed. A receiver MUST NOT use a block that does not verify. It MUST verify a
block that it has of anybody else than the source of the manifest by the BLAKE3 digest (32 bytes) that this source announces.

A writer MAY send bytes that lie between overlapping views of one storage. A reader MAY limit the size of the manifest and
of the byte space, and MUST check all of the above before it allocates memory for the byte space.
"""

from __future__ import annotations

import sys
from itertools import combinations
from math import prod
from typing import Annotated

import msgspec

from torchft_ckpt.checkpointing.state.blocks import MAX_BLOCK_BYTES, MIN_BLOCK_BYTES
from torchft_ckpt.checkpointing.state.dtypes import dtype_name, parse_dtype
from torchft_ckpt.checkpointing.state.shards import MeshLayout
from torchft_ckpt.checkpointing.state.space import ALIGN_BYTES, PlacedTensor, Space
from torchft_ckpt.checkpointing.state.tree import check_tree
from torchft_ckpt.core.boxes.geometry import are_told_apart
from torchft_ckpt.core.services.interfaces import MAX_FURTHER, may_be_tried
from torchft_ckpt.errors import StateFormatError, UnsupportedValueError
from torchft_ckpt.memory import gc_paused

MAX_MANIFEST_BYTES = 64 * 1024 * 1024
"""The longest that a receiver takes unless it is told otherwise: of some three hundred thousand tensors."""
FORMAT_NAME = "torchft_ckpt.state"
FORMAT_VERSION = 4
MAX_DIMS = 64
MAX_CHUNKS = 64
"""Boxes of one tensor in one process: as many as it has devices, at most."""
MAX_TIED = 4
"""Tensors of several boxes may be tied; put together, each of them takes memory of its own."""
MAX_COMPARISONS = 4_000_000
"""Of two boxes in one dimension, over a manifest: a second or two of work. Boxes that one dimension tells apart need none."""
MAX_CONTAINERS = 4_000_000
"""Of JSON: an empty list of 3 bytes costs some hundred in memory, so the length of a manifest alone is no bound."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Dims = Annotated[list[Count], msgspec.Meta(max_length=MAX_DIMS)]


class Chunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One box of a tensor and where its bytes are."""

    offsets: _Dims
    sizes: _Dims
    segment: Count
    byte_offset: Count
    strides: _Dims | None


class WireTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """One tensor: its name, dtype, global shape, the chunks that the source holds, and how it is sharded if it is a DTensor."""

    fqn: str
    dtype: str
    shape: _Dims
    chunks: Annotated[list[Chunk], msgspec.Meta(max_length=MAX_CHUNKS)]
    layout: MeshLayout | None = None


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Further hosts of the server of a state, and the key by which it proves itself there."""

    hosts: Annotated[list[Annotated[str, msgspec.Meta(max_length=45)]], msgspec.Meta(max_length=MAX_FURTHER)]
    key: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a state but its bytes."""

    format: str
    version: int
    step: Count
    snapshot: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z._-]{1,64}\Z")]
    block_bytes: Annotated[int, msgspec.Meta(ge=MIN_BLOCK_BYTES, le=MAX_BLOCK_BYTES)]
    total_bytes: Count
    segments: list[tuple[Count, Count]]
    tensors: list[WireTensor]
    elsewhere: Elsewhere | None = None
    tree: object


class _StateHeader(msgspec.Struct):
    format: str
    version: int


# Made here, on one thread: msgspec looks at a class when it first decodes one, and two threads that do so at once crash it.
_decode_manifest = msgspec.json.Decoder(Manifest).decode
_decode_header = msgspec.json.Decoder(_StateHeader).decode


def build_manifest(
    *, step: int, snapshot: str, block_bytes: int, tree: object, space: Space, elsewhere: Elsewhere | None = None
) -> Manifest:
    """Return the manifest of a state that has been laid out.

    Raises:
        UnsupportedValueError: this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise UnsupportedValueError("this machine is big-endian; the state format carries little-endian memory only")
    return Manifest(
        format=FORMAT_NAME,
        version=FORMAT_VERSION,
        step=step,
        snapshot=snapshot,
        block_bytes=block_bytes,
        total_bytes=space.total_bytes,
        segments=list(zip(space.starts, space.lengths, strict=True)),
        tensors=[_entry(placed) for placed in space.placed],
        elsewhere=elsewhere,
        tree=tree,
    )


def _entry(placed: PlacedTensor) -> WireTensor:
    chunks = [
        Chunk(
            offsets=list(chunk.offsets),
            sizes=list(chunk.sizes),
            segment=chunk.segment,
            byte_offset=chunk.byte_offset,
            strides=None if chunk.strides is None else list(chunk.strides),
        )
        for chunk in placed.chunks
    ]
    return WireTensor(
        fqn=placed.path,
        dtype=dtype_name(placed.dtype),
        shape=list(placed.global_shape),
        chunks=chunks,
        layout=placed.layout,
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, *, max_total_bytes: int | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        data: JSON from a peer, not trusted.
        max_total_bytes: refuse a longer byte space.

    Raises:
        StateFormatError: a rule of the format is broken; the message says which.
    """
    if sys.byteorder != "little":
        raise StateFormatError("this machine is big-endian; the state format carries little-endian memory only")
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise StateFormatError(f"the manifest has more than {MAX_CONTAINERS} lists and objects", party="source")
    try:
        with gc_paused():
            try:
                manifest = _decode_manifest(data)
            except msgspec.ValidationError:
                _check_version(_decode_header(data))
                raise
            _check_version(manifest)
            check_manifest(manifest, max_total_bytes=max_total_bytes)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateFormatError(f"the manifest cannot be read: {error}", party="source") from error
    except RecursionError as error:
        raise StateFormatError("the manifest is nested too deeply", party="source") from error
    return manifest


def _check_version(header: _StateHeader | Manifest) -> None:
    if header.format != FORMAT_NAME:
        raise StateFormatError(f"not a state manifest: format {header.format[:64]!r}", party="source")
    if header.version != FORMAT_VERSION:
        raise StateFormatError(
            f"the source speaks state format {header.version}, this side {FORMAT_VERSION}: run one version on both",
            party="source",
        )


def check_manifest(manifest: Manifest, *, max_total_bytes: int | None = None) -> None:
    """Check every rule that the types alone do not.

    Raises:
        StateFormatError: a rule is broken.
    """
    if max_total_bytes is not None and manifest.total_bytes > max_total_bytes:
        raise StateFormatError(
            f"the source announces {manifest.total_bytes} bytes, the limit here is {max_total_bytes}", party="source"
        )
    hosts = manifest.elsewhere.hosts if manifest.elsewhere is not None else []
    if len(set(hosts)) < len(hosts) or not all(map(may_be_tried, hosts)):
        raise StateFormatError(f"the manifest names hosts that are none of a server: {hosts}", party="source")
    end = 0
    for index, (offset, length) in enumerate(manifest.segments):
        if offset != -(-end // ALIGN_BYTES) * ALIGN_BYTES:
            raise StateFormatError(
                f"segment {index} starts at {offset}, the one before ends at {end}: overlap or hole", party="source"
            )
        end = offset + length
    if end != manifest.total_bytes:
        raise StateFormatError(f"segments end at {end}, total_bytes is {manifest.total_bytes}", party="source")
    lengths = [length for _, length in manifest.segments]
    reached = [-1] * len(lengths)
    dtypes = [parse_dtype(tensor.dtype) for tensor in manifest.tensors]
    num_comparisons = 0
    for tensor, dtype in zip(manifest.tensors, dtypes, strict=True):
        for chunk in tensor.chunks:
            if chunk.segment >= len(lengths):
                raise StateFormatError(f"tensor {_name(tensor)} lies in a segment that does not exist", party="source")
            last = _check_chunk(tensor, chunk, dtype.itemsize, lengths[chunk.segment])
            if last > reached[chunk.segment]:
                reached[chunk.segment] = last
        if len(tensor.chunks) > 1:
            num_comparisons += _check_apart(tensor)
            if num_comparisons > MAX_COMPARISONS:
                raise StateFormatError(
                    f"the manifest has too many boxes to compare, at {_name(tensor)}", party="source"
                )
    if reached != lengths:
        index = next(index for index, length in enumerate(lengths) if reached[index] != length)
        raise StateFormatError(f"segment {index} has {lengths[index]} bytes that no tensor reaches", party="source")
    assembled = sum(
        dtype.itemsize * prod(chunk.sizes)
        for tensor, dtype in zip(manifest.tensors, dtypes, strict=True)
        if len(tensor.chunks) > 1
        for chunk in tensor.chunks
    )
    if assembled > MAX_TIED * manifest.total_bytes:
        raise StateFormatError(
            f"the boxes of sharded tensors have {assembled} bytes, in a byte space of {manifest.total_bytes}",
            party="source",
        )
    check_tree(manifest.tree, dtypes)


def _check_chunk(tensor: WireTensor, chunk: Chunk, itemsize: int, length: int) -> int:
    """Check one chunk against its segment's length; return the byte after the last one that it reaches."""
    if chunk.strides is None and not chunk.byte_offset and chunk.sizes == tensor.shape and len(chunk.sizes) <= 4:
        # A whole tensor in C order, as nearly all are.
        num_bytes = itemsize
        for size in chunk.sizes:
            num_bytes *= size
        if 0 < num_bytes == length and not any(chunk.offsets) and len(chunk.offsets) == len(chunk.sizes):
            return num_bytes
    if not len(tensor.shape) == len(chunk.offsets) == len(chunk.sizes):
        raise StateFormatError(f"tensor {_name(tensor)}: shape, offsets and sizes differ in length", party="source")
    for whole, offset, size in zip(tensor.shape, chunk.offsets, chunk.sizes, strict=True):
        if offset + size > whole:
            raise StateFormatError(f"tensor {_name(tensor)}: its box is not within its shape", party="source")
    if chunk.byte_offset % itemsize:
        raise StateFormatError(f"tensor {_name(tensor)}: its bytes are not aligned to its items", party="source")
    num_bytes = itemsize
    for size in chunk.sizes:
        num_bytes *= size
    if num_bytes and num_bytes > length:
        raise StateFormatError(f"tensor {_name(tensor)} has {num_bytes} bytes, its segment {length}", party="source")
    if any(size >= 2**62 for size in chunk.sizes) or _element_limit(chunk.sizes) > 2**62:
        raise StateFormatError(f"tensor {_name(tensor)}: its sizes are out of range", party="source")
    if chunk.strides is None:
        last = chunk.byte_offset + num_bytes
    else:
        if len(chunk.strides) != len(chunk.sizes):
            raise StateFormatError(f"tensor {_name(tensor)}: strides and sizes differ in length", party="source")
        span = sum((size - 1) * stride for size, stride in zip(chunk.sizes, chunk.strides, strict=True) if size)
        last = chunk.byte_offset + ((span + 1) * itemsize if num_bytes else 0)
    if last > length:
        raise StateFormatError(f"tensor {_name(tensor)} reaches beyond its segment", party="source")
    return last


def _check_apart(tensor: WireTensor) -> int:
    """See that no two boxes share an element; return how many comparisons of two of them that took."""
    if are_told_apart(tensor.chunks):
        return 0
    for one, other in combinations(tensor.chunks, 2):
        if all(
            max(a, b) < min(a + a_size, b + b_size)
            for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        ):
            raise StateFormatError(f"tensor {_name(tensor)}: two of its boxes overlap", party="source")
    return len(tensor.chunks) * (len(tensor.chunks) - 1) // 2 * max(len(tensor.shape), 1)


def names_of_parts(manifest: Manifest) -> list[str]:
    """Return the names of the tensors of which a source holds only a part."""
    return [
        entry.fqn
        for entry in manifest.tensors
        if [(chunk.sizes, any(chunk.offsets)) for chunk in entry.chunks] != [(entry.shape, False)]
    ]


def has_same_layout(one: Manifest, other: Manifest) -> bool:
    """Whether the tensors of two states have the same names, and lie in the same places."""
    return (one.block_bytes, one.total_bytes, one.segments, one.tensors) == (
        other.block_bytes,
        other.total_bytes,
        other.segments,
        other.tensors,
    )


def _element_limit(sizes: list[int]) -> int:
    """Product of the sizes that are not zero: what torch computes strides from."""
    product = 1
    for size in sizes:
        product *= max(size, 1)
    return product


def _name(tensor: WireTensor) -> str:
    return repr(tensor.fqn[:120])
