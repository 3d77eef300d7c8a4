"""This file decides how many requests and messages of one client are let through, and how many bytes leave.

It knows no clock and no network. All are token buckets. A bucket holds at most `burst` tokens and gains `rate_per_s` of them
a second; a request takes one. So over any `t` seconds at most `burst + rate_per_s * t` requests pass. Bytes are reserved before
they leave, in the order in which senders ask: over `t` seconds at most so many leave, and one piece more of each sender that used
its reservation late. What comes is counted when it is read (`TokenBucket.read`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

_SWEEP_FROM = 64
_BURST_S = 0.1
_PIECE_S = 0.02
_MIN_PIECE_BYTES = 16 * 1024
_MAX_PIECE_BYTES = 1024 * 1024
_LONGER = {126: 2, 127: 8}
"""Bytes that the length of a frame has, if seven bits do not hold it."""


@dataclass(slots=True)
class TokenBucket:
    """One client's tokens: `tokens` of them at `at`, where `at` is on the clock of whoever hands in `now`."""

    rate_per_s: float
    burst: float
    tokens: float
    at: float

    def take(self, now: float) -> float:
        """Take a token and return 0.0; where there is none, take nothing and return the seconds until there is one.

        A clock that went back gives no tokens and takes none away.
        """
        self.tokens = self.level(now)
        self.at = max(self.at, now)
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / self.rate_per_s

    def reserve(self, amount: float, now: float) -> float:
        """Take tokens, also those that are not there yet, or give some back; return the seconds until they may be used."""
        level = self.level(now)
        self.tokens = level - amount
        self.at = max(self.at, now)
        return max(-level, 0.0) / self.rate_per_s

    def read(self, amount: float, now: float, *, is_all: bool) -> bool:
        """Take tokens for what was read; whether that much may have come.

        They grow with the time since the last read, beyond the burst too: what comes while the reader stands still is read
        whole, in however many reads. `is_all`: it was all there was. Then what is left over is cut to the burst.
        """
        self.tokens += max(now - self.at, 0.0) * self.rate_per_s - amount
        self.at = max(self.at, now)
        is_within = self.tokens >= 0.0
        if is_all:
            self.tokens = min(self.tokens, self.burst)
        return is_within

    def level(self, now: float) -> float:
        return min(self.burst, self.tokens + max(now - self.at, 0.0) * self.rate_per_s)


def bucket_of_bytes(bytes_per_s: float, now: float) -> TokenBucket:
    """Return a bucket for bytes: full with those of a tenth of a second, so that who wakes a little late loses nothing."""
    return TokenBucket(bytes_per_s, _BURST_S * bytes_per_s, _BURST_S * bytes_per_s, now)


def piece_bytes(bytes_per_s: float) -> int:
    """Return how many bytes a sender reserves at a time: those of 20 ms, within limits."""
    return int(min(max(_PIECE_S * bytes_per_s, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES))


class RateLimiter:
    """A bucket for each client, full when the client is first seen.

    A bucket that has filled up again says nothing any more and is forgotten, so what is kept grows with the clients of the
    last `burst / rate_per_s` seconds, not with all there ever were.

    Args:
        rate_per_s: requests a second that a client may go on with for ever; positive.
        burst: requests that it may make at once; at least 1.
    """

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: dict[Hashable, TokenBucket] = {}
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, client: Hashable, now: float) -> float:
        """Count one request of a client: 0.0 lets it through, else it is refused and may be made in so many seconds."""
        return self._bucket(client, now).take(now)

    def _bucket(self, client: Hashable, now: float) -> TokenBucket:
        bucket = self._buckets.get(client)
        if bucket is None:
            if len(self._buckets) >= self._sweep_at:
                self._sweep(now)
            bucket = self._buckets[client] = TokenBucket(self._rate_per_s, self._burst, self._burst, now)
        return bucket

    def reserve(self, client: Hashable, now: float, most_s: float) -> float:
        """Take a token, also one that is not there yet, and return the seconds until it is; longer than `most_s`: take none."""
        bucket = self._bucket(client, now)
        wait_s = bucket.reserve(1.0, now)
        if wait_s > most_s:
            bucket.reserve(-1.0, now)
        return wait_s

    def knows(self, client: Hashable, now: float) -> bool:
        """Whether a client has done so much lately that its bucket is not full."""
        return client in self._buckets and self._buckets[client].level(now) < self._burst

    def _sweep(self, now: float) -> None:
        """Forget full buckets; the next sweep comes when there are twice as many, so that a request pays O(1) for it."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.level(now) < self._burst}
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self._buckets))


class FrameCounter:
    """Counts the frames of one WebSocket (RFC 6455) in the bytes that come, before anybody takes them apart: those of control and
    of pieces of messages too."""

    def __init__(self) -> None:
        self._head = b""
        """The beginning of a frame's head that is not here whole."""
        self._num_to_skip = 0
        """Of the frame that was counted last, so many bytes are still to come."""

    def count(self, data: bytes) -> int:
        """Return how many heads of frames end in these bytes, which follow those of the last call."""
        data, at, num = self._head + data, self._num_to_skip, 0
        while at + 2 <= len(data):
            length = data[at + 1] & 127
            num_longer = _LONGER.get(length, 0)
            start = at + 2 + num_longer + (4 if data[at + 1] & 128 else 0)  # a client masks what it says
            if start > len(data):
                break
            if num_longer:
                length = int.from_bytes(data[at + 2 : at + 2 + num_longer], "big")
            at, num = start + length, num + 1
        self._head, self._num_to_skip = data[at:], max(at - len(data), 0)
        return num
