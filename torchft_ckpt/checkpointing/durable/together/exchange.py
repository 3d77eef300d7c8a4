"""How members tell each other small things before they read together: blobs under names, and one choice among several.

Nothing that is read here is executed: blobs are JSON of types that are checked, bounded in length, and whoever sends another
is taken for absent. Every wait has a limit. It knows a store of torch; it does not know checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Annotated, Protocol, TypeVar

import msgspec
from torch.distributed import DistError, DistNetworkError, Store

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError

logger = logging.getLogger(__name__)
_M = TypeVar("_M")
MAX_BLOB_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024
"""torch's store closes the connection of who sends a value of more than 8 MiB."""
_WAIT_SLICE_S = 2.0
_PROBE_S = 1.0


class Exchange(Protocol):
    """What all members can write to and read from. Used by one thread at a time.

    Methods raise `SourceLostError` where it cannot be reached any more.
    """

    def put(self, key: str, data: bytes) -> None:
        """Publish a blob. Each key is put once, by one member."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return a blob, waiting for it; None where it has not come in time, or is none."""

    def settle(self, key: str, proposal: bytes) -> bytes:
        """Propose something small; return what the first who proposed something under that key did, the same for all."""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a blob: it is compressed (RFC 1950) and cut."""

    num_chunks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES // _CHUNK_BYTES + 1)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES)]
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


_decode_head = msgspec.json.Decoder(_Head).decode


class StoreExchange:
    """An exchange over a store of torch.distributed that all members are connected to.

    Args:
        store: a `TCPStore`, or a `PrefixStore` of one; nobody else blocks on this client meanwhile.
        prefix: of all keys; another one for each time that members meet.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    def put(self, key: str, data: bytes) -> None:
        """See `Exchange.put`.

        Raises:
            SourceLostError: the store is gone.
            ValueError: more than `MAX_BLOB_BYTES`.
        """
        if len(data) > MAX_BLOB_BYTES:
            raise ValueError(f"{key}: {len(data)} bytes are too many to exchange")
        packed = zlib.compress(data, 1)
        chunks = [packed[at : at + _CHUNK_BYTES] for at in range(0, len(packed), _CHUNK_BYTES)]
        head = _Head(len(chunks), len(data), hashlib.sha256(data).hexdigest())
        try:
            for number, chunk in enumerate(chunks):
                self._store.set(self._key(key, number), chunk)  # type: ignore[arg-type]
            self._store.set(self._key(key), msgspec.json.encode(head).decode())
        except DistError as error:
            raise _lost(error) from error

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """See `Exchange.get`."""
        until = time.monotonic() + timeout_s
        try:
            if not self._wait(key, until):
                return None
            head = _decode_head(self._store.get(self._key(key)))
            keys = [self._key(key, number) for number in range(head.num_chunks)]
            if not self._store.check(keys):
                return None
            return _unpack(head, [self._store.get(name) for name in keys])
        except DistError as error:
            raise _lost(error) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, zlib.error):
            return None

    def settle(self, key: str, proposal: bytes) -> bytes:
        """See `Exchange.settle`."""
        try:
            return self._store.compare_set(self._key(key), "", proposal.decode())
        except DistError as error:
            raise _lost(error) from error

    def _key(self, key: str, number: int | None = None) -> str:
        return f"{self._prefix}{key}" if number is None else f"{self._prefix}{key}/chunk{number}"

    def _wait(self, key: str, until: float) -> bool:
        while not self._store.check([self._key(key)]):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            try:
                self._store.wait([self._key(key)], timedelta(seconds=max(min(left_s, _WAIT_SLICE_S), 0.01)))
            except DistNetworkError:
                raise
            except DistError:
                continue  # it was not there in time
        return True


def _unpack(head: _Head, chunks: Sequence[bytes]) -> bytes | None:
    inflate = zlib.decompressobj()
    data = inflate.decompress(b"".join(chunks), head.num_bytes + 1)
    is_right = len(data) == head.num_bytes and hashlib.sha256(data).hexdigest() == head.digest
    return data if is_right else None


def _lost(error: DistError) -> SourceLostError:
    reason = str(error).partition("\n")[0][:300]
    return SourceLostError(f"the store at which the members meet cannot be reached any more: {reason}", "store")


class Meeting:
    """One member's side of what all of them do together: say something, hear the others, settle who is still there.

    Args:
        exchange: what they all write to.
        member: this one's number, from 0.
        num_members: how many there are.
        patience_s: how long a member is waited for that says nothing.
    """

    def __init__(self, exchange: Exchange, member: int, num_members: int, patience_s: float) -> None:
        if not 0 <= member < num_members:
            raise ConfigError(f"member={member}: a number below {num_members} was expected", "member")
        self.member = member
        self.num_members = num_members
        self.patience_s = patience_s
        self.addresses: dict[int, str] = {}
        """Where the others listen, as far as they have said so."""
        self._exchange = exchange

    def say(self, topic: str, message: msgspec.Struct) -> None:
        """Tell all others something, once for each topic."""
        self._exchange.put(f"{topic}/{self.member}", msgspec.json.encode(message))

    def hear(
        self,
        topic: str,
        decode: Callable[[bytes], _M],
        members: Iterable[int],
        *,
        patience_s: float | None = None,
        on_heard: Callable[[int, _M], None] | None = None,
    ) -> dict[int, _M]:
        """Return what others said, by member. Who says nothing in time, or nothing that can be read, is not in it.

        Who does not listen at its address any more is not waited for.

        Args:
            topic: what about.
            decode: reads a message, or raises `msgspec.MsgspecError`.
            members: whom to wait for; this one is left out.
            patience_s: instead of that of all topics.
            on_heard: told each message at once.
        """
        until = time.monotonic() + (self.patience_s if patience_s is None else patience_s)
        waiting = [member for member in members if member != self.member]
        heard: dict[int, _M] = {}
        while waiting:
            left_s = until - time.monotonic()
            still: list[int] = []
            for member in waiting:
                wait_s = 0.0 if still else max(min(left_s, _WAIT_SLICE_S), 0.0)
                data = self._exchange.get(f"{topic}/{member}", wait_s)
                if data is None:
                    if self._may_be_alive(member):
                        still.append(member)
                    continue
                try:
                    message = heard[member] = decode(data)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    logger.warning("member %d said something about %s that cannot be read: %s", member, topic, error)
                    continue
                if on_heard is not None:
                    on_heard(member, message)
            waiting = still
            if left_s <= 0:
                break
        return heard

    def _may_be_alive(self, member: int) -> bool:
        """Whether a member may still be there: False only where its machine answers that nobody listens at its address."""
        try:
            address = parse_metadata(self.addresses.get(member, ""))
        except SourceLostError:
            return True  # it has not said where it is
        try:
            with socket.create_connection((address.host, address.port), timeout=_PROBE_S):
                return True
        except ConnectionRefusedError:
            logger.info("member %d is gone: nobody listens at %s", member, address)
            return False
        except OSError as error:
            logger.debug("member %d may be gone: %s", member, error)
            return True

    def settle(self, topic: str, members: Iterable[int], word: str = "") -> tuple[tuple[int, ...], str]:
        """Return who takes part from here on, and a word about it: as the first member saw it that came here.

        Raises:
            SourceRefusedError: this member does not take part, or what was settled cannot be read.
        """
        proposal = msgspec.json.encode(_Settled(sorted({*members, self.member}), word))
        try:
            settled = _decode_settled(self._exchange.settle(topic, proposal))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceRefusedError(f"what was settled about {topic} cannot be read: {error}", "store") from error
        if self.member not in settled.members:
            raise SourceRefusedError(
                f"the others did not wait for member {self.member} any longer, and go on without it", "members"
            )
        return tuple(sorted(member for member in {*settled.members} if member < self.num_members)), settled.word


class _Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    members: list[Annotated[int, msgspec.Meta(ge=0)]]
    word: Annotated[str, msgspec.Meta(max_length=256)]


_decode_settled = msgspec.json.Decoder(_Settled).decode
