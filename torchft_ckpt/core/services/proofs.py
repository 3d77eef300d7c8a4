"""Proofs that somebody knows the token of a job, which is not sent: HMAC-SHA256 (RFC 2104) by keys that are made of it.

It decides what is proved about what; it knows no socket. Each use of the token has a key of its own, so that a proof that was
made for one is none for another. Words go in with their lengths, so that none can be taken for a part of its neighbour.

Over a connection to an address that anybody may have written down, both sides prove the token to each other first:

1. The client sends a nonce. The server answers with one of its own, and a proof over both and its identity, a random name that
   the client learnt from somebody who knows the token.
2. Both make a session key of the same. Each request is proved with it: its number, method, path, headers and body.
3. Each answer is proved: which request it answers, status, headers and body. The bytes of parts are not known when an answer
   begins; instead the digest that follows each of them is an HMAC by the session key.

So who stands between the two can read what is sent, hold it up and end it, but alters nothing unseen.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Protocol

PROOF_HEADER = "X-Ckpt-Proof"
PART_DIGEST_BYTES = 16
"""As long as the digests that parts have without a token."""


def key_for(token: str, purpose: str) -> bytes:
    """Return the key of one use of the token."""
    return hmac.digest(token.encode(), b"torchft_ckpt " + purpose.encode(), "sha256")


def proof(key: bytes, *words: str | bytes) -> str:
    """Return in 64 hex digits that who has the key says these words, in this order."""
    mac = hmac.new(key, digestmod="sha256")
    for word in words:
        data = word.encode(errors="surrogateescape") if isinstance(word, str) else word  # a header may hold any bytes
        mac.update(len(data).to_bytes(8, "big") + data)
    return mac.hexdigest()


def is_proof(claimed: str, key: bytes, *words: str | bytes) -> bool:
    """Whether a text is the proof of these words; compared in constant time."""
    return _is_same(claimed, proof(key, *words))


def _is_same(claimed: str, right: str) -> bool:
    return hmac.compare_digest(claimed.encode(errors="replace"), right.encode(errors="replace"))


class RankProof:
    """Proofs of the token between a rank and the manager service of its group, whose address it found at a store.

    Args:
        replica_id: of the group; a group that starts anew has another one.
    """

    SCHEME = "Proof"

    def __init__(self, token: str, replica_id: str, nonce: str) -> None:
        key = key_for(token, "rank of a group")
        self._nonce = nonce
        self._ours = proof(key, "rank", replica_id, nonce)
        self.answer = proof(key, "manager service", replica_id, nonce)
        """Sent by the service beside its answer."""

    @property
    def authorization(self) -> str:
        """Return the header that the rank sends in place of the token."""
        return f"{self.SCHEME} {self._nonce} {self._ours}"

    @classmethod
    def of(cls, authorization: str, token: str, replica_id: str) -> RankProof | None:
        """Return the proof that an `Authorization` header carries; None where it is none of this group and token."""
        scheme, _, rest = authorization.partition(" ")
        claimed = cls(token, replica_id, rest.partition(" ")[0])
        return claimed if scheme == cls.SCHEME and _is_same(authorization, claimed.authorization) else None

    def is_answer(self, claimed: str) -> bool:
        """Whether what came beside the answer is the service's proof."""
        return _is_same(claimed, self.answer)


class PartDigest(Protocol):
    """Takes the bytes of a part."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Take more of them."""

    def digest(self) -> bytes:
        """Return the digest of what was taken."""


class ProvedSession:
    """One connection over which the token is proved; the same on both sides."""

    def __init__(self, token: str, server: str, client_nonce: str, server_nonce: str) -> None:
        key = key_for(token, "checkpoint connection")
        self.server_proof = proof(key, "server", server, client_nonce, server_nonce)
        """The server's answer to the client's nonce."""
        self._key = bytes.fromhex(proof(key, "session", server, client_nonce, server_nonce))
        self._number = 0

    def is_server(self, claimed: str) -> bool:
        """Whether what came as the server's proof is it."""
        return _is_same(claimed, self.server_proof)

    def prove_request(self, method: str, path: str, headers: Iterable[str], body: bytes) -> str:
        """Return what the client sends beside its next request: a number, which grows, and the proof."""
        self._number += 1
        return f"{self._number} {self._request(self._number, method, path, headers, body)}"

    def is_next_request(self, claimed: str, method: str, path: str, headers: Iterable[str], body: bytes) -> bool:
        """Whether what came beside a request proves it, and it was not sent before."""
        number_text, _, claimed_proof = claimed.partition(" ")
        number = int(number_text) if number_text.isascii() and number_text.isdigit() and len(number_text) < 19 else 0
        wanted = self._request(number, method, path, headers, body)
        if number <= self._number or not _is_same(claimed_proof, wanted):
            return False
        self._number = number
        return True

    def prove_answer(self, request: str, status: int, headers: Iterable[str], body: bytes | None) -> str:
        """Return what the server sends beside an answer.

        Args:
            request: what the client sent beside the request that is answered.
            body: of the answer; None: parts follow, each with a digest of this session.
        """
        return proof(
            self._key, "answer", request, str(status), "parts" if body is None else "body", body or b"", *headers
        )

    def is_answer(self, claimed: str, request: str, status: int, headers: Iterable[str], body: bytes | None) -> bool:
        """Whether what came beside an answer proves it; arguments as of `prove_answer`."""
        return _is_same(claimed, self.prove_answer(request, status, headers, body))

    def part_digest(self, request: str, seed: int) -> PartDigest:
        """Begin the digest of a part of the answer to a request; `seed` is its number there."""
        return _PartDigest(bytes.fromhex(proof(self._key, "part", request, str(seed))))

    def _request(self, number: int, method: str, path: str, headers: Iterable[str], body: bytes) -> str:
        return proof(self._key, "request", str(number), method, path, body, *headers)


class _PartDigest:
    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")

    def update(self, data: bytes | memoryview, /) -> None:
        self._mac.update(data)

    def digest(self) -> bytes:
        return self._mac.digest()[:PART_DIGEST_BYTES]
