"""How many frames of a WebSocket some bytes hold, however they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchft_ckpt.core.services.frames import FrameCounter


def frame(length: int, first: int, is_masked: bool, is_long: bool) -> bytes:
    if is_long or length >= 65536:
        told = bytes([127]) + length.to_bytes(8, "big")
    elif length >= 126:
        told = bytes([126]) + length.to_bytes(2, "big")
    else:
        told = bytes([length])
    head = bytes([first, told[0] | (128 if is_masked else 0)]) + told[1:]
    return head + (b"\xff" * 4 if is_masked else b"") + b"\x81" * length


FRAMES = st.builds(
    frame, st.sampled_from([0, 1, 26, 125, 126, 300, 70000]), st.integers(0, 255), st.booleans(), st.booleans()
)


@given(st.lists(FRAMES, max_size=12), st.lists(st.integers(1, 90000), max_size=40))
def test_every_frame_counts_once_however_the_bytes_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    rest, counter, counted = b"".join(frames), FrameCounter(), 0
    for cut in cuts:
        counted += counter.count(rest[:cut])
        rest = rest[cut:]
    assert counted + counter.count(rest) == len(frames)


@given(FRAMES)
def test_a_frame_counts_when_its_head_is_here_and_nothing_else_of_it(one: bytes) -> None:
    counter = FrameCounter()
    counts = [counter.count(bytes([byte])) for byte in one[:200]]
    assert sum(counts) == 1 or len(one) > 200


def test_a_length_that_cannot_be_is_skipped_for_ever() -> None:
    counter = FrameCounter()
    assert counter.count(b"\x81\xff" + b"\xff" * 8 + b"mask" + b"\x81\x80mask" * 100) == 1
    assert counter.count(b"\x81\x80mask" * 100) == 0
