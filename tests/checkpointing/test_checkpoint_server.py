"""What the server answers: plain HTTP that any client understands, and refusals that say why."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import xxhash

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.protocol import (
    DIGEST_HEADER,
    RECEIVED_HEADER,
    RECEIVER_HEADER,
    STACKS_PATH,
    parse_metadata,
)
from torchft_ckpt.errors import (
    AddressInUseError,
    ConfigError,
    SourceLostError,
    SourceRefusedError,
    UnsupportedValueError,
)

LONG = timedelta(seconds=90)
BLOCK = 4096
TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
def transport() -> Iterator[HTTPTransport]:
    transport: HTTPTransport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", block_bytes=BLOCK, token="secret")
    yield transport
    transport.shutdown()


STATE = {"w": torch.arange(2500, dtype=torch.float32)}
RAW = STATE["w"].numpy().tobytes()


def framed(blocks: range) -> bytes:
    """Return blocks as they travel: each followed by its digest."""
    contents = {block: RAW[block * BLOCK : (block + 1) * BLOCK] for block in blocks}
    return b"".join(content + xxhash.xxh3_128_digest(content, seed=block) for block, content in contents.items())


def ask(transport: HTTPTransport, path: str, headers: dict[str, str] | None = None, method: str = "GET"):
    """Send one request; return status, headers and body."""
    source = parse_metadata(transport.metadata())
    connection = http.client.HTTPConnection(source.host, source.port, timeout=60)
    try:
        connection.request(method, path, headers={**TOKEN, **(headers or {})})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}]
)
@pytest.mark.parametrize("path", ["manifest", "blocks/0-0", "digests", "nonsense"])
def test_without_the_token_everything_is_refused(transport, path, header):
    transport.send_checkpoint([1], 3, STATE, LONG)
    source = parse_metadata(transport.metadata())
    connection = http.client.HTTPConnection(source.host, source.port, timeout=60)
    connection.request("GET", f"/v1/checkpoint/3/{path}", headers={k: v.encode() for k, v in header.items()})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    assert (response.status, body["error"]) == (401, "unauthorized")


def test_a_receiver_with_another_token_is_told_so(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    other: HTTPTransport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", token="other")
    with pytest.raises(SourceRefusedError, match="token"):
        other.recv_checkpoint(0, transport.metadata(), 3, LONG)
    other.shutdown()


def test_the_manifest_comes_with_its_digest_and_the_snapshots_name(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    status, headers, body = ask(transport, "/v1/checkpoint/3/manifest")
    manifest = json.loads(body)
    assert (status, manifest["step"], manifest["total_bytes"]) == (200, 3, len(RAW))
    assert headers["ETag"] == f'"{manifest["snapshot"]}"'
    assert headers[DIGEST_HEADER] == xxhash.xxh3_128_hexdigest(body)


def test_a_head_request_gets_no_body_and_leaves_the_connection_usable(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    address = parse_metadata(transport.metadata())
    connection = http.client.HTTPConnection(address.host, address.port, timeout=60)
    for _ in range(2):
        connection.request("HEAD", "/v1/checkpoint/3/blocks/0-0", headers=TOKEN)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (405, b"")
    connection.close()


def test_blocks_come_each_with_its_digest(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    _, _, body = ask(transport, "/v1/checkpoint/3/blocks/1-2")
    assert body == framed(range(1, 3))


def test_digests_can_be_had_apart_from_the_bytes(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    _, _, body = ask(transport, "/v1/checkpoint/3/digests?blocks=0,2")
    assert json.loads(body) == {
        "0": xxhash.xxh3_128_hexdigest(RAW[:BLOCK], seed=0),
        "2": xxhash.xxh3_128_hexdigest(RAW[2 * BLOCK :], seed=2),
    }


@pytest.mark.parametrize(
    "path", ["blocks/0-3", "blocks/2-1", "blocks/999999999999-999999999999", "digests?blocks=7", "digests?blocks=x"]
)
def test_blocks_that_do_not_exist_are_refused(transport, path):
    transport.send_checkpoint([1], 3, STATE, LONG)
    status, _, body = ask(transport, f"/v1/checkpoint/3/{path}")
    assert (status, json.loads(body)["error"]) == (416, "bad_range")


def test_another_step_is_refused_with_the_step_that_is_served(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    answers = [ask(transport, f"/v1/checkpoint/{step}/manifest") for step in (2, 4)]
    bodies = [json.loads(body) for _, _, body in answers]
    assert [status for status, _, _ in answers] == [409, 404]
    assert [(body["error"], body["serving_step"]) for body in bodies] == [("over", 3), ("not_yet", 3)]


def test_before_any_step_nothing_is_served(transport):
    status, _, body = ask(transport, "/v1/checkpoint/0/manifest?wait_s=nan")
    assert (status, json.loads(body)["serving_step"]) == (404, None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/checkpoint/x/manifest"),
        ("GET", "/v1/checkpoint/-1/manifest"),
        ("POST", "/v1/checkpoint/3/manifest"),
        ("GET", "/v1/checkpoint/99999999999999999999/manifest"),
        ("GET", "/v1/checkpoint/3/../../../etc/passwd"),
        ("DELETE", "/v1/checkpoint/3/manifest"),
        ("GET", "/v1/checkpoint/3/bytes"),
    ],
)
def test_what_is_not_served_at_all_is_refused_in_json(transport, method, path):
    status, _, body = ask(transport, path, method=method)
    assert (status in (404, 405), json.loads(body)["error"]) == (True, "not_found")


def test_blocks_of_a_snapshot_that_is_gone_are_refused(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    status, _, body = ask(transport, "/v1/checkpoint/3/blocks/0-0", {"If-Match": '"other"'})
    assert (status, json.loads(body)["error"]) == (412, "other_snapshot")


def test_blocks_that_were_freed_are_refused(transport):
    transport.send_checkpoint([1], 3, STATE, LONG)
    me = {RECEIVER_HEADER: "me"}
    ask(transport, "/v1/checkpoint/3/manifest", me)
    ask(transport, "/v1/checkpoint/3/blocks/1-1", {**me, RECEIVED_HEADER: "0"})
    transport.disallow_checkpoint()
    answers = [ask(transport, f"/v1/checkpoint/3/blocks/{block}-{block}") for block in (0, 1, 2)]
    assert [status for status, _, _ in answers] == [410, 200, 200]


@pytest.mark.parametrize("text", ["x", "-1", "0-99", "99999999999999999999999", "1,,2", "0-"])
def test_an_acknowledgement_that_makes_no_sense_frees_nothing(transport, text):
    transport.send_checkpoint([1], 3, STATE, LONG)
    me = {RECEIVER_HEADER: "me"}
    ask(transport, "/v1/checkpoint/3/manifest", me)
    ask(transport, "/v1/checkpoint/3/blocks/2-2", {**me, RECEIVED_HEADER: text})
    transport.disallow_checkpoint()
    assert ask(transport, "/v1/checkpoint/3/blocks/0-2")[2] == framed(range(3))


def test_a_manifest_is_held_up_until_its_step_is_served(transport):
    source = parse_metadata(transport.metadata())
    connection = http.client.HTTPConnection(source.host, source.port, timeout=60)
    connection.request("GET", "/v1/checkpoint/3/manifest?wait_s=10", headers=TOKEN)
    transport.send_checkpoint([1], 3, STATE, LONG)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["step"]) == (200, 3)
    connection.close()


def test_garbage_on_the_socket_leaves_the_server_working(transport):
    source = parse_metadata(transport.metadata())
    for garbage in (b"\x80\x04K\x01.\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000):
        with socket.create_connection((source.host, source.port)) as sock:
            sock.settimeout(60)
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
            except OSError:
                pass
    assert ask(transport, "/v1/checkpoint/0/manifest")[0] == 404


def test_a_port_that_is_taken_is_named(transport):
    port = parse_metadata(transport.metadata()).port
    with pytest.raises(AddressInUseError, match=str(port)):
        HTTPTransport(bind="127.0.0.1", port=port)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_chunks": -1},
        {"num_chunks": 1000},
        {"timeout": timedelta(0)},
        {"block_bytes": 1},
        {"port": 70000},
        {"stall_timeout": timedelta(0)},
        {"bind": "no such address"},
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        HTTPTransport(**arguments)


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "localhost",
        "127.0.0.1:80",
        "ftp://h:1",
        "http://h",
        "http://h:0",
        "http://h:99999",
        "http://u:p@h:1",
        "http://h:1/path",
        "http://h:1\r\nX: y",
        "http://h h:1",
        "file:///etc/passwd",
        "http://h:1?x",
    ],
)
def test_metadata_that_is_not_a_plain_address_is_refused(metadata):
    with pytest.raises(SourceLostError):
        parse_metadata(metadata)


def test_metadata_with_an_ipv6_address_is_read():
    assert str(parse_metadata("http://[::1]:80")) == "http://[::1]:80"


def test_who_comes_for_a_state_that_cannot_be_sent_is_told_why_at_once_until_another_one_is_served(transport):
    with pytest.raises(UnsupportedValueError):
        transport.send_checkpoint([1], 3, {"best": object()}, LONG)
    status, _, body = ask(transport, "/v1/checkpoint/3/manifest?wait_s=20")
    assert (status, json.loads(body)["error"]) == (409, "cannot")
    assert "its state of step 3 cannot be sent: state dict at 'best'" in json.loads(body)["message"]
    receiver: HTTPTransport = HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1", token="secret")
    try:
        with pytest.raises(SourceRefusedError, match="cannot be sent: state dict at 'best'"):
            receiver.fetch_checkpoint([transport.metadata()], 3, LONG)
        transport.send_checkpoint([1], 3, STATE, LONG)
        assert torch.equal(receiver.fetch_checkpoint([transport.metadata()], 3, LONG)["w"], STATE["w"])
    finally:
        receiver.shutdown()


def test_who_has_the_token_is_told_where_the_threads_are(transport: HTTPTransport) -> None:
    status, _, body = ask(transport, STACKS_PATH)
    assert status == 200
    assert "thread MainThread:\n" in body.decode()
    assert (
        f"{__file__}:" in body.decode()
        and " in test_who_has_the_token_is_told_where_the_threads_are\n" in body.decode()
    )
    assert ask(transport, STACKS_PATH, {"Authorization": "Bearer guess"})[0] == 401
