"""Finds boxes of a served state in its byte space, and reads their elements in C order, slice by slice. It does not know HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchft_ckpt.checkpointing.protocol import BoxRequest
from torchft_ckpt.checkpointing.serving.relay import Served
from torchft_ckpt.checkpointing.state.blocks import start_blake3
from torchft_ckpt.checkpointing.state.format import Manifest
from torchft_ckpt.checkpointing.state.local_state import box_of
from torchft_ckpt.checkpointing.state.regions import Region, gather, region_in_chunk, slices
from torchft_ckpt.core.boxes.geometry import contains

SLICE_BYTES = 1024 * 1024
_PADDING_BYTES = 64
_MAX_SPAN_BYTES = 4 * 1024 * 1024


def regions_of(manifest: Manifest, parts: Sequence[BoxRequest]) -> list[Region]:
    """Return where the parts lie in the byte space.

    Raises:
        ValueError: there is no such part.
    """
    return [_region(manifest, part) for part in parts]


def _region(manifest: Manifest, part: BoxRequest) -> Region:
    if part.tensor >= len(manifest.tensors) or part.chunk >= len(manifest.tensors[part.tensor].chunks):
        raise ValueError(f"there is no chunk {part.chunk} of tensor {part.tensor}")
    entry = manifest.tensors[part.tensor]
    chunk = entry.chunks[part.chunk]
    box, held = box_of(part), box_of(chunk)
    if not len(box.offsets) == len(box.sizes) == len(held.sizes) or not box.volume or not contains(held, box):
        raise ValueError(f"{box} is not within {held} of tensor {part.tensor}")
    return region_in_chunk(manifest, entry, chunk, box)


def digest_parts(served: Served, regions: Sequence[Region]) -> Iterator[bytes | None]:
    """Yield the BLAKE3 digests of parts, in order, without sending them.

    And None after each slice, where the work may be left.

    Raises:
        BlockGoneError: one is not there any more.
    """
    scratch = memoryview(bytearray(SLICE_BYTES))
    for some in neighbours(regions, SLICE_BYTES):
        start, stop = some[0].start, some[-1].stop
        data = read_region(served, Region(start, (), stop - start), scratch) if len(some) > 1 else scratch[:0]
        for region in some:
            hasher = start_blake3()
            for piece in slices_of(region) if not data else ():
                hasher.update(read_region(served, piece, scratch))
                yield None
            if data:
                hasher.update(data[region.start - start : region.stop - start])
            yield hasher.digest()


def neighbours(regions: Iterable[Region], max_bytes: int) -> Iterator[list[Region]]:
    """Yield regions in their order, together if they are runs that lie close to each other, of so many bytes in all."""
    some: list[Region] = []
    for region in regions:
        if some and (
            region.steps
            or some[-1].steps
            or not 0 <= region.start - some[-1].stop < _PADDING_BYTES
            or region.stop - some[0].start > max_bytes
        ):
            yield some
            some = []
        some.append(region)
    if some:
        yield some


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
