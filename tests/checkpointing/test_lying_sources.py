"""Sources that answer well-formed lies, without end, or not at all what was asked: never believed, never waited for too long.

What no receiver can find out is left out: a source that is consistent in its lie about what the weights are. Peers are
authenticated for that reason.
"""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import xxhash
from fault_matrix import (
    BLOCK_BYTES,
    FRAME_BYTES,
    KINDS,
    LEASE,
    MODES,
    NUM_BLOCKS,
    RECV,
    SORTS_OF_BLOCKS,
    STALL_S,
    STATE,
    STEP,
    Case,
    Expect,
    Exploit,
    FaultBench,
    Mode,
    fault_bench,
    make_transport,
    modes_for,
)
from faulty_proxy import Answer, AnswerFault, ScriptedProxy, Wire, pass_on, set_headers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.thoroughness import THOROUGH, by_default

from torchft_ckpt.checkpointing.fetching import fetch
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.errors import SourceRefusedError, StateFormatError, TransferError, TransferTimeoutError
from torchft_ckpt.testing.transport_conformance import differences

Change = Callable[[dict[str, Any]], object]
TEN_GB = 10 * 1024**3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultBench]:
    with fault_bench(tmp_path_factory.mktemp("executed")) as bench:
        yield bench


def on(kind: str, act: Callable[[Answer, Wire], Awaitable[None]]) -> AnswerFault:
    """The fault that acts on one kind of answers, each time."""

    async def fault(answer: Answer, wire: Wire) -> None:
        await (act if answer.kind == kind else pass_on)(answer, wire)

    return fault


def case_of(name: str, mode: Mode, fault: AnswerFault, **arguments: Any) -> Case:
    """A case in which one source alone must give an error, and a healthy one beside it the state."""
    several = len(mode.sources) > 1
    case = Case(name, **{"expect": Expect.ERROR, **arguments})
    if several:
        case.expect, case.timeout_s = Expect.STATE, 20.0
    if case.expect is Expect.ERROR:  # else, on a busy machine, a healthy answer may take longer
        case.stall_s = STALL_S

    async def counted(answer: Answer, wire: Wire) -> None:
        case.num_fired += 1
        await fault(answer, wire)

    case.fault = counted
    return case


def is_our_turn(number: int, kind: str, mode: Mode) -> bool:
    """Whether the lie of that number is told here, in the answers of a kind in this mode: all are in a thorough run.

    By default each lie is told in each mode, in answers of one kind at least.
    """
    alike = modes_for(kind, mode)
    return THOROUGH or (mode in alike and (number + KINDS.index(kind)) % len(alike) == alike.index(mode))


def with_manifest(change: Change) -> AnswerFault:
    """Send another manifest, with its right digest."""

    async def act(answer: Answer, wire: Wire) -> None:
        manifest = json.loads(answer.body)
        result = change(manifest)
        body = result if isinstance(result, bytes) else json.dumps(manifest).encode()
        await wire.send(answer.with_body(body, X_Ckpt_Digest=xxhash.xxh3_128_hexdigest(body)))

    return on("manifest", act)


def put(path: str, value: object) -> Change:
    """Change one place; a function gets what was there."""

    def change(manifest: dict[str, Any]) -> None:
        *parents, last = [int(name) if name.isdigit() else name for name in path.split("/")]
        place: Any = manifest
        for name in parents:
            place = place[name]
        place[last] = value(place[last]) if callable(value) else value

    return change


def huge(total_bytes: int) -> Change:
    """Announce one huge tensor more, consistently."""

    def change(manifest: dict[str, Any]) -> None:
        start = -(-manifest["total_bytes"] // 64) * 64
        chunk = {"offsets": [0], "sizes": [total_bytes], "strides": None, "byte_offset": 0}
        chunk["segment"] = len(manifest["segments"])
        manifest["segments"].append([start, total_bytes])
        manifest["total_bytes"] = start + total_bytes
        entry = {"fqn": "huge", "dtype": "uint8", "shape": [total_bytes], "chunks": [chunk]}
        manifest["tensors"].append(entry)
        manifest["tree"] = [manifest["tree"], {"x": len(manifest["tensors"]) - 1}]

    return change


# What breaks a rule of the format by itself is in `test_hostile_manifests.py`, and one of these for all of them.
LIES: dict[str, Change] = {
    "the step before": put("step", STEP - 1),
    "the next step": put("step", STEP + 1),
    "step 0": put("step", 0),
    "another snapshot than the ETag": put("snapshot", "another"),
    "blocks twice as long": put("block_bytes", 2 * BLOCK_BYTES),
    "blocks a byte longer": put("block_bytes", BLOCK_BYTES + 1),
    "one block for all": put("block_bytes", 64 * 1024 * 1024),
    "a byte less": put("total_bytes", lambda total: total - 1),
    "no segments": put("segments", []),
    "a petabyte more, consistently": huge(2**50),
    "beyond the limit, consistently": huge(20 * 1024 * 1024),
    "no JSON": lambda manifest: b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_manifest_that_lies_is_never_believed(bench: FaultBench, mode: Mode) -> None:
    cases = [case_of(name, mode, with_manifest(change)) for name, change in LIES.items()]
    bench.run(mode, cases, concurrency=2)


# Without end


def flood(head: bytes, chunk: bytes) -> AnswerFault:
    async def act(answer: Answer, wire: Wire) -> None:
        await wire.send(head)
        await wire.flood(chunk)

    return act


def floods() -> dict[str, Callable[[str], AnswerFault]]:
    """Answers of one kind that are announced, or really sent, beyond any measure; by name."""
    ok = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    body = b"[" * 65536
    refusal = b"HTTP/1.1 404 Not Found\r\nX: 1\r\n"
    chunked = b"10000\r\n" + body + b"\r\n"
    sent = {
        "10 GB, announced": (ok + b"Content-Length: %d\r\n\r\n" % TEN_GB, body),
        "10 GB, not announced": (ok + b"\r\n", body),
        "10 GB in chunks": (ok + b"Transfer-Encoding: chunked\r\n\r\n", chunked),
        "10**30 bytes, announced": (ok + b"Content-Length: 1%s\r\n\r\n" % (b"0" * 30), body),
        "a refusal of 10 GB, announced": (refusal + b"Content-Length: %d\r\n\r\n" % TEN_GB, body),
        "a refusal of 10 GB, not announced": (refusal + b"\r\n", body),
        "a refusal of 10 GB in chunks": (refusal + b"Transfer-Encoding: chunked\r\n\r\n", chunked),
        "a header without end": (ok + b"ETag: ", b"e" * 65536),
        "headers without end": (ok, b"X-Header: value\r\n" * 4096),
        "folded headers without end": (ok + b"ETag: e\r\n", b" folded\r\n" * 4096),
        "a status without end": (b"HTTP/1.1 200 ", b"O" * 65536),
        "a status number without end": (b"HTTP/1.1 ", b"2" * 65536),
        "no line without end": (b"", bytes(65536)),
        "empty lines without end": (b"", b"\r\n" * 4096),
        "interim answers without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        "hints without end": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 1000),
        "answers without end": (b"", b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}" * 1000),
    }
    return {name: (lambda kind, pair=pair: on(kind, flood(*pair))) for name, pair in sent.items()}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_answer_without_end_costs_neither_memory_nor_time_beyond_the_deadline(bench: FaultBench, mode: Mode) -> None:
    kinds = [kind for kind in KINDS if kind != "done"]
    cases = [
        case_of(f"{kind}: {name}", mode, make(kind), timeout_s=1.0, expect=Expect.EITHER)
        for number, (name, make) in enumerate(floods().items())
        for kind in kinds
        if is_our_turn(number, kind, mode)
    ]
    for case in cases:
        case.stall_s = 4.0  # a flood ends with the deadline; a healthy answer may take long on a busy machine
        if case.name.startswith(("manifest", "blocks")) and case.expect is Expect.EITHER:
            case.expect = Expect.ERROR
    bench.run(mode, cases, concurrency=4)


# Other answers than those that were asked for


def answers(marker_pickle: bytes) -> dict[str, bytes]:
    """Whole answers, by name, that are never right."""

    def of(status: str, body: bytes = b"", *headers: str) -> bytes:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    digest = "X-Ckpt-Digest: " + xxhash.xxh3_128_hexdigest(marker_pickle)
    refusal = {"error": "over", "message": "m", "serving_step": None}

    def refused(status: str, **members: object) -> bytes:
        return of(status, json.dumps({**refusal, **members}).encode())

    return {
        "204": of("204 No Content"),
        "205": of("205 Reset Content"),
        "206": of("206 Partial Content", b"x" * 100, "Content-Range: bytes 0-99/100"),
        "304": of("304 Not Modified", b"", 'ETag: "x"'),
        "301": of("301 Moved", b"", "Location: file:///etc/passwd"),
        "307": of("307 Temporary Redirect", b"", "Location: http://127.0.0.1:1/v1/checkpoint/7/manifest"),
        "308 to itself": of("308 Permanent Redirect", b"", "Location: /"),
        "401": refused("401 Unauthorized", error="unauthorized"),
        "407": of("407 Proxy Authentication Required", b"", "Proxy-Authenticate: Basic"),
        "409": refused("409 Conflict"),
        "410": refused("410 Gone", error="gone"),
        "410 revoked": refused("410 Gone", error="revoked"),
        "412": refused("412 Precondition Failed", error="other_snapshot"),
        "416": refused("416 Range Not Satisfiable", error="bad_range"),
        "not yet": refused("404 Not Found", error="not_yet"),
        "not found": refused("404 Not Found", error="not_found"),
        "429": refused("429 Too Many Requests", error="too_many_requests"),
        "429 for ever": of("429 Too Many Requests", b"{}", "Retry-After: 999999999999999999999"),
        "500": of("500 Internal Server Error", b"<html>oops</html>"),
        "503": of("503 Service Unavailable", b"", "Retry-After: 3600"),
        "599": of("599 ?"),
        "999": of("999 ?"),
        "status 0": of("000 ?"),
        "status -1": of("-01 ?"),
        "a refusal with a pickle": of("409 Conflict", marker_pickle),
        "a refusal with a huge step": refused("409 Conflict", serving_step=10**300),
        "a refusal with a negative step": refused("409 Conflict", serving_step=-1),
        "a refusal with control characters": refused("409 Conflict", message="\x1b[2J\r\n\0" * 50),
        "a refusal with a long message": refused("409 Conflict", message="m" * 60_000, error="e" * 2000),
        "a refusal that is a list": of("409 Conflict", b"[]"),
        "a refusal that is deep": of("409 Conflict", b"[" * 60_000),
        "a refusal that is no text": of("409 Conflict", b"\xff" * 100),
        "a refusal of length 0": of("409 Conflict"),
        "a pickle": of("200 OK", marker_pickle, digest, 'ETag: "x"'),
        "a pickle alone": marker_pickle,
        "HTTP/0.9": b"{}\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/9.9": b"HTTP/9.9 200 OK\r\nContent-Length: 0\r\n\r\n",
        "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
        "SSH": b"SSH-2.0-OpenSSH_9.2p1\r\n",
        "gzip": of("200 OK", b"\x1f\x8b" + b"\0" * 100, "Content-Encoding: gzip"),
        "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        "nothing and closed": b"",
    }


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_answer_to_another_question_is_never_taken_for_the_state(bench: FaultBench, mode: Mode) -> None:
    def answering(kind: str, raw: bytes) -> AnswerFault:
        async def act(answer: Answer, wire: Wire) -> None:
            await wire.send(raw)
            if not raw:
                await wire.cut()

        return on(kind, act)

    cases = []
    for kind in KINDS:
        expect = Expect.ERROR if kind in ("manifest", "blocks") else Expect.EITHER
        for number, (name, raw) in enumerate(answers(pickle.dumps(Exploit(bench.marker))).items()):
            if not is_our_turn(number, kind, mode):
                continue
            cases.append(case_of(f"{kind}: {name}", mode, answering(kind, raw), timeout_s=1.0, expect=expect))
    bench.run(mode, cases, concurrency=12)


def test_a_source_that_says_not_yet_for_ever_is_waited_for_until_the_deadline(bench: FaultBench) -> None:
    async def not_yet(answer: Answer, wire: Wire) -> None:
        await wire.send(answers(b"")["not yet"])

    case = case_of("not yet", RECV, not_yet, timeout_s=0.5, errors=(TransferTimeoutError,))
    bench.run(RECV, [case], concurrency=1)
    assert case.num_fired < 100, f"asked {case.num_fired} times in half a second"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["error", "message", "serving_step", "more"]), inner, max_size=4)
    ),
    max_leaves=6,
)
refusals = st.binary(max_size=100) | json_values.map(lambda value: json.dumps(value).encode())


@settings(
    derandomize=True,
    max_examples=by_default(50, thorough=150),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    body=refusals,
    status=st.sampled_from([400, 401, 403, 404, 409, 410, 412, 416, 418, 500, 503]),
    kind=st.sampled_from(["manifest", "blocks"]),
)
def test_any_body_of_a_refusal_is_a_refused_source(bench: FaultBench, body: bytes, status: int, kind: str) -> None:
    async def refuse(answer: Answer, wire: Wire) -> None:
        head = set_headers(answer.raw[: answer.head_bytes], Content_Length=str(len(body)))
        await wire.send(b"HTTP/1.1 %d" % status + head[12:] + body)

    errors = (SourceRefusedError, TransferTimeoutError) if status == 404 else (SourceRefusedError,)
    timeout_s = 0.5 if status == 404 else 20.0  # which may say that it does not have it yet
    case = case_of(f"{status} {body!r}", RECV, on(kind, refuse), timeout_s=timeout_s, errors=errors)
    slot = bench.slot(RECV, case.stall_s)
    assert bench.judge_one(slot, RECV, case) == []


# A source that goes on


def test_a_source_that_trains_on_in_the_middle_gives_the_old_state_or_an_error() -> None:
    """At block boundaries of every sort: it mutates its tensors, and serves the next step or the same step once more."""
    outcomes = {"state": 0, "error": 0}
    with ScriptedProxy() as proxy, ThreadPoolExecutor(1) as trainer:
        for again in (STEP, STEP + 1):
            for block in by_default([*SORTS_OF_BLOCKS.values()], thorough=[*range(NUM_BLOCKS)]):
                for expected_ranks in ([], [1]):
                    source, destination = make_transport(), make_transport()
                    state = copy.deepcopy(STATE)
                    source.send_checkpoint(expected_ranks, STEP, state, LEASE)
                    gate = proxy.gate(parse_metadata(source.metadata()).port)
                    gone_on: list[None] = []

                    def go_on(source=source, state=state, again=again) -> None:
                        source.disallow_checkpoint()
                        for tensor in (state["model"]["weight"], state["last"], state["optim"]["exp_avg"]):
                            tensor.add_(1)
                        source.send_checkpoint([1], again, state, LEASE)

                    async def fault(answer: Answer, wire: Wire, block=block, gone_on=gone_on, go_on=go_on) -> None:
                        blocks = answer.blocks()
                        if block not in blocks or gone_on:
                            await pass_on(answer, wire)
                            return
                        gone_on.append(None)
                        position = answer.head_bytes + (block - blocks.start) * FRAME_BYTES
                        await wire.send(answer.raw[:position])
                        await wire.wait_for(trainer.submit(go_on))
                        await wire.send(answer.raw[position:])

                    gate.arm(fault)
                    try:
                        received = destination.recv_checkpoint(0, gate.url, STEP, timedelta(seconds=20))
                    except (TransferError, StateFormatError):
                        outcomes["error"] += 1
                    else:
                        outcomes["state"] += 1
                        assert differences(received, STATE) == [], f"block {block}, step {again}, {expected_ranks}"
                    finally:
                        source.shutdown()
                        destination.shutdown()
                    assert gone_on
    assert outcomes["state"] > 0


# What is said about others: only where several sources are used


def lists_of_digests(num_digits: int) -> dict[str, bytes]:
    zeros = "0" * num_digits
    good = {str(block): zeros for block in range(NUM_BLOCKS)}
    return {
        "nothing": b"{}",
        "a list": b"[]",
        "no JSON": b"\x80\x04K\x01.",
        "zeros": json.dumps(good).encode(),
        "numbers": json.dumps(dict.fromkeys(good, 7)).encode(),
        "short ones": json.dumps(dict.fromkeys(good, "00")).encode(),
        "no hex": json.dumps(dict.fromkeys(good, "z" * num_digits)).encode(),
        "one twice": json.dumps({"0": zeros})[:-1].encode() + b", " + json.dumps({"0": "1" * num_digits})[1:].encode(),
        "blocks that are not there": json.dumps({"-1": zeros, "99": zeros, "x": zeros}).encode(),
        "a megabyte of blocks": json.dumps({str(block): zeros for block in range(25_000)}).encode(),
        "a huge block": json.dumps({"9" * 4000: zeros}).encode(),
    }


def lists_of_peers(urls: list[str]) -> dict[str, bytes]:
    def peers(entries: list[object], sent: object = "") -> bytes:
        return json.dumps({"peers": entries, "sent": sent}).encode()

    every = f"0-{NUM_BLOCKS - 1}"
    return {
        "nothing": b"{}",
        "no JSON": b"\x80\x04K\x01.",
        "numbers": peers([1, 2, 3]),
        "nobody there": peers([{"address": "http://127.0.0.1:1", "held": every}] * 16),
        "a file": peers([{"address": "file:///etc/passwd", "held": every}]),
        "another protocol": peers([{"address": "gopher://127.0.0.1:70/", "held": every}]),
        "a header in an address": peers([{"address": "http://127.0.0.1:1/\r\nX: 1", "held": every}]),
        "blocks that are not there": peers([{"address": url, "held": "0-999999999999"} for url in urls]),
        "no blocks": peers([{"address": url, "held": "-,x"} for url in urls]),
        "everything was sent": peers([], every),
        "more was sent than there is": peers([], "0-999999999999"),
        "a thousand peers": peers([{"address": f"http://127.0.0.1:{port}", "held": every} for port in range(1, 1001)]),
        "a source of other things": peers([{"address": url, "held": every} for url in urls]),
        "a megabyte": peers([{"address": "http://" + "a" * 200 + ":1", "held": every}] * 4000),
    }


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_lies_about_digests_and_peers_give_the_state_or_a_named_error(
    bench: FaultBench, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another source holds the state, lies about peers cost nothing but time."""
    monkeypatch.setattr(fetch, "_SWARM_AFTER_S", 0.0)  # so short a transfer would not ask for peers
    other = make_transport()
    other.send_checkpoint([], STEP, {"w": torch.ones(60_000)}, LEASE)
    lies = {
        "digests": lists_of_digests(32),
        "blake3": lists_of_digests(64),
        "peers": lists_of_peers([other.metadata()]),
    }
    num_lies = dict.fromkeys(lies, 0)
    cases = []
    for kind, bodies in lies.items():
        for name, body in bodies.items():
            told = threading.Event()

            async def fault(answer: Answer, wire: Wire, kind: str = kind, body: bytes = body, told=told) -> None:
                if answer.kind == kind:
                    num_lies[kind] += 1
                    told.set()
                    await wire.send(answer.with_body(body))
                    return
                until = time.monotonic() + 0.5
                while (kind, answer.kind) == ("peers", "blocks") and not told.is_set() and time.monotonic() < until:
                    await asyncio.sleep(0.01)
                await pass_on(answer, wire)

            expect = Expect.STATE if kind == "peers" else Expect.EITHER
            case = case_of(f"{kind}: {name}", mode, fault, timeout_s=60.0, expect=expect)
            case.expect = expect
            case.stall_s = 20.0  # nobody hangs here; a healthy answer may take long on a busy machine
            cases.append(case)
    try:
        bench.run(mode, cases, concurrency=4)
    finally:
        other.shutdown()
    asked = {*mode.asks, "peers"} if mode.sources[0] == "faulty" else mode.asks  # peers are asked of the first source
    assert [kind for kind, number in num_lies.items() if kind in asked and number == 0] == []
