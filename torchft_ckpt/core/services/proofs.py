"""Proofs that somebody knows the token of a job, which is not sent: HMAC-SHA256 (RFC 2104) by keys that are made of it.

It decides what is proved about what; it knows no socket. Each use of the token has a key of its own, so that a proof that was
made for one is none for another. Words go in with their lengths, so that none can be taken for a part of its neighbour.
"""

from __future__ import annotations

import hmac

PROOF_HEADER = "X-Ckpt-Proof"


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
