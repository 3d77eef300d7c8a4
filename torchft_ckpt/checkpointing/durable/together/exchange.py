"""How members tell each other small things before they read together: blobs under names, and one choice among several.

Nothing that is read here is executed: blobs are JSON of types that are checked, bounded in length, and whoever sends another
is taken for absent. Every wait has a limit. It knows a store of torch; it does not know checkpoints.

Whoever reaches the store may write to it. So members who have a token prove what they put there: by an HMAC of the value, of the
run and of the whole key, which names the topic and the member. What another wrote, or was written for another run, topic or
member, is as if it were not there. That the store loses or withholds something cannot be told from a member that says nothing.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Protocol, TypeVar

import msgspec
from torch.distributed import DistError, DistNetworkError, Store

from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.core.proofs import is_proof, key_for, proof
from torchft_ckpt.errors import ConfigError, SourceLostError, SourceRefusedError

logger = logging.getLogger(__name__)
_M = TypeVar("_M")
MAX_BLOB_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024
"""torch's store closes the connection of who sends a value of more than 8 MiB."""
_WAIT_SLICE_S = 2.0
_PROBE_S = 1.0
_LOOK_AGAIN_S = 0.1
_PROOF_DIGITS = 64


class Exchange(Protocol):
    """What all members can write to and read from. Used by one thread at a time.

    Methods raise `SourceLostError` where it cannot be reached any more.
    """

    def put(self, key: str, data: bytes) -> None:
        """Publish a blob. Each key is put once, by one member."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Return a blob, waiting for it; None where it has not come in time, or is none."""

    def settle(self, key: str, proposal: bytes) -> bytes:
        """Propose something small; return what the first who proposed something under that key did, the same for all.

        Raises:
            SourceRefusedError: it is no member's.
        """


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a blob: it is compressed (RFC 1950) and cut."""

    num_chunks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES // _CHUNK_BYTES + 1)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOB_BYTES)]
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    proof: Annotated[str, msgspec.Meta(max_length=_PROOF_DIGITS)] = ""
    """That a member put it under this key in this run; empty: members have no token."""


_decode_head = msgspec.json.Decoder(_Head).decode


class StoreExchange:
    """An exchange over a store of torch.distributed that all members are connected to.

    Args:
        store: a `TCPStore`, or a `PrefixStore` of one; nobody else blocks on this client meanwhile.
        prefix: of all keys; another one for each time that members meet.
        token: shared secret of the job; empty: nothing is proved.
        run: names this time that members meet, over all jobs and stores; what was proved for another is not believed.
    """

    def __init__(self, store: Store, prefix: str = "", *, token: str = "", run: str = "") -> None:
        self._store = store
        self._prefix = prefix
        self._proof_key = key_for(token, "meeting") if token else b""
        self._run = run
        self._told: set[str] = set()

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
        digest = hashlib.sha256(data).hexdigest()
        head = _Head(len(chunks), len(data), digest, self._prove("blob", key, digest))
        try:
            for number, chunk in enumerate(chunks):
                self._store.set(self._key(key, number), chunk)  # type: ignore[arg-type]
            self._store.set(self._key(key), msgspec.json.encode(head).decode())
        except DistError as error:
            raise _lost(error) from error

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """See `Exchange.get`. What is there and is none may be replaced by one yet, until the timeout."""
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
                if key not in self._told:
                    self._told.add(key)
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
        """See `Exchange.settle`."""
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
        self._prefix = ""

    def bind(self, nonces: Mapping[int, str]) -> None:
        """Put a digest of what each member made up for this meeting before all topics from here on.

        So what is proved from here on was said in this meeting, even where its run has the name of an earlier one.
        """
        made_up = msgspec.json.encode(sorted(nonces.items()))
        self._prefix = f"{hashlib.sha256(made_up).hexdigest()}/"

    def say(self, topic: str, message: msgspec.Struct) -> None:
        """Tell all others something, once for each topic."""
        self._exchange.put(f"{self._prefix}{topic}/{self.member}", msgspec.json.encode(message))

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
                data = self._exchange.get(f"{self._prefix}{topic}/{member}", wait_s)
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
            settled = _decode_settled(self._exchange.settle(f"{self._prefix}{topic}", proposal))
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
