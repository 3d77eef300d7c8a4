"""This file decides whether a rank and the rank 0 that it finds at a store are of one replica group. It knows no store.

Rank 0 writes a `Claim` at the store where the ranks of its group find each other; the others read it. Several groups may have
been given one store by mistake (one `MASTER_PORT` in every shell): the second rank 0 is refused while the first lives, and a
rank that was started as one of another group is refused too. What a dead process has left is written over, and waited out.

Whoever reaches the store may write there. Where the job has a token a rank 0 proves its claim, and the others believe no other.
"""

from __future__ import annotations

import msgspec

from torchft_ckpt.core.services.proofs import is_proof, key_for, proof
from torchft_ckpt.errors import ConfigError


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank 0 says of itself."""

    name: str
    """Of its group, as it was started with; empty: none was given."""
    replica_id: str
    process: str
    """A word that no other process has."""
    store_address: str
    """`host:port` of the store that it hosts."""
    manager_address: str = ""
    """`host:port` of its manager service; empty: that has not started yet."""
    proof: str = ""
    """That who knows the token wrote all of this under this key, in this job; empty: there is no token."""

    @property
    def listens_at(self) -> str:
        """Where somebody listens for as long as it takes part."""
        return self.manager_address or self.store_address


encode_claim = msgspec.json.Encoder().encode
_PURPOSE = "claim of a group"
_decoder = msgspec.json.Decoder(Claim)


def decode_claim(text: str, place: str) -> Claim:
    """Read what a rank 0 wrote at a store.

    Raises:
        ConfigError: it is of another version.
    """
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError as error:
        message = f"what the store at {place} holds of its group is of another version of torchft_ckpt: {error}"
        raise ConfigError(message, party=place) from error


def with_proof(claim: Claim, token: str, job: str, key: str) -> Claim:
    """Return a claim with its proof; as it is where there is no token. `key`: of the store, under which it is written."""
    return msgspec.structs.replace(claim, proof=proof(*_words(claim, token, job, key)) if token else "")


def is_believed(claim: Claim, token: str, job: str, key: str) -> bool:
    """Whether a claim comes from who knows the token; every claim does where there is none."""
    return not token or is_proof(claim.proof, *_words(claim, token, job, key))


def _words(claim: Claim, token: str, job: str, key: str) -> tuple[bytes, str, str, bytes]:
    return key_for(token, _PURPOSE), job, key, encode_claim(msgspec.structs.replace(claim, proof=""))


def claim_key(run_id: str) -> str:
    """Return the key of the claim.

    How often a launcher has started its ranks again is no part of it: each of torchrun's agents counts for itself, and one
        whose
    rank did not fail counts fewer (https://github.com/pytorch/pytorch/issues/135712).

    Args:
        run_id: of the launcher's run; empty: there is no launcher.
    """
    return f"torchft_ckpt/{run_id}/group"


def is_own_earlier(earlier: Claim, claim: Claim) -> bool:
    """Whether a claim is of a Manager that this process made before for this group."""
    return (earlier.process, earlier.name) == (claim.process, claim.name)


def why_taken(earlier: Claim, place: str) -> str:
    """Say why a rank 0 cannot use a store at which a living process has a claim of another group."""
    return (
        f"the store at {place} is that of replica group {group_of(earlier)}, which lives ({earlier.listens_at}): each replica"
        " group of several ranks needs a store of its own; set another MASTER_PORT for this one (or store_port)"
    )


def why_another_group(claim: Claim, name: str, group_rank: int, place: str) -> str:
    """Say why a rank is none of the group whose rank 0 has this claim; empty where nothing speaks against it."""
    if not name or not claim.name or name == claim.name:
        return ""
    return (
        f"group rank {group_rank} was started as one of replica group {name!r}, and at the store at {place} is replica group"
        f" {claim.name!r}: all ranks of a group have one replica_id, and each group of several ranks a store of its own; set"
        " another MASTER_PORT for each group (or store_port)"
    )


def group_of(claim: Claim) -> str:
    """Return how to call the group of a claim."""
    return repr(claim.name or claim.replica_id)
