"""One member's side of what members of a cold start tell each other: JSON of checked types, under topics, in a shared store.

The first member leads: what all have to do alike, it decides and publishes. The others wait for its word, with a limit. That it
lives they see in the store, which all of them reach: not by whether somebody listens at its address, who may be another, or may
not be reached from everywhere.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Annotated, TypeVar

import msgspec

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.durable.cooperative_read.key_value_store import KeyValueStore
from torchft_ckpt.errors import ConfigError, SourceLostError
from torchft_ckpt.threads import Thread

logger = logging.getLogger(__name__)
_M = TypeVar("_M")
LEADER = 0
WAIT_SLICE_S = 2.0
"""So long a word of one member is waited for before it is looked whether members are gone."""
_PROBE_S = 1.0
_LEADERS_FACTOR = 4.0
_BEATS = 10
"""So often in the time after which it counts as gone the first member shows that it lives."""
_BEAT, _FAILED = f"beat/{LEADER}", f"failed/{LEADER}"
MAX_REASON = 2000


class _Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the first member: it says nothing more."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


_decode_failure = msgspec.json.Decoder(_Failure).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def told(reason: str) -> str:
    """Return a reason as it can be told to others: of a bounded length, and without what UTF-8 has not (names of files)."""
    return reason[:MAX_REASON].encode(errors="replace").decode()


class Rendezvous:
    """Publishes what this member says, collects what the others say, and agrees on what the first member says. On one thread.

    Methods raise `SourceLostError` where the store cannot be reached any more.

    Args:
        member: this one's number, from 0.
        patience_s: how long to wait for a member that says nothing, or that cannot be reached. The first member is gone where
            it has not shown for so long that it lives.
    """

    def __init__(self, store: KeyValueStore, member: int, num_members: int, patience_s: float) -> None:
        if not 0 <= member < num_members:
            raise ConfigError(f"member={member}: a number below {num_members} was expected", "member")
        self.store = store
        self.member = member
        self.num_members = num_members
        self.patience_s = patience_s
        self.addresses: dict[int, str] = {}
        """Of the others, as far as they have said where they listen."""
        self._prefix = ""
        self._unreached_since: dict[int, float] = {}
        self._is_over = threading.Event()
        self._beat: bytes | None = None
        """The last one that was seen of the first member."""
        self._beat_at = 0.0
        """When it was seen; where that was before it was waited for, since when it is."""
        self._failure: _Failure | None = None
        """The last word of the first member, where it failed."""

    @property
    def leads(self) -> bool:
        """Whether this is the first member."""
        return self.member == LEADER

    def start_leading(self) -> None:
        """Show the others that the first member lives, until `stop_leading`."""
        self.store.put(_BEAT, b"0")
        Thread(self._beat_on, "torchft_ckpt-leads").start()

    def stop_leading(self) -> None:
        """Show it no longer. May be called twice, and without `start_leading`."""
        self._is_over.set()

    def _beat_on(self) -> None:
        for number in count(1):
            if self._is_over.wait(self.patience_s / _BEATS):
                return
            try:
                self.store.put(_BEAT, str(number).encode())
            except SourceLostError as error:
                logger.debug("the others do not see that member %d lives: %s", self.member, error)

    def fail(self, reason: str) -> None:
        """As the first member, tell those who wait for a word that none comes any more."""
        self.store.put(_FAILED, msgspec.json.encode(_Failure(told(reason))))

    def bind(self, nonces: Mapping[int, str]) -> None:
        """Put a digest of what each member made up for this start before all topics from here on.

        So what is proved from here on was said in this start, even where its run has the name of an earlier one.
        """
        made_up = msgspec.json.encode(sorted(nonces.items()))
        self._prefix = f"{hashlib.sha256(made_up).hexdigest()}/"

    def publish(self, topic: str, message: msgspec.Struct) -> None:
        """Tell all others something, once for each topic."""
        self.store.put(f"{self._prefix}{topic}/{self.member}", msgspec.json.encode(message))

    def collect(
        self,
        topic: str,
        decode: Callable[[bytes], _M],
        members: Iterable[int],
        *,
        patience_s: float | None = None,
        on_message: Callable[[int, _M], None] | None = None,
    ) -> dict[int, _M]:
        """Return what others have published, by member, without those that publish nothing in time, or nothing that can be read.

        A member that is gone is not waited for.

        Args:
            decode: reads a message, or raises `msgspec.MsgspecError`.
            on_message: called with each message at once.
        """
        until = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        waiting = [member for member in members if member != self.member]
        self._beat_at = time.monotonic()
        found: dict[int, _M] = {}
        while waiting:
            left_s = until - time.monotonic()
            silent: list[int] = []
            for member in waiting:
                data = self._get(topic, member, 0.0 if silent else max(min(left_s, WAIT_SLICE_S), 0.0))
                if data is None and self.is_gone(member):
                    data = self._get(topic, member, 0.0)  # it may have published that last
                elif data is None:
                    silent.append(member)
                if data is None:
                    continue
                try:
                    message = found[member] = decode(data)
                except _UNREADABLE as error:
                    logger.warning("member %d said something about %s that cannot be read: %s", member, topic, error)
                    continue
                if on_message is not None:
                    on_message(member, message)
            waiting = silent
            if left_s <= 0:
                break
        return found

    def ask_leader(self, topic: str, decode: Callable[[bytes], _M], *, patience_s: float | None = None) -> _M | None:
        """Return what the first member publishes; None where it is there and publishes nothing in time.

        Args:
            decode: reads a message, or raises `msgspec.MsgspecError`.
            patience_s: default: four times that for other members, as the first member waits for those before it speaks.

        Raises:
            SourceLostError: the first member is gone, or has failed.
        """
        limit_s = _LEADERS_FACTOR * self.patience_s if patience_s is None else patience_s
        found = self.collect(topic, decode, [LEADER], patience_s=limit_s)
        if LEADER not in found and self.is_gone(LEADER):
            if self._failure is not None:
                raise SourceLostError(
                    f"the first member, which leads the cold start, failed: {self._failure.reason}", "member 0"
                )
            raise SourceLostError(
                f"member {LEADER}, which leads the cold start, is gone: nothing more is heard about {topic}", "member 0"
            )
        return found.get(LEADER)

    def agree(
        self, topic: str, decode: Callable[[bytes], _M], word: _M | None = None, *, patience_s: float | None = None
    ) -> _M:
        """Return the first member's word, the same for all: it publishes `word`, the others wait for it.

        Raises:
            SourceLostError: the first member has said nothing in time, or is gone.
        """
        if self.leads and isinstance(word, msgspec.Struct):
            self.publish(topic, word)
            return word
        found = self.ask_leader(topic, decode, patience_s=patience_s)
        if found is None:
            raise SourceLostError(
                f"member {LEADER}, which leads the cold start, has said nothing about {topic} in time", "member 0"
            )
        return found

    def is_gone(self, member: int) -> bool:
        """Whether nobody listens at a member's address any more, or it cannot be reached for as long as one is waited for.

        The first member: whether it has failed, or has not shown for so long that it lives. One that never came is not gone.
        """
        if member == LEADER:
            return self._is_leader_gone()
        try:
            address = parse_metadata(self.addresses.get(member, ""))
        except SourceLostError:
            return False  # it has not said where it is
        now = time.monotonic()
        try:
            with socket.create_connection((address.host, address.port), timeout=_PROBE_S):
                self._unreached_since.pop(member, None)
                return False
        except ConnectionRefusedError:
            logger.info("member %d is gone: nobody listens at %s", member, address)
            return True
        except OSError as error:
            logger.debug("member %d may be gone: %s", member, error)
            return now - self._unreached_since.setdefault(member, now) > self.patience_s

    def _is_leader_gone(self) -> bool:
        failure = self.store.get(_FAILED, 0.0)
        if failure is not None:
            try:
                self._failure = _decode_failure(failure)
            except _UNREADABLE as error:
                logger.warning("why the first member failed cannot be read: %s", error)
            else:
                return True
        beat, now = self.store.get(_BEAT, 0.0), time.monotonic()
        if beat is not None and beat != self._beat:
            self._beat, self._beat_at = beat, now
        return self._beat is not None and now - self._beat_at > self.patience_s

    def _get(self, topic: str, member: int, timeout_s: float) -> bytes | None:
        return self.store.get(f"{self._prefix}{topic}/{member}", timeout_s)
