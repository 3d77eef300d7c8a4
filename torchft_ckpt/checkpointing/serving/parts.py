"""Boxes of a served state, as one response: the elements of each part in C order, followed by their digest.

A part's bytes are lent and sent as they are where they lie in one run; else a slice at a time is gathered. Like
`sending.Body`, it is what a burst sends. It does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import xxhash

from torchft_ckpt.checkpointing.protocol import Part
from torchft_ckpt.checkpointing.serving.relay import Served
from torchft_ckpt.checkpointing.state.blocks import DIGEST_BYTES, start_blake3
from torchft_ckpt.checkpointing.state.dtypes import parse_dtype
from torchft_ckpt.checkpointing.state.format import Chunk, Manifest, TensorEntry
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.checkpointing.state.regions import Region, c_strides, gather, region_of, slices
from torchft_ckpt.core.boxes import Box, contains, relative_to
from torchft_ckpt.core.proofs import PartDigest

SLICE_BYTES = 1024 * 1024
_MAX_SPAN_BYTES = 4 * 1024 * 1024
_COPIED_BYTES = 64 * 1024
"""Shorter runs are gathered, so that many small parts are one send."""


def regions_of(manifest: Manifest, parts: Sequence[Part]) -> list[Region]:
    """Return where the parts lie in the byte space.

    Raises:
        ValueError: there is no such part.
    """
    return [_region(manifest, part) for part in parts]


def _region(manifest: Manifest, part: Part) -> Region:
    if part.tensor >= len(manifest.tensors) or part.chunk >= len(manifest.tensors[part.tensor].chunks):
        raise ValueError(f"there is no chunk {part.chunk} of tensor {part.tensor}")
    entry = manifest.tensors[part.tensor]
    chunk = entry.chunks[part.chunk]
    box, held = box_of(part), box_of(chunk)
    if not len(box.offsets) == len(box.sizes) == len(held.sizes) or not box.volume or not contains(held, box):
        raise ValueError(f"{box} is not within {held} of tensor {part.tensor}")
    return region_in_chunk(manifest, entry, chunk, box)


def region_in_chunk(manifest: Manifest, entry: TensorEntry, chunk: Chunk, box: Box) -> Region:
    """Return where in the byte space a box of a tensor lies that is within one of its chunks."""
    strides = c_strides(chunk.sizes) if chunk.strides is None else chunk.strides
    base = manifest.segments[chunk.segment][0] + chunk.byte_offset
    return region_of(base, strides, relative_to(box, box_of(chunk)), parse_dtype(entry.dtype).itemsize)


class _End(Enum):
    END = "end"


_END = _End.END


class PartsBody:
    """The bytes and digests of parts, in order.

    Args:
        served: where they come from.
        regions: where they lie.
        seeds: of their digests.
        start_digest: begins the digest of a part, given its seed; it has `DIGEST_BYTES`.
    """

    def __init__(
        self,
        served: Served,
        regions: Sequence[Region],
        seeds: Sequence[int],
        start_digest: Callable[[int], PartDigest] = lambda seed: xxhash.xxh3_128(seed=seed),
    ) -> None:
        self._served = served
        self.length = sum(region.num_bytes + DIGEST_BYTES for region in regions)
        self._left = self.length
        self._hashers = map(start_digest, seeds)
        self._slices = _with_ends(regions)
        self._next: Region | _End | None = next(self._slices, _END)
        self._scratch = memoryview(bytearray(SLICE_BYTES))
        self._out = memoryview(b"")
        """Bytes of our own that wait to be sent."""
        self._at = self._end = self._hashed = 0
        """The contiguous slice that is being sent."""
        self._hasher: PartDigest | None = None

    @property
    def done(self) -> bool:
        """Whether everything was taken."""
        return not self._left

    def advance(self, send: Callable[[list[memoryview]], int], max_bytes: int = SLICE_BYTES) -> int:
        """Hand the next bytes to `send`, which returns how many it took; return that.

        Raises:
            BlockGoneError: they are not there any more.
        """
        if not self._out and self._at >= self._end:
            self._begin_slice()
        if self._out:
            taken = send([self._out[:max_bytes]])
            self._out = self._out[taken:]
        else:
            taken = self._send_lent(send, min(self._at + max_bytes, self._end))
        self._left -= taken
        return taken

    def _begin_slice(self) -> None:
        """Go on to what comes next: a long run of live memory, or our copy of as much else as there is room for."""
        filled = 0
        while (region := self._next) is not _END:
            if region is None:  # a part has ended
                if filled + DIGEST_BYTES > SLICE_BYTES:
                    break
                digest = b"" if self._hasher is None else self._hasher.digest()
                self._scratch[filled : filled + DIGEST_BYTES] = digest
                filled += DIGEST_BYTES
                self._hasher = None
            else:
                if not region.steps and region.run > _COPIED_BYTES:
                    if not filled:
                        self._hasher = self._hasher or next(self._hashers)
                        self._at = self._hashed = region.start
                        self._end = region.stop
                        self._next = next(self._slices, _END)
                    break
                if filled + region.num_bytes > SLICE_BYTES:
                    break
                self._hasher = self._hasher or next(self._hashers)
                out = read_region(self._served, region, self._scratch[filled:])
                self._hasher.update(out)
                filled += len(out)
            self._next = next(self._slices, _END)
        self._out = self._scratch[:filled]

    def _send_lent(self, send: Callable[[list[memoryview]], int], end: int) -> int:
        with self._served.lend(self._at, end) as views:
            if self._hashed < end:
                skipped = self._hashed - self._at  # what was hashed before, but did not fit into the socket
                for view in views:
                    if skipped < len(view) and self._hasher is not None:
                        self._hasher.update(view[skipped:] if skipped else view)
                    skipped = max(skipped - len(view), 0)
                self._hashed = end
            taken = send(views)
        self._at += taken
        return taken


def digest_parts(served: Served, regions: Sequence[Region]) -> Iterator[bytes | None]:
    """Yield the BLAKE3 digests of parts, in order, without sending them.

    And None after each slice, where the work may be left.

    Raises:
        BlockGoneError: one is not there any more.
    """
    scratch = memoryview(bytearray(SLICE_BYTES))
    for region in regions:
        hasher = start_blake3()
        for piece in slices_of(region):
            hasher.update(read_region(served, piece, scratch))
            yield None
        yield hasher.digest()


def slices_of(region: Region, max_span: int = _MAX_SPAN_BYTES) -> Iterator[Region]:
    """Yield a region in slices that `read_region` takes, in C order, each from first byte to last at most `max_span` long."""
    return slices(region, SLICE_BYTES, min(max_span, _MAX_SPAN_BYTES))


def read_region(served: Served, region: Region, scratch: memoryview) -> memoryview:
    """Copy a slice of at most `SLICE_BYTES` to `scratch`; return the part of it that was filled."""
    out = scratch[: region.num_bytes]
    with served.lend(region.start, region.stop) as views:
        memory = views[0] if len(views) == 1 else memoryview(b"".join(views))
        gather(memory, region, out)
    return out


def _with_ends(regions: Sequence[Region]) -> Iterator[Region | None]:
    """Yield the slices of all regions, and None after the last one of each."""
    for region in regions:
        yield from slices_of(region)
        yield None
