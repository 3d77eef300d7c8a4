"""The manifest of one part of a durable checkpoint, version 2: what a rank holds, and what of it this part contains.

This file specifies the manifest, writes and checks it. It does not read or write files, and does not know what the other parts
contain; whether a checkpoint is whole is decided in `core/boxes/geometry.py`.

A file of two parts:

- one line of JSON: `{"format": "torchft_ckpt.durable", "version": 2, "bytes": N, "digest": H}`, ended by a newline. A reader
  MUST refuse a version that it does not know before it looks further; version 1 is the same with fewer kinds of nodes. N is the
  length of what follows, H its xxh3_128 as 32 hex digits (seed 0), and both MUST be right: so a manifest is whole, or is none.
- the body, one JSON object, `PartManifest` below. A reader MUST refuse members that it does not know.

What MUST hold in a body:

- `checkpoint`, `replica`, `rank` and `fill` are those of the file's place (`names`), `step` that of the checkpoint's name.
- `replica` < `num_replicas`, `rank` < `num_ranks`, and these are at most 2**20.
- A tensor has at most 2**62 bytes; so it has where a dimension of 0 elements had 1.
- No fqn is there twice in `tensors`, nor in `holds_values`, nor in `values`. A box lies within its tensor's shape.
- A piece's box lies within the shape of `tensors[tensor]` and has elements. Its record, its data and its table of digests lie
  within `files[file]`, and do not overlap each other's data or tables.
- The data of a piece are the elements of its box, little-endian, in C order, raw: `data_offset` is where they begin, in the
  middle of a record that `torch.load(weights_only=True)` reads as that tensor.
- Its table of digests at `digests_offset` has 16 bytes for each 64 KiB of data, the last block being shorter: xxh3_128 of the
  block (canonical, big-endian) with the block's index as seed. `digest` is the xxh3_128 of the table (seed 0), in hex.
- `tree` is a node of the state format (`state/format.py`): the state as this rank has it, plain values included. Its `x` and
  `a` nodes refer to `tensors`, and each of these MUST be referred to.
- The record of a value is what `torch.save` made of it, for DCP alone, who has no tree; `digest` is that of the record (seed
  0).
- `own` is a node with tensors of its own: what belongs to this rank (random number generators, the position in the data, which
  parameters its optimizers have). Its item `replicas`, if it is there, is base64 of 16 bytes for each of `tensors`, the same for
  all ranks of a group that hold the same: 8 of a digest of what the rank holds of it, or of a window of that; 3 that say which
  window (0: all); 4 of a digest of the order of all that it shares with the same ranks. The last one is 0 if one of these ranks
  writes it, 1 if each does, 2 if one does and an optimizer owns it. All ones, or no such item, say that this rank holds it alone.
  Earlier versions had 8: 7 of one digest of a sample and of the order, and the last one.

Nothing in a manifest is ever executed, and records are not unpickled by this library where it wrote them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import torch
import xxhash

from torchft_ckpt.checkpointing.durable.names import CheckpointName, PartName
from torchft_ckpt.checkpointing.state.classes import KnownClasses
from torchft_ckpt.checkpointing.state.dtypes import CARRIED_DTYPES, dtype_name, parse_dtype
from torchft_ckpt.checkpointing.state.format import MAX_CONTAINERS, MAX_DIMS
from torchft_ckpt.checkpointing.state.space import as_bytes
from torchft_ckpt.checkpointing.state.tree import TreeEncoder, check_tree, decode_tree, from_tensors, items_of_node
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import CheckpointDamagedError, StateFormatError, UnsupportedValueError
from torchft_ckpt.memory import gc_paused

FORMAT_NAME = "torchft_ckpt.durable"
FORMAT_VERSION = 2
_READABLE = (1, 2)
DIGEST_BLOCK_BYTES = 64 * 1024
MAX_MANIFEST_BYTES = 1024 * 1024 * 1024
MAX_INLINE_BYTES = 64 * 1024 * 1024
"""Tensors and arrays inside of plain values, together: they are part of the manifest."""

HELD_ALONE, WRITTEN_BY_ONE, WRITTEN_BY_EACH, OWNED = b"\xff" * 16, b"\0", b"\1", b"\2"
_REPLICAS_KEY = "replicas"
MAX_MEMBERS = 2**20
"""Replicas, and ranks of each."""
_MAX_TENSOR_BYTES = 2**62

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_NumMembers = Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]
_Dims = Annotated[list[Count], msgspec.Meta(max_length=MAX_DIMS)]
_Hex = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class BoxEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One box of a tensor."""

    offsets: _Dims
    sizes: _Dims

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.sizes))


class FileTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A tensor that the rank holds: all of it, or boxes of it."""

    fqn: str
    path: list[str | int]
    """The keys that lead to it: DCP's `planner_data`."""
    dtype: str
    shape: _Dims
    boxes: list[BoxEntry]


class PieceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A box of a tensor that this part contains, and where."""

    tensor: Count
    """Index in `tensors`."""
    offsets: _Dims
    sizes: _Dims
    file: Count
    """Index in `files`."""
    offset: Count
    length: Count
    """Of the record that DCP reads, in bytes of the file."""
    data_offset: Count
    """The beginning of its raw data, in bytes of the file."""
    digests_offset: Count
    digest: _Hex

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.sizes))


class InlineTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A tensor inside of a plain value."""

    dtype: str
    shape: _Dims
    data: str
    """Its elements in C order, base64."""


class PlainValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value as a node of the state format."""

    node: object = None
    tensors: list[InlineTensor] = []


class ValueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A leaf of the state, as DCP sees it, that is no tensor: where the record is that DCP reads for it."""

    fqn: str
    path: list[str | int]
    file: Count
    offset: Count
    length: Count
    digest: _Hex


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of records, beside the manifest."""

    name: Annotated[str, msgspec.Meta(pattern=r"\A__r[0-9]{1,7}_g[0-9]{1,7}_f[0-9]{1,4}\.distcp\Z")]
    num_bytes: Count


class PartManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a part but its bytes."""

    checkpoint: str
    step: Count
    replica: Count
    rank: Count
    """In its group."""
    fill: Count
    num_replicas: _NumMembers
    """Of the groups that save."""
    num_ranks: _NumMembers
    """Of each group."""
    replica_id: str
    """Name of the group, without its incarnation: by it a rank finds what is its own."""
    written_at_s: float
    """Wall clock, for people: nothing is decided by it."""
    tensors: list[FileTensor]
    holds_values: list[str]
    """The fqns of the values that the rank holds."""
    tree: object
    """The state, as a node."""
    pieces: list[PieceEntry]
    values: list[ValueEntry]
    files: list[FileEntry]
    own: PlainValue

    @property
    def name(self) -> PartName:
        return PartName(self.replica, self.rank, self.fill)


class _ManifestHeader(msgspec.Struct):
    format: str
    version: int
    bytes: Count
    digest: str


# Made here, on one thread: msgspec looks at a class when it first decodes one, and two threads that do so at once crash it.
_decode_body = msgspec.json.Decoder(PartManifest).decode
_decode_header = msgspec.json.Decoder(_ManifestHeader).decode


def encode_part(manifest: PartManifest) -> bytes:
    """Return the bytes of a manifest's file."""
    body = msgspec.json.encode(manifest)
    digest = xxhash.xxh3_128_hexdigest(body)
    header = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "bytes": len(body), "digest": digest}
    return msgspec.json.encode(header) + b"\n" + body


def decode_part(data: bytes, checkpoint: CheckpointName, part: PartName) -> PartManifest:
    """Read a manifest's file and check every rule that one part alone can break.

    Raises:
        CheckpointDamagedError: it is not whole, not one, of another version, or of another checkpoint; the message says which.
    """
    where = f"{checkpoint}/{part.manifest}"
    head, _, body = data.partition(b"\n")
    try:
        header = _decode_header(head[:4096])
        if header.format != FORMAT_NAME:
            raise _damaged(where, f"is no manifest: format {header.format[:64]!r}")
        if header.version not in _READABLE:
            raise _damaged(where, f"has version {header.version}, this side reads {_READABLE[-1]}")
        if len(body) != header.bytes or xxhash.xxh3_128_hexdigest(body) != header.digest:
            raise _damaged(where, f"is damaged: {len(body)} bytes that do not have the digest of {header.bytes} ones")
        if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
            raise _damaged(where, f"has more than {MAX_CONTAINERS} lists and objects")
        with gc_paused():
            manifest = _decode_body(body)
            _check(manifest, checkpoint, part, where)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, f"cannot be read: {error}") from error
    except StateFormatError as error:
        raise _damaged(where, f"breaks a rule: {error}") from error
    return manifest


def _check(manifest: PartManifest, checkpoint: CheckpointName, part: PartName, where: str) -> None:
    if (manifest.checkpoint, manifest.step) != (str(checkpoint), checkpoint.step):
        raise _damaged(where, f"is of {manifest.checkpoint[:128]!r}, step {manifest.step}")
    if manifest.name != part:
        raise _damaged(where, f"is that of {manifest.name.manifest}")
    if manifest.replica >= manifest.num_replicas or manifest.rank >= manifest.num_ranks:
        raise _damaged(where, f"is of a rank beyond {manifest.num_replicas} x {manifest.num_ranks}")
    for what, names in (
        ("tensors", [entry.fqn for entry in manifest.tensors]),
        ("holds_values", manifest.holds_values),
        ("values", [entry.fqn for entry in manifest.values]),
    ):
        if len(set(names)) != len(names):
            raise _damaged(where, f"names something twice in {what}")
    itemsizes = [parse_dtype(entry.dtype).itemsize for entry in manifest.tensors]
    for tensor, itemsize in zip(manifest.tensors, itemsizes, strict=True):
        if is_too_large(tensor.shape, itemsize):
            raise _damaged(where, f"has a tensor {tensor.fqn[:120]!r} of more than 2**62 bytes")
        for held in tensor.boxes:
            _check_box(held.offsets, held.sizes, tensor, where)
    spans: list[tuple[int, int, int]] = []
    for piece in manifest.pieces:
        if piece.tensor >= len(manifest.tensors) or piece.file >= len(manifest.files):
            raise _damaged(where, "has a piece of a tensor, or in a file, that does not exist")
        tensor = manifest.tensors[piece.tensor]
        _check_box(piece.offsets, piece.sizes, tensor, where)
        num_bytes = math.prod(piece.sizes) * itemsizes[piece.tensor]
        if not num_bytes:
            raise _damaged(where, f"has an empty piece of {tensor.fqn[:120]!r}")
        end = manifest.files[piece.file].num_bytes
        data_end = piece.data_offset + num_bytes
        digests_end = piece.digests_offset + digest_table_bytes(num_bytes)
        record_end = piece.offset + piece.length
        if not (piece.offset <= piece.data_offset and data_end <= record_end <= end and digests_end <= end):
            raise _damaged(where, f"has a piece of {tensor.fqn[:120]!r} that is not within its file")
        spans += [(piece.file, piece.data_offset, data_end), (piece.file, piece.digests_offset, digests_end)]
    spans.sort()
    for (file, _, stop), (other, start, _) in pairwise(spans):
        if file == other and start < stop:
            raise _damaged(where, "has pieces that overlap in their file")
    for value in manifest.values:
        if value.file >= len(manifest.files) or value.offset + value.length > manifest.files[value.file].num_bytes:
            raise _damaged(where, f"has a value {value.fqn[:120]!r} that is not within its file")
    check_tree(manifest.tree, [parse_dtype(entry.dtype) for entry in manifest.tensors])
    _check_plain(manifest.own)


def is_too_large(shape: Sequence[int], itemsize: int) -> bool:
    """Whether no machine has a tensor of this shape: torch refuses to make it, and its length is no length of a file."""
    return math.prod(max(size, 1) for size in shape) * itemsize > _MAX_TENSOR_BYTES


def _check_box(offsets: Sequence[int], sizes: Sequence[int], tensor: FileTensor, where: str) -> None:
    if not len(offsets) == len(sizes) == len(tensor.shape) or any(
        low + size > whole for low, size, whole in zip(offsets, sizes, tensor.shape, strict=True)
    ):
        raise _damaged(where, f"has a box of {tensor.fqn[:120]!r} that is not within its shape")


def digest_table_bytes(num_bytes: int) -> int:
    """Return the length of the table of digests of so many bytes of data."""
    return -(-num_bytes // DIGEST_BLOCK_BYTES) * 16


def table_of(data: memoryview, first: int = 0) -> bytes:
    """Return the table of digests of the data of a piece, or of some of its blocks, from the first of these on."""
    return b"".join(
        xxhash.xxh3_128_digest(data[at : at + DIGEST_BLOCK_BYTES], seed=index)
        for index, at in enumerate(range(0, len(data), DIGEST_BLOCK_BYTES), first)
    )


def with_replicas(own: PlainValue, replicas: str) -> PlainValue:
    """Return what belongs to a rank, a dict, with what shows of its tensors whether other ranks hold the same."""
    if not replicas:
        return own
    return PlainValue(node={"d": [*own.node["d"], [_REPLICAS_KEY, replicas]]}, tensors=own.tensors)  # type: ignore[index]


def replicas_of(manifest: PartManifest) -> list[bytes]:
    """Return 16 bytes for each of a manifest's tensors, see above; or nothing. Of a checked manifest."""
    found = dict(items_of_node(manifest.own.node)).get(_REPLICAS_KEY)
    try:
        table = base64.b64decode(found, validate=True) if isinstance(found, str) else b""
    except ValueError:
        table = b""
    num_bytes = 8 if len(table) == 8 * len(manifest.tensors) else 16
    digests = [table[at : at + num_bytes] for at in range(0, len(table), num_bytes)]
    if num_bytes == 8:
        digests = [HELD_ALONE if HELD_ALONE.startswith(one) else one[:7] + bytes(8) + one[7:] for one in digests]
    return digests if len(table) == num_bytes * len(manifest.tensors) else []


# Plain values


def encode_value(value: object, path: str) -> PlainValue:
    """Return a value as a node.

    Raises:
        UnsupportedValueError: something in it cannot be carried; the message has its path.
    """
    encoder = TreeEncoder()
    node = encoder.encode(value, path)
    for where, tensor in encoder.tensors:
        _check_inline(tensor, where)
    if sum(tensor.nbytes for _, tensor in encoder.tensors) > MAX_INLINE_BYTES:
        raise UnsupportedValueError(
            f"state dict at {path!r}: tensors of more than 64 MiB inside of a plain value", path
        )
    return PlainValue(node=node, tensors=[_inline(tensor, where) for where, tensor in encoder.tensors])


def decode_value(value: PlainValue, classes: KnownClasses | None = None) -> object:
    """Return what a node stands for. Of a checked manifest. `classes`: as for `decode_tree`.

    Raises:
        StateMismatchError: there is no class here for a named tuple or an enum, by its path.
    """
    return decode_tree(value.node, from_tensors([_tensor_of(tensor) for tensor in value.tensors]), classes)


def _check_inline(tensor: torch.Tensor, path: str) -> None:
    what = None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        what = f"a {type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        what = f"a tensor of layout {tensor.layout}"
    elif tensor.is_meta:
        what = "a tensor on the meta device"
    elif tensor.dtype not in CARRIED_DTYPES or tensor.is_quantized:
        what = f"a tensor of dtype {tensor.dtype}"
    if what is not None:
        raise UnsupportedValueError(f"state dict at {path!r}: {what} cannot be carried inside of a plain value", path)


def _inline(tensor: torch.Tensor, path: str) -> InlineTensor:
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = base64.b64encode(bytes(as_bytes(host).numpy())).decode()
    return InlineTensor(dtype=dtype_name(host.dtype), shape=list(host.shape), data=data)


def _tensor_of(tensor: InlineTensor) -> torch.Tensor:
    dtype = parse_dtype(tensor.dtype)
    data = bytearray(base64.b64decode(tensor.data, validate=True))
    return (
        torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
        if data
        else torch.empty(tensor.shape, dtype=dtype, device="cpu")
    )


def _check_plain(value: PlainValue) -> None:
    try:
        for tensor in value.tensors:
            if is_too_large(tensor.shape, parse_dtype(tensor.dtype).itemsize):
                raise StateFormatError("a tensor inside of a value has more than 2**62 bytes", "value")
            num_bytes = len(base64.b64decode(tensor.data, validate=True))
            if num_bytes != math.prod(tensor.shape) * parse_dtype(tensor.dtype).itemsize:
                raise StateFormatError("a tensor inside of a value has another number of bytes than its shape", "value")
    except ValueError as error:  # of base64
        raise StateFormatError(f"a tensor inside of a value cannot be read: {error}", "value") from error
    check_tree(value.node, [parse_dtype(tensor.dtype) for tensor in value.tensors])


def _damaged(where: str, what: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{where} {what}", where)
