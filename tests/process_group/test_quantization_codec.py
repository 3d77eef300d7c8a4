"""A byte for an element: how far it may be off, and what becomes of the odd values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchft_ckpt.errors import ConfigError
from torchft_ckpt.process_group.quantization import (
    BLOCK,
    ERROR_SLACK,
    FP8,
    INT8,
    ChunkLayout,
    Codec,
    chunk_layout,
    decode_chunk,
    encode_chunk,
    find_codec,
    reduce_messages,
)

CODECS = [INT8, FP8]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
CHUNKS = st.lists(FLOATS | st.floats(-1, 1, width=32), min_size=1, max_size=40)
both = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def one_chunk(numel: int, block: int = 8) -> ChunkLayout:
    """A layout of one chunk with small blocks."""
    return ChunkLayout(numel, 1, block, -(-numel // block))


def encoded(codec: Codec, chunk: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    message = torch.zeros(layout.message_bytes, dtype=torch.uint8)
    encode_chunk(codec, chunk, message, layout)
    return message


def decoded(codec: Codec, message: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    chunk = torch.empty(layout.numel)
    decode_chunk(codec, message, chunk, layout)
    return chunk


def round_trip(codec: Codec, chunk: torch.Tensor, block: int = 8) -> torch.Tensor:
    layout = one_chunk(chunk.numel(), block)
    return decoded(codec, encoded(codec, chunk, layout), layout)


def scales_of(codec: Codec, chunk: torch.Tensor, block: int = 8) -> torch.Tensor:
    """Each element's scale, worked out in fp64."""
    largest = [part.abs().max().item() for part in chunk.double().split(block)]
    scales = [max(value / codec.largest, 2.0**-126) for value in largest]
    return torch.tensor(scales, dtype=torch.float64).repeat_interleave(block)[: chunk.numel()]


@settings(deadline=None)
@given(CHUNKS)
def test_int8_is_off_by_half_a_scale_at_most(values: list[float]) -> None:
    chunk = torch.tensor(values)
    error = (round_trip(INT8, chunk).double() - chunk.double()).abs()
    assert (error <= scales_of(INT8, chunk) * (0.5 + ERROR_SLACK)).all()


@pytest.mark.slow
@settings(deadline=None)
@given(CHUNKS)
def test_fp8_is_off_by_a_sixteenth_or_a_thousandth_of_a_scale_at_most(values: list[float]) -> None:
    chunk = torch.tensor(values)
    error = (round_trip(FP8, chunk).double() - chunk.double()).abs()
    scales = scales_of(FP8, chunk)
    assert (error <= torch.maximum(chunk.double().abs() / 16, scales / 1024) + scales * ERROR_SLACK).all()


@both
@pytest.mark.parametrize("largest", [1.0, -1.0, 127.0, 3.4028235e38, 2.0**-126, 1e-44, -1e-45])
def test_the_largest_value_of_a_block_survives(codec: Codec, largest: float) -> None:
    chunk = torch.tensor([largest, 0.0, largest / 3])
    result = round_trip(codec, chunk)
    allowed = scales_of(codec, chunk) * (0.5 if codec is INT8 and abs(largest) < 1e-37 else ERROR_SLACK)
    assert ((result.double() - chunk.double()).abs()[:1] <= allowed[:1]).all()
    assert result[1] == 0.0


@both
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert round_trip(codec, torch.zeros(20)).view(torch.int32).tolist() == [0] * 20


def test_halves_are_rounded_to_even() -> None:
    chunk = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert round_trip(INT8, chunk).tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 126.0]


@both
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(codec: Codec, bad: float) -> None:
    chunk = torch.ones(24)
    chunk[9] = bad
    result = round_trip(codec, chunk)
    assert result.isnan().tolist() == [False] * 8 + [True] * 8 + [False] * 8
    assert result[:8].tolist() == [1.0] * 8


@both
def test_what_is_beyond_fp32_spoils_its_block(codec: Codec) -> None:
    assert round_trip(codec, torch.tensor([1e300, 1.0], dtype=torch.float64)).isnan().all()


@both
def test_a_sum_beyond_fp32_spoils_its_block(codec: Codec) -> None:
    layout = one_chunk(2)
    message = encoded(codec, torch.tensor([3e38, 1.0]), layout)
    reduced = torch.empty_like(message)
    reduce_messages(codec, torch.stack([message, message]), reduced, layout, 2)
    assert decoded(codec, reduced, layout).isnan().all()


@both
def test_the_same_values_give_the_same_bytes_in_any_dtype_and_stride(codec: Codec) -> None:
    values = torch.arange(-20.0, 20.0)
    layout = one_chunk(40)
    messages = [encoded(codec, values.to(dtype), layout) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    assert all(torch.equal(message, messages[0]) for message in messages)


@both
def test_a_chunk_of_several_segments_is_encoded_like_its_parts(codec: Codec) -> None:
    numel = 2**18 * 2 + 5 * 512 + 77  # the last segment and the last block are not full
    chunk = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    result = round_trip(codec, chunk, 512)
    parts = [round_trip(codec, part, 512) for part in chunk.split(100 * 512)]
    assert torch.equal(result.view(torch.int32), torch.cat(parts).view(torch.int32))


@both
def test_messages_are_added_in_their_order_in_fp32(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = one_chunk(100)
    messages = torch.stack([encoded(codec, torch.randn(100, generator=generator), layout) for _ in range(5)])
    reduced = torch.empty(layout.message_bytes, dtype=torch.uint8)
    reduce_messages(codec, messages, reduced, layout, 3)
    total = torch.zeros(100)
    for message in messages:
        total += decoded(codec, message, layout)
    assert torch.equal(reduced, encoded(codec, total / 3, layout))


@given(st.integers(1, 20_000) | st.integers(1, 10**9), st.integers(1, 64))
def test_chunks_cover_the_tensor_with_whole_blocks(numel: int, num_chunks: int) -> None:
    layout = chunk_layout(numel, num_chunks)
    assert layout.chunk_numel * num_chunks >= numel
    assert layout.block <= BLOCK and layout.block % 4 == 0
    assert layout.message_bytes == layout.blocks_per_chunk * (layout.block + 4)


@given(st.integers(2**18, 10**9), st.integers(1, 16))
def test_scales_and_padding_of_a_large_tensor_are_below_one_percent(numel: int, num_chunks: int) -> None:
    assert chunk_layout(numel, num_chunks).message_bytes * num_chunks <= 1.02 * numel
    exact = -(-numel // (BLOCK * num_chunks)) * BLOCK * num_chunks
    assert chunk_layout(exact, num_chunks).message_bytes * num_chunks <= 1.01 * exact


def test_a_small_tensor_is_not_filled_up_to_large_blocks() -> None:
    assert chunk_layout(10, 3).message_bytes == 8


def test_codecs_are_found_by_name() -> None:
    names: list = [False, True, "int8", "fp8"]
    assert [find_codec(name) for name in names] == [None, INT8, INT8, FP8]


@pytest.mark.parametrize("name", ["int4", "", None])
def test_there_are_no_other_codecs(name: object) -> None:
    with pytest.raises(ConfigError, match="should_quantize"):
        find_codec(name)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both
def test_a_gpu_gives_the_bytes_and_values_that_a_cpu_gives(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    chunk = torch.randn(10_000, generator=generator) * torch.logspace(-40, 38, 10_000)
    layout = one_chunk(10_000, 512)
    message = encoded(codec, chunk, layout)
    on_gpu = torch.zeros_like(message, device="cuda")
    encode_chunk(codec, chunk.cuda(), on_gpu, layout)
    assert torch.equal(on_gpu.cpu(), message)
    result = torch.empty(10_000, device="cuda")
    decode_chunk(codec, on_gpu, result, layout)
    assert torch.equal(result.cpu().view(torch.int32), decoded(codec, message, layout).view(torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both
def test_nothing_waits_for_the_gpu(codec: Codec) -> None:
    layout = one_chunk(10_000, 512)
    chunk = torch.randn(10_000, device="cuda")
    messages = torch.zeros((2, layout.message_bytes), dtype=torch.uint8, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        encode_chunk(codec, chunk, messages[0], layout)
        reduce_messages(codec, messages, messages[1], layout, 2)
        decode_chunk(codec, messages[1], chunk, layout)
    finally:
        torch.cuda.set_sync_debug_mode(before)
