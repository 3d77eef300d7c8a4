"""One member's side of what members of a cold start tell each other: JSON of checked types, under topics, in a shared store.

The first member leads: what all have to do alike, it decides and publishes. The others wait for its word, with a limit.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.durable.cooperative_read.key_value_store import WAIT_SLICE_S, KeyValueStore
from torchft_ckpt.errors import ConfigError, SourceLostError

logger = logging.getLogger(__name__)
_M = TypeVar("_M")
LEADER = 0
_PROBE_S = 1.0
_LEADERS_FACTOR = 4.0


class Rendezvous:
    """Publishes what this member says, collects what the others say, and agrees on what the first member says. On one thread.

    Methods raise `SourceLostError` where the store cannot be reached any more.

    Args:
        store: all members write to it.
        member: this one's number, from 0.
        num_members: how many there are.
        patience_s: how long to wait for a member that says nothing, or that cannot be reached.
    """

    def __init__(self, store: KeyValueStore, member: int, num_members: int, patience_s: float) -> None:
        if not 0 <= member < num_members:
            raise ConfigError(f"member={member}: a number below {num_members} was expected", "member")
        self.store = store
        self.member = member
        self.num_members = num_members
        self.patience_s = patience_s
        self.addresses: dict[int, str] = {}
        """Where the others listen, as far as they have said so."""
        self._prefix = ""
        self._reached_at: dict[int, float] = {}

    @property
    def leads(self) -> bool:
        """Whether this is the first member."""
        return self.member == LEADER

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
            topic: what about.
            decode: reads a message, or raises `msgspec.MsgspecError`.
            members: whom to wait for; this one is left out.
            patience_s: instead of that of all topics.
            on_message: called with each message at once.
        """
        until = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        waiting = [member for member in members if member != self.member]
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
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
            topic: what about.
            decode: reads a message, or raises `msgspec.MsgspecError`.
            patience_s: default: four times that for other members, as the first member waits for those before it speaks.

        Raises:
            SourceLostError: the first member is gone.
        """
        limit_s = _LEADERS_FACTOR * self.patience_s if patience_s is None else patience_s
        found = self.collect(topic, decode, [LEADER], patience_s=limit_s)
        if LEADER not in found and self.is_gone(LEADER):
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
        """Whether nobody listens at a member's address any more, or it cannot be reached for as long as one is waited for."""
        try:
            address = parse_metadata(self.addresses.get(member, ""))
        except SourceLostError:
            return False  # it has not said where it is
        now = time.monotonic()
        try:
            with socket.create_connection((address.host, address.port), timeout=_PROBE_S):
                self._reached_at[member] = now
                return False
        except ConnectionRefusedError:
            logger.info("member %d is gone: nobody listens at %s", member, address)
            return True
        except OSError as error:
            logger.debug("member %d may be gone: %s", member, error)
            return now - self._reached_at.setdefault(member, now) > self.patience_s

    def _get(self, topic: str, member: int, timeout_s: float) -> bytes | None:
        return self.store.get(f"{self._prefix}{topic}/{member}", timeout_s)
