"""How many requests of one client are let through, how many bytes leave, and how many frames of a WebSocket came."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchft_ckpt.core.services.rate import FrameCounter, RateLimiter, TokenBucket, bucket_of_bytes, piece_bytes


def test_a_burst_passes_at_once_and_the_next_request_is_told_how_long_to_wait() -> None:
    limiter = RateLimiter(rate_per_s=10.0, burst=3.0)
    assert [limiter.take("a", 5.0) for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(0.1)]


def test_a_client_that_waits_as_long_as_it_was_told_is_let_through() -> None:
    limiter = RateLimiter(rate_per_s=10.0, burst=1.0)
    limiter.take("a", 0.0)
    wait_s = limiter.take("a", 0.03)
    assert limiter.take("a", 0.03 + wait_s + 1e-9) == 0.0


def test_refused_requests_cost_the_client_nothing() -> None:
    limiter = RateLimiter(rate_per_s=10.0, burst=1.0)
    limiter.take("a", 0.0)
    for tick in range(99):
        assert limiter.take("a", tick / 1000) > 0.0
    assert limiter.take("a", 0.1) == 0.0


@pytest.mark.parametrize("rate", [1e4, 2e7, 3e9])
@pytest.mark.parametrize("num_senders", [1, 4])
def test_bytes_leave_at_the_bound_however_late_senders_wake(rate: float, num_senders: int) -> None:
    chance = random.Random(7)
    bucket, piece = bucket_of_bytes(rate, 0.0), piece_bytes(rate)
    seconds = max(10.0, 400 * piece / rate)
    turns = [0.0] * num_senders
    sent = 0
    while (now := min(turns)) < seconds:
        sent += piece
        wait_s = bucket.reserve(piece, now)
        turns[turns.index(now)] = now + wait_s + (chance.uniform(0.0, 0.01) if wait_s else 1e-6)
    assert 0.95 * rate * seconds <= sent <= 1.02 * rate * seconds + num_senders * piece


def test_senders_wait_in_a_row_and_a_pause_saves_up_a_tenth_of_a_second() -> None:
    bucket = bucket_of_bytes(1000.0, 0.0)
    assert [bucket.reserve(100, 0.0) for _ in range(4)] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert bucket.reserve(100, 0.25) == pytest.approx(0.05)
    assert [bucket.reserve(200, 60.0) for _ in range(2)] == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize(("rate", "num_bytes"), [(1.0, 16384), (2e7, 400_000), (1e12, 1 << 20)])
def test_slow_links_are_sent_small_pieces(rate: float, num_bytes: int) -> None:
    assert piece_bytes(rate) == num_bytes


def test_clients_have_buckets_of_their_own() -> None:
    limiter = RateLimiter(rate_per_s=1.0, burst=1.0)
    assert [limiter.take("a", 0.0), limiter.take("b", 0.0), limiter.take("a", 0.0)] == [0.0, 0.0, 1.0]


def test_a_clock_that_goes_back_gives_no_tokens() -> None:
    limiter = RateLimiter(rate_per_s=1.0, burst=1.0)
    limiter.take("a", 100.0)
    assert limiter.take("a", 0.0) == 1.0
    assert limiter.take("a", 101.0) == 0.0


def test_a_long_silence_saves_up_no_more_than_a_burst() -> None:
    limiter = RateLimiter(rate_per_s=10.0, burst=5.0)
    limiter.take("a", 0.0)
    assert sum(limiter.take("a", 1e9) == 0.0 for _ in range(100)) == 5


@pytest.mark.parametrize("seed", range(20))
def test_over_any_span_no_more_than_the_burst_and_the_rate_pass(seed: int) -> None:
    rng = random.Random(seed)
    rate, burst = rng.uniform(0.5, 50.0), rng.uniform(1.0, 20.0)
    limiter = RateLimiter(rate, burst)
    now, passed = 0.0, []
    for _ in range(500):
        now += rng.expovariate(rate * 2)
        if limiter.take("a", now) == 0.0:
            passed.append(now)
    for first, start in enumerate(passed):
        for count, end in enumerate(passed[first:], start=1):
            assert count <= burst + rate * (end - start) + 1e-6, f"seed {seed}"


def test_clients_that_went_away_are_forgotten() -> None:
    limiter = RateLimiter(rate_per_s=1.0, burst=2.0)
    for client in range(10_000):
        limiter.take(client, now=client / 10)
    assert len(limiter) <= 64


def test_a_client_that_has_used_its_tokens_is_not_forgotten_for_others() -> None:
    limiter = RateLimiter(rate_per_s=0.001, burst=2.0)
    limiter.take("a", 0.0)
    limiter.take("a", 0.0)
    for client in range(1000):
        limiter.take(client, now=1.0)
    assert limiter.take("a", 1.0) > 0.0


READS = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 400), st.booleans()), min_size=1, max_size=30)


@pytest.mark.slow
@given(READS)
def test_what_is_read_is_within_the_rate_as_an_oracle_counts_it(reads: list[tuple[float, int, bool]]) -> None:
    """The oracle: since each moment when nothing was left to read, and since the beginning, at most burst and rate have come."""
    rate, burst = 10.0, 100.0
    bucket = TokenBucket(rate, burst, burst, 0.0)
    now, since = 0.0, [(0.0, 0)]  # moments, and what had come by then
    total = 0
    for pause_s, amount, is_all in reads:
        now, total = now + pause_s, total + amount
        slack = min(burst + rate * (now - moment) - (total - by_then) for moment, by_then in since)
        assume(abs(slack) > 1e-6)
        is_within = bucket.read(amount, now, is_all=is_all)
        assert is_within == (slack > 0)
        if not is_within:
            return
        if is_all:
            since.append((now, total))


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 64)), max_size=30), st.data())
def test_who_keeps_to_the_rate_is_within_it_however_long_the_reader_stands_still_and_however_it_reads(
    sent: list[tuple[float, int]], data: st.DataObject
) -> None:
    rate, burst = 10.0, 64.0
    bucket, sender = TokenBucket(rate, burst, burst, 0.0), TokenBucket(rate, burst, burst, 0.0)
    now, unread = 0.0, 0
    for pause_s, amount in sent:
        now += pause_s
        amount = min(amount, int(sender.level(now)))
        sender.reserve(amount, now)
        unread += amount
        if data.draw(st.booleans()):  # it reads, in one piece or in several
            while unread:
                piece = data.draw(st.integers(1, unread))
                unread -= piece
                assert bucket.read(piece, now, is_all=unread == 0)


def test_one_that_has_gone_too_far_is_known_until_its_bucket_is_full_and_waits_in_a_row() -> None:
    limiter = RateLimiter(rate_per_s=2.0, burst=2.0)
    assert not limiter.knows("a", 0.0)
    assert [limiter.reserve("a", 0.0, 0.5) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert [limiter.reserve("a", 0.5, 0.5), limiter.knows("a", 2.4), limiter.knows("a", 2.5)] == [0.5, True, False]


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
