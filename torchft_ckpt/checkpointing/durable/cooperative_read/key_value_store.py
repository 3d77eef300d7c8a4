"""Blobs under names that all members of a cold start can write and read, over a store of torch.distributed.

Nothing that is read here is executed: blobs are bounded in length and have a digest. Every wait has a limit.

Whoever reaches the store may write to it. So members who have a token prove what they put there: by an HMAC of the value, of
the run and of the whole key, which names the topic and the member. A value of anybody else, or one for another run, topic or
member, is as if it were not there. That the store loses or withholds something cannot be told from a member that says nothing.
"""

from __future__ import annotations

import hashlib
import logging
import time
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from torch.distributed import DistError, Store

from torchft_ckpt.core.services.proofs import is_proof, key_for, proof
from torchft_ckpt.errors import SourceLostError, SourceRefusedError

logger = logging.getLogger(__name__)
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
