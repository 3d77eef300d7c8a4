"""Towards an address that anybody may have written down the token is proved, not sent; and what is answered there is proved
too.

A relay stands on the way: it reads everything, and what it alters is not used.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import xxhash
from attacks.f20_store_poisons_cold_start import with_poison
from support.relay import Passing, Relay

from torchft_ckpt import HTTPTransport
from torchft_ckpt.checkpointing.fetching.connection import FetchOptions, SourceConnection
from torchft_ckpt.checkpointing.protocol import SourceAddress, parse_metadata
from torchft_ckpt.checkpointing.resharding.fetch import ShardedFetch
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.core.boxes.geometry import whole
from torchft_ckpt.errors import DigestMismatchError, SourceLostError, SourceRefusedError, TransferError

STEP = 3
TOKEN = "a secret"
LONG = timedelta(seconds=30)


def make_state() -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.full((64, 64), float(number + 1)) for number in range(4)}


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    transport: HTTPTransport[Any] = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", token=TOKEN)
    transport.send_checkpoint([], STEP, make_state(), LONG)
    yield transport
    transport.shutdown()


def port_of(transport: HTTPTransport[Any]) -> int:
    return parse_metadata(transport.metadata()).port


def fetch(port: int, identity: str, token: str = TOKEN) -> dict[str, torch.Tensor]:
    """Fetch the parts of the state as `SharedRead` does."""
    got = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}
    options = FetchOptions(
        connect_timeout_s=10,
        stall_timeout_s=10,
        num_streams=1,
        max_manifest_bytes=1 << 20,
        max_total_bytes=None,
        token=token,
        receiver=uuid.uuid4().hex,
        server_identity=identity,
    )
    ShardedFetch(
        [[SourceAddress("127.0.0.1", port)]],
        step=STEP,
        deadline=time.monotonic() + 20,
        options=options,
        want=lambda group: [Want(name, whole(tuple(tensor.shape)), tensor) for name, tensor in got.items()],
    ).run()
    return got


def is_all_of(state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(state[name], tensor) for name, tensor in make_state().items())


def test_parts_come_whole_and_the_token_is_never_sent(source: HTTPTransport[Any]) -> None:
    with Relay(port_of(source)) as relay:
        assert is_all_of(fetch(relay.port, source.identity))
    said = [str((passing.request_headers, passing.path, passing.request_body)) for passing in relay.passed]
    assert len(said) >= 4 and not any(TOKEN in text or "Authorization" in text for text in said)


def is_of(*endings: str) -> Callable[[Passing], bool]:
    return lambda passing: passing.path.partition("?")[0].endswith(endings) and passing.status in (0, 200)


def poison(passing: Passing) -> None:
    if is_of("/parts")(passing):
        passing.body = with_poison(passing.body, json.loads(passing.request_body)["parts"])


def put_in_place_of_each_other(passing: Passing) -> None:
    """The last part's bytes and digest for the first's: each is proved, for another place."""
    if is_of("/parts")(passing):
        size = 64 * 64 * 4 + 16
        passing.body = passing.body[-size:] + passing.body[size:-size] + passing.body[:size]


def name_another_tensor(passing: Passing) -> None:
    if is_of("/manifest")(passing):
        passing.body = passing.body.replace(b"layer1", b"layer9")
        passing.headers["X-Ckpt-Digest"] = xxhash.xxh3_128_hexdigest(passing.body)


def say_a_header(name: str, value: str, ending: str) -> Callable[[Passing], None]:
    def say(passing: Passing) -> None:
        if is_of(ending)(passing):
            passing.headers[name] = value

    return say


def drop_the_proof(passing: Passing) -> None:
    passing.headers.pop("X-Ckpt-Proof", None)


def say_that_it_is_over(passing: Passing) -> None:
    if is_of("/manifest")(passing):
        passing.status, passing.body = 409, b'{"error": "over", "message": "give up"}'
        passing.headers["Content-Length"] = str(len(passing.body))


@pytest.mark.parametrize(
    ("alter", "error", "said"),
    [
        (poison, DigestMismatchError, "does not have the digest that came with it"),
        (put_in_place_of_each_other, DigestMismatchError, "does not have the digest that came with it"),
        (name_another_tensor, SourceRefusedError, "/manifest.*does not prove that it comes from who knows our token"),
        (say_a_header("X-Ckpt-Share", "1/9", "/manifest"), SourceRefusedError, "/manifest.*does not prove"),
        (say_a_header("ETag", '"0"', "/parts"), SourceRefusedError, "/parts.*does not prove"),
        (drop_the_proof, SourceRefusedError, "does not prove that it comes from who knows our token"),
        (say_that_it_is_over, SourceRefusedError, r"\(409\) does not prove"),
    ],
    ids=["bytes", "places", "manifest", "share", "head of parts", "proof", "refusal"],
)
def test_what_is_altered_on_the_way_back_is_not_used(
    source: HTTPTransport[Any], alter: Callable[[Passing], None], error: type[TransferError], said: str
) -> None:
    with Relay(port_of(source), answer=alter) as relay, pytest.raises(error, match=said):
        fetch(relay.port, source.identity)


def ask_for_another_step(passing: Passing) -> None:
    if is_of("/manifest")(passing):
        passing.path = passing.path.replace(f"/{STEP}/", "/latest/")


def ask_for_other_parts(passing: Passing) -> None:
    passing.request_body = passing.request_body.replace(b"[0,0]", b"[1,0]").replace(b"[64,64]", b"[63,64]")


def name_an_address(passing: Passing) -> None:
    if "X-Ckpt-Proof" in passing.request_headers:
        passing.request_headers["X-Ckpt-Address"] = "http://10.0.0.1:1"


def without_the_proof(passing: Passing) -> None:
    passing.request_headers.pop("X-Ckpt-Proof", None)


@pytest.mark.parametrize("alter", [ask_for_another_step, ask_for_other_parts, name_an_address, without_the_proof])
def test_what_is_altered_on_the_way_there_is_not_answered(
    source: HTTPTransport[Any], alter: Callable[[Passing], None]
) -> None:
    refused: list[int] = []
    with (
        Relay(port_of(source), ask=alter, answer=lambda passing: refused.append(passing.status)) as relay,
        pytest.raises(SourceRefusedError),
    ):
        fetch(relay.port, source.identity)
    assert 401 in refused


def test_who_does_not_know_the_token_or_is_another_server_is_asked_nothing(source: HTTPTransport[Any]) -> None:
    strangers = [HTTPTransport[Any](hostname="127.0.0.1", bind="127.0.0.1", token=token) for token in ("guess", "")]
    try:
        servers = [(port_of(source), "0" * 32), *((port_of(stranger), source.identity) for stranger in strangers)]
        for port, identity in servers:
            with Relay(port) as relay, pytest.raises(SourceRefusedError, match="nothing was asked of it"):
                fetch(relay.port, identity)
            assert {passing.path.partition("?")[0] for passing in relay.passed} == {"/v1/checkpoint/proof"}
    finally:
        for stranger in strangers:
            stranger.shutdown()


def connect(port: int, identity: str, headers: dict[str, str] | None = None) -> SourceConnection:
    return SourceConnection(
        SourceAddress("127.0.0.1", port),
        headers=headers or {},
        proved_to=identity,
        token=TOKEN if identity else "",
        connect_timeout_s=10,
        stall_timeout_s=10,
    )


def test_a_request_that_was_proved_is_answered_once(source: HTTPTransport[Any]) -> None:
    seen: list[str] = []
    again: list[int] = []

    def ask(passing: Passing) -> None:
        if seen:  # over the same connection: what it said last time
            passing.request_headers["X-Ckpt-Proof"] = seen[0]
        seen.extend([passing.request_headers["X-Ckpt-Proof"]] if "X-Ckpt-Proof" in passing.request_headers else [])

    with Relay(port_of(source), ask=ask, answer=lambda passing: again.append(passing.status)) as relay:
        connection = connect(relay.port, source.identity)
        assert b'"newest_step":3' in connection.get("/v1/checkpoint").read(10_000)
        answer = connection.get("/v1/checkpoint")
        with pytest.raises(SourceRefusedError, match="does not prove"):
            answer.read(10_000)
        connection.release()
    assert again == [200, 200, 401]


def test_over_a_connection_of_his_own_a_proof_is_worth_nothing(source: HTTPTransport[Any]) -> None:
    with Relay(port_of(source)) as relay:
        connection = connect(relay.port, source.identity)
        connection.get("/v1/checkpoint").read(10_000)
        connection.release()
    (shown,) = [p.request_headers["X-Ckpt-Proof"] for p in relay.passed if "X-Ckpt-Proof" in p.request_headers]
    stranger = connect(port_of(source), "", {"X-Ckpt-Proof": shown})
    for path in ("", f"/proof?nonce={'0' * 32}&of=token", "", f"/{STEP}/manifest"):
        answer = stranger.get(f"/v1/checkpoint{path}")
        assert answer.status == (200 if "proof" in path else 401)
        answer.read(10_000)
    stranger.release()


def test_tensors_are_had_in_parts_alone_where_the_token_is_proved(source: HTTPTransport[Any]) -> None:
    """Nothing would prove the bytes of blocks: their digests can be made to fit others."""
    connection = connect(port_of(source), source.identity)
    refusal = connection.get(f"/v1/checkpoint/{STEP}/blocks/0-0").refusal()
    assert refusal.error == "not_found" and "in parts" in refusal.message
    answer = connection.get("/v1/checkpoint")
    with pytest.raises(SourceRefusedError):
        answer.read_into(memoryview(bytearray(4)))
    connection.release()


@pytest.mark.slow
def test_a_server_that_counts_requests_is_waited_for(source: HTTPTransport[Any]) -> None:
    """Its limits refuse before a proof is looked at: that answer is not proved, and means only that it is to be asked again."""
    waits: list[int] = []

    def too_many(passing: Passing) -> None:
        if is_of("/parts")(passing) and not waits:
            waits.append(1)
            passing.status, passing.body = 429, b'{"error": "too_many_requests", "message": "later"}'
            passing.headers = {"Content-Length": str(len(passing.body))}

    with Relay(port_of(source), answer=too_many) as relay:
        assert is_all_of(fetch(relay.port, source.identity)) and waits

    def never(passing: Passing) -> None:
        if is_of("/proof")(passing):
            passing.status = 429

    with Relay(port_of(source), answer=never) as relay, pytest.raises(SourceLostError, match="asked too often"):
        fetch(relay.port, source.identity)


def test_what_is_too_long_for_one_turn_is_proved_too(
    monkeypatch: pytest.MonkeyPatch, source: HTTPTransport[Any]
) -> None:
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.handlers._LONG_BYTES", 16)
    assert is_all_of(fetch(port_of(source), source.identity))
