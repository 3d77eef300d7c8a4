"""One member's side of what members of a cold start tell each other: JSON of checked types, under topics, in a shared store.

The first member leads: what all have to do alike, it decides and publishes. The others wait for its word, with a limit. That it
lives they see in the store, which all of them reach: not by whether somebody listens at its address, who may be another, or may
not be reached from everywhere.

What they say are blobs in a store of torch.distributed. Nothing that is read here is executed: blobs are bounded in length and
have a digest. Every wait has a limit.

Whoever reaches the store may write to it. So members who have a token prove what they put there: by an HMAC of the value, of
the run and of the whole key, which names the topic and the member. A value of anybody else, or one for another run, topic or
member, is as if it were not there. That the store loses or withholds something cannot be told from a member that says nothing.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Annotated, TypeVar

import msgspec
from torch.distributed import DistError, Store

from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.core.services.proofs import is_proof, key_for, proof
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError
from torchft_ckpt.threads import Thread

MAX_BLOB_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024
"""torch's store closes the connection of a client that sends a value of more than 8 MiB."""
_LOOK_FIRST_S, _LOOK_AGAIN_S = 0.005, 0.25
"""Pauses between two looks at a key that is not there: the first, doubled until the last."""
_PROOF_DIGITS = 64


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a blob: it is compressed (RFC 1950) and cut."""

    num_chunks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES // _CHUNK_BYTES + 1)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES)]
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    proof: Annotated[str, msgspec.Meta(max_length=_PROOF_DIGITS)] = ""
    """Shows that a member put it under this key in this run; empty: members have no token."""


_decode_head = msgspec.json.Decoder(_Head).decode


class KeyValueStore:
    """Used by one thread at a time, but for `put`, which any thread may call.

    Methods raise `SourceLostError` where the store cannot be reached any more.

    Args:
        store: a `TCPStore`, or a `PrefixStore` of one, that all members are connected to; nobody else blocks on this client
            meanwhile.
        prefix: of all keys; another one for each time that members meet.
        token: shared secret of the job; empty: nothing is proved.
        run: names this time that members meet, over all jobs and stores; what was proved for another is not believed.
    """

    def __init__(self, store: Store, prefix: str = "", *, token: str = "", run: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._proof_key = key_for(token, "meeting") if token else b""
        self._run = run
        self._warned_of: set[str] = set()

    def put(self, key: str, data: bytes) -> None:
        """Publish a blob. Each key is put by one member, once where all are to read the same.

        Raises:
            ValueError: more than `MAX_BLOB_BYTES`.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ValueError(f"{key}: {len(data)} bytes are too many for the store")
        packed = zlib.compress(data, 1)
        chunks = [packed[at : at + _CHUNK_BYTES] for at in range(0, len(packed), _CHUNK_BYTES)]
        digest = hashlib.sha256(data).hexdigest()
        head = _Head(len(chunks), len(data), digest, self._prove("blob", key, digest))
        try:
            for number, chunk in enumerate(chunks):
                self._store.set(self._key(key, number), chunk)  # type: ignore[arg-type]
            self._store.set(self._key(key), msgspec.json.encode(head).decode())
        except DistError as error:
            raise _lost(error) from error

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return a blob, waiting for it; None where none has come in time. One that is broken may be replaced until then."""
        until = time.monotonic() + timeout_s
        try:
            while self._wait(key, until):
                data = self._read(key)
                left_s = until - time.monotonic()
                if data is not None or left_s <= 0:
                    return data
                time.sleep(min(_LOOK_AGAIN_S, left_s))
        except DistError as error:
            raise _lost(error) from error
        return None

    def _read(self, key: str) -> bytes | None:
        """Return the blob under a key that is set; None where it is none, or no member's."""
        try:
            head = _decode_head(self._store.get(self._key(key)))
            if self._proof_key and not is_proof(head.proof, self._proof_key, *self._words("blob", key, head.digest)):
                if key not in self._warned_of:
                    self._warned_of.add(key)
                    logger.warning(
                        "what is in the store about %s is not believed: it was not put there in this run by who knows our token",
                        key,
                    )
                return None
            keys = [self._key(key, number) for number in range(head.num_chunks)]
            return _unpack(head, [self._store.get(name) for name in keys]) if self._store.check(keys) else None
        except (msgspec.MsgspecError, UnicodeDecodeError, zlib.error):
            return None

    def settle(self, key: str, proposal: bytes) -> bytes:
        """Propose something small; return what the first who proposed something under that key did, the same for all.

        Raises:
            SourceRefusedError: it is no member's.
        """
        claimed = self._prove("settled", key, proposal).encode()
        try:
            settled = bytes(self._store.compare_set(self._key(key), "", (claimed + proposal).decode()))
        except DistError as error:
            raise _lost(error) from error
        if not self._proof_key:
            return settled
        claimed, settled = settled[:_PROOF_DIGITS], settled[_PROOF_DIGITS:]
        if not is_proof(claimed.decode(errors="replace"), self._proof_key, *self._words("settled", key, settled)):
            raise SourceRefusedError(
                f"what is settled about {key} is not believed: it was not put into the store in this run by who knows our token",
                "store",
            )
        return settled

    def _prove(self, kind: str, key: str, value: str | bytes) -> str:
        return proof(self._proof_key, *self._words(kind, key, value)) if self._proof_key else ""

    def _words(self, kind: str, key: str, value: str | bytes) -> tuple[str | bytes, ...]:
        return self._run, kind, self._key(key), value

    def _key(self, key: str, number: int | None = None) -> str:
        return f"{self._prefix}{key}" if number is None else f"{self._prefix}{key}/chunk{number}"

    def _wait(self, key: str, until: float) -> bool:
        """Look again and again: the store's own `wait` keeps its connection for itself, and another thread's `put` starves."""
        pause_s = _LOOK_FIRST_S
        while not self._store.check([self._key(key)]):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LOOK_AGAIN_S)
        return True


def _unpack(head: _Head, chunks: Sequence[bytes]) -> bytes | None:
    inflate = zlib.decompressobj()
    data = inflate.decompress(b"".join(chunks), head.num_bytes + 1)
    is_right = len(data) == head.num_bytes and hashlib.sha256(data).hexdigest() == head.digest
    return data if is_right else None


def _lost(error: DistError) -> SourceLostError:
    reason = str(error).partition("\n")[0][:300]
    return SourceLostError(f"the store at which the members meet cannot be reached any more: {reason}", "store")


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
