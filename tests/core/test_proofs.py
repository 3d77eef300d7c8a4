"""A proof is of one thing alone: whatever else it is held against, it is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchft_ckpt.core.services.proofs import ProvedSession, RankProof, is_proof, key_for, proof

NONCE, OTHER = "1" * 32, "2" * 32
KEY = key_for("secret", "a test")
HEADERS = ["one", "", "three"]


def sessions(
    token: str = "secret", server: str = "server", client_nonce: str = NONCE
) -> tuple[ProvedSession, ProvedSession]:
    """Those of a client and of a server that believe each other where nothing else is given."""
    return ProvedSession("secret", "server", NONCE, OTHER), ProvedSession(token, server, client_nonce, OTHER)


def test_words_are_proved_in_their_order_and_within_their_bounds() -> None:
    assert is_proof(proof(KEY, "ab", "c"), KEY, "ab", b"c")
    for words in (("a", "bc"), ("c", "ab"), ("abc",), ("ab", "c", "")):
        assert not is_proof(proof(KEY, "ab", "c"), KEY, *words)
    for key in (key_for("secret", "another test"), key_for("Secret", "a test"), b""):
        assert not is_proof(proof(KEY, "ab", "c"), key, "ab", "c")
    for claimed in ("", "é" * 64, proof(KEY, "ab", "c")[:-1], b"\xff".decode(errors="surrogateescape")):
        assert not is_proof(claimed, KEY, "ab", "c")
    assert proof(KEY, b"\xff".decode(errors="surrogateescape")) == proof(KEY, b"\xff"), "a header may hold any bytes"


def test_a_server_is_believed_that_knows_the_token_and_is_the_one_that_is_meant() -> None:
    client, server = sessions()
    assert client.is_server(server.server_proof)
    for differs in ({"token": "guess"}, {"server": "another"}, {"client_nonce": OTHER}):
        assert not client.is_server(sessions(**differs)[1].server_proof), differs


def test_a_request_is_believed_once_as_it_was_made() -> None:
    client, server = sessions()
    first = client.prove_request("POST", "/path", HEADERS, b"body")
    for altered in (
        ("GET", "/path", HEADERS, b"body"),
        ("POST", "/path?more", HEADERS, b"body"),
        ("POST", "/path", ["one", "three", ""], b"body"),
        ("POST", "/path", HEADERS, b"Body"),
    ):
        assert not server.is_next_request(first, *altered)
    assert server.is_next_request(first, "POST", "/path", HEADERS, b"body")
    assert not server.is_next_request(first, "POST", "/path", HEADERS, b"body"), "it was sent again"
    client.prove_request("GET", "/lost on the way", HEADERS, b"")
    assert server.is_next_request(client.prove_request("GET", "/x", [], b""), "GET", "/x", [], b"")
    assert not server.is_next_request(first, "POST", "/path", HEADERS, b"body")
    for nonsense in ("", "1", "x y", f"{10**30} {'0' * 64}", "² 0", f"-1 {'0' * 64}", f"9 {'é' * 64}"):
        assert not server.is_next_request(nonsense, "GET", "/x", [], b"")


def test_an_answer_is_believed_to_its_own_request_as_it_was_given() -> None:
    client, server = sessions()
    given = server.prove_answer("1 request", 200, HEADERS, b"body")
    assert client.is_answer(given, "1 request", 200, HEADERS, b"body")
    for altered in (
        ("2 request", 200, HEADERS, b"body"),
        ("1 request", 404, HEADERS, b"body"),
        ("1 request", 200, ["one", "two", "three"], b"body"),
        ("1 request", 200, HEADERS, b"Body"),
        ("1 request", 200, HEADERS, None),
    ):
        assert not client.is_answer(given, *altered)
    assert not client.is_answer(server.prove_answer("1", 200, HEADERS, None), "1", 200, HEADERS, b""), "parts follow"
    assert not client.is_answer(sessions(token="guess")[1].prove_answer("1", 200, [], b""), "1", 200, [], b"")


def test_the_digest_of_a_part_is_of_its_session_request_place_and_bytes() -> None:
    client, server = sessions()

    def digest(session: ProvedSession, request: str = "1 request", seed: int = 7, data: bytes = b"bytes") -> bytes:
        hasher = session.part_digest(request, seed)
        hasher.update(data[:2])
        hasher.update(memoryview(data)[2:])
        return hasher.digest()

    assert digest(client) == digest(server) and len(digest(server)) == 16
    others = [digest(server, "2 request"), digest(server, seed=8), digest(server, data=b"Bytes")]
    assert digest(client) not in [*others, digest(sessions(token="guess")[1]), digest(sessions(server="another")[1])]


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
