"""A proof is of one thing alone: whatever else it is held against, it is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchft_ckpt.core.services.proofs import RankProof, is_proof, key_for, proof

NONCE, OTHER = "1" * 32, "2" * 32
KEY = key_for("secret", "a test")


def test_words_are_proved_in_their_order_and_within_their_bounds() -> None:
    assert is_proof(proof(KEY, "ab", "c"), KEY, "ab", b"c")
    for words in (("a", "bc"), ("c", "ab"), ("abc",), ("ab", "c", "")):
        assert not is_proof(proof(KEY, "ab", "c"), KEY, *words)
    for key in (key_for("secret", "another test"), key_for("Secret", "a test"), b""):
        assert not is_proof(proof(KEY, "ab", "c"), key, "ab", "c")
    for claimed in ("", "é" * 64, proof(KEY, "ab", "c")[:-1], b"\xff".decode(errors="surrogateescape")):
        assert not is_proof(claimed, KEY, "ab", "c")
    assert proof(KEY, b"\xff".decode(errors="surrogateescape")) == proof(KEY, b"\xff"), "a header may hold any bytes"


@pytest.mark.parametrize(
    "altered",
    [
        lambda shown: shown.replace("Proof", "Bearer"),
        lambda shown: shown.replace("a" * 32, "b" * 32),
        lambda shown: shown + " ",
        lambda shown: "Proof",
        lambda shown: "",
        lambda shown: b"Proof \xff \xff".decode(errors="surrogateescape"),
    ],
)
def test_a_rank_and_its_service_prove_the_token_to_each_other(altered: Callable[[str], str]) -> None:
    rank = RankProof("secret", "group:1", "a" * 32)
    service = RankProof.of(rank.authorization, "secret", "group:1")
    assert service is not None and rank.is_answer(service.answer) and "secret" not in rank.authorization
    assert RankProof.of(altered(rank.authorization), "secret", "group:1") is None
    assert RankProof.of(rank.authorization, "guess", "group:1") is None
    assert RankProof.of(rank.authorization, "secret", "group:2") is None
    for claimed in ("", rank.authorization, RankProof("secret", "group:1", "b" * 32).answer):
        assert not rank.is_answer(claimed)
