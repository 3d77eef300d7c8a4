"""Describes a state for `inspect`, from the peer's index and the manifest alone. It prints and fetches nothing."""

from __future__ import annotations

from collections import Counter
from math import prod

from torchft_ckpt.checkpointing.protocol import Index, SnapshotEntry
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.format import Manifest, WireTensor
from torchft_ckpt.checkpointing.state.tree import ArrayPlace, TensorPlace, TreeEncoder, as_places, decode_tree, in_words
from torchft_ckpt.cli.output import aligned, format_bytes, format_count, leaves
from torchft_ckpt.core.text import printable

_MAX_VALUES = 8
_MAX_VALUE_CHARS = 60
_PHASES = {
    "live": "out of the trainer's memory",
    "detaching": "being copied aside",
    "detached": "out of copies, the trainer has gone on",
    "relay": "passed on while it is being received",
}


def as_text(url: str, index: Index, manifest: Manifest, num_tensors: int) -> str:
    """Return a page about one state, and a line about each other one that is served."""
    entry = next((entry for entry in index.snapshots if entry.snapshot == manifest.snapshot), None)
    lines = [f"{url} serves step {manifest.step} (state format {manifest.version}, snapshot {manifest.snapshot[:8]})"]
    blocks = format_count(-(-manifest.total_bytes // manifest.block_bytes), "block")
    lines.append(f"  size     {format_bytes(manifest.total_bytes)} in {blocks} of {format_bytes(manifest.block_bytes)}")
    if entry is not None:
        lines.append(f"  served   {_served(entry)}")
    lines.append(f"  tensors  {_tensors_line(manifest)}")
    lines += _largest(manifest, num_tensors)
    lines += _values(manifest)
    for other in index.snapshots:
        if other.snapshot != manifest.snapshot:
            lines.append(
                f"also step {other.step}: {format_bytes(other.total_bytes)}, {format_count(other.num_tensors, 'tensor')}, "
                f"{_served(other)}"
            )
    return "\n".join(map(printable, lines))


def as_json(url: str, index: Index, manifest: Manifest, num_tensors: int | None) -> dict[str, object]:
    """Return the same for programs. Lengths in bytes; values as the state format's nodes; the largest tensors first.

    Args:
        num_tensors: how many tensors; None for all.
    """
    return {
        "url": url,
        "newest_step": index.newest_step,
        "snapshots": [{name: getattr(entry, name) for name in entry.__struct_fields__} for entry in index.snapshots],
        "state": {
            "format": manifest.format,
            "version": manifest.version,
            "step": manifest.step,
            "snapshot": manifest.snapshot,
            "total_bytes": manifest.total_bytes,
            "num_tensors": len(manifest.tensors),
            "tensors": [
                {
                    "name": tensor.fqn,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "boxes": [{"offsets": chunk.offsets, "sizes": chunk.sizes} for chunk in tensor.chunks],
                    "bytes": _num_bytes(tensor),
                }
                for tensor in _by_size(manifest)[:num_tensors]
            ],
            "values": {path: TreeEncoder().encode(value) for path, value in _plain_values(manifest)},
        },
    }


def _tensors_line(manifest: Manifest) -> str:
    counts = Counter(tensor.dtype for tensor in manifest.tensors)
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in counts.most_common())
    num_sharing = len(manifest.tensors) - len(manifest.segments)
    sharing = f"; {num_sharing} of them share another one's memory" if num_sharing else ""
    return f"{len(manifest.tensors)}{f': {dtypes}' if dtypes else ''}{sharing}"


def _largest(manifest: Manifest, num_tensors: int) -> list[str]:
    shown = _by_size(manifest)[:num_tensors]
    rows = [(tensor.fqn or "state", tensor.dtype, _shape(tensor), format_bytes(_num_bytes(tensor))) for tensor in shown]
    lines = [f"    {line}" for line in aligned(rows, right=(3,))]
    if rows and len(rows) < len(manifest.tensors):
        lines.append(f"    and {len(manifest.tensors) - len(rows)} more, none larger")
    return lines


def _values(manifest: Manifest) -> list[str]:
    values = _plain_values(manifest)
    shown = sorted(values, key=lambda item: item[0].count("."))[:_MAX_VALUES]  # those near the root say the most
    lines = [f"  values   {len(values)}" + (", such as" if len(shown) < len(values) else ":" if values else "")]
    return lines + [f"    {path} = {_short(value)}" for path, value in shown]


def _plain_values(manifest: Manifest) -> list[tuple[str, object]]:
    state = decode_tree(manifest.tree, as_places(len(manifest.tensors)))
    return [(path, leaf) for path, leaf in leaves(state) if not isinstance(leaf, (TensorPlace, ArrayPlace))]


def _by_size(manifest: Manifest) -> list[WireTensor]:
    return sorted(manifest.tensors, key=_num_bytes, reverse=True)


def _num_bytes(tensor: WireTensor) -> int:
    return sum(prod(chunk.sizes) for chunk in tensor.chunks) * parse_dtype(tensor.dtype).itemsize


def _shape(tensor: WireTensor) -> str:
    """The global shape, and the boxes of it that the peer holds where they are less."""
    held = [str(chunk.sizes) for chunk in tensor.chunks]
    if held == [str(tensor.shape)]:
        return held[0]
    return f"{' and '.join(held) or 'nothing'} of {tensor.shape}"


def _served(entry: SnapshotEntry) -> str:
    return f"to {format_count(entry.num_receivers, 'receiver')}, {_PHASES.get(entry.phase, entry.phase)}"


def _short(value: object) -> str:
    text = in_words(value, repr)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
