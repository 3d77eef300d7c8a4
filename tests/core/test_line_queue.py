"""What a launcher keeps for a stream that takes nothing for a while, who waits, and what is left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchft_ckpt.core.services.line_queue import PIECE_BYTES, LineQueue, Put

PATIENCE_S = 5.0


def queue(capacity: int = 8) -> LineQueue:
    return LineQueue(capacity=capacity, patience_s=PATIENCE_S)


def drain(lines: LineQueue) -> bytes:
    out = b""
    while piece := lines.begin(0.0):
        out += piece
        lines.written()
    return out


def test_what_is_put_comes_out_in_pieces_of_whole_lines() -> None:
    lines = queue(capacity=1 << 20)
    long, short = b"x" * (2 * PIECE_BYTES) + b"y\n", [b"%04d\n" % number for number in range(1000)]
    assert lines.put([*short, long], 0.0) is Put.TAKEN
    pieces = []
    while piece := lines.begin(0.0):
        pieces.append(piece)
        lines.written()
    assert b"".join(pieces) == b"".join([*short, long])
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert pieces[0].endswith(b"\n") and len(pieces[0]) > PIECE_BYTES - 5, "as many lines as fit"
    assert lines.num_bytes == 0


def test_who_brings_more_than_there_is_room_for_waits_until_a_piece_is_written() -> None:
    lines = queue()
    assert lines.put([b"1234567\n"], 0.0) is Put.TAKEN
    assert lines.begin(0.0) == b"1234567\n"
    assert lines.put([b"next\n"], 0.0) is Put.NO_ROOM, "what is being written is not written yet"
    lines.written()
    assert lines.put([b"next\n"], 0.0) is Put.TAKEN
    assert drain(lines) == b"next\n"


def test_a_stream_that_takes_nothing_is_stuck_and_holds_nobody_up() -> None:
    lines = queue()
    lines.put([b"1234567\n"], 0.0)
    assert not lines.is_stuck(9.0)
    assert lines.stuck_at(9.0) == 9.0 + PATIENCE_S, "nobody has tried yet: not sooner than this"
    lines.begin(10.0)
    assert lines.stuck_at(12.0) == 10.0 + PATIENCE_S
    assert lines.put([b"a\n"], 14.9) is Put.NO_ROOM
    assert not lines.is_stuck(14.9)
    assert lines.is_stuck(15.0)
    assert lines.put([b"a\n", b"b\n"], 15.0) is Put.LEFT_OUT
    assert lines.put([b"c\n"], 16.0) is Put.LEFT_OUT

    lines.written()
    assert not lines.is_stuck(20.0)
    assert lines.put([b"d\n"], 20.0) is Put.TAKEN
    said, after = drain(lines).splitlines()
    assert said.endswith(b"left out here, because nobody read this: 3")
    assert after == b"d"


def test_a_slow_stream_is_never_stuck() -> None:
    lines = queue(capacity=3 * PIECE_BYTES)
    lines.put([b"x" * 3 * PIECE_BYTES], 0.0)
    for start in (0.0, 4.9, 9.8):
        lines.begin(start)
        assert not lines.is_stuck(start + 4.8)
        lines.written()


def test_what_is_urgent_finds_room_up_to_a_bound_and_never_waits() -> None:
    lines = queue()
    assert lines.put([b"1234567\n"], 0.0) is Put.TAKEN
    assert lines.put([b"abcdefg\n"], 0.0, is_urgent=True) is Put.TAKEN
    assert lines.put([b"more\n"], 0.0, is_urgent=True) is Put.LEFT_OUT
    assert lines.num_bytes == 16
    assert drain(lines) == b"1234567\nabcdefg\n"
    lines.say_what_is_missing()
    assert drain(lines).endswith(b"nobody read this: 1\n")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
            st.tuples(st.just("write"), st.just([]), st.booleans()),
            st.tuples(st.just("wait"), st.just([]), st.booleans()),
        ),
        max_size=40,
    )
)
def test_each_line_is_written_once_in_order_or_counted_as_missing(
    events: list[tuple[str, list[int], bool]],
) -> None:
    lines, now, num_put, out, is_writing = queue(capacity=30), 0.0, 0, b"", False
    for what, sizes, is_urgent in events:
        if what == "put":
            batch = [b"%d:%s\n" % (num_put + place, b"x" * size) for place, size in enumerate(sizes)]
            became = lines.put(batch, now, is_urgent=is_urgent)
            assert became is not Put.NO_ROOM or not (is_urgent or lines.is_stuck(now))
            num_put += 0 if became is Put.NO_ROOM else len(batch)
        elif what == "wait":
            now += PATIENCE_S
        elif is_writing:
            lines.written()
            is_writing = False
        else:
            out += (piece := lines.begin(now))
            is_writing = bool(piece)
        assert lines.num_bytes <= 2 * 30 + 3 * 7 + 80, "a bound, a batch and a notice"
    if is_writing:
        lines.written()
    lines.say_what_is_missing()
    out += drain(lines)
    place = 0
    for line in out.splitlines():
        if line.startswith(b"[launcher]"):
            place += int(line.rpartition(b" ")[2])
        else:
            assert int(line.partition(b":")[0]) == place
            place += 1
    assert place == num_put
