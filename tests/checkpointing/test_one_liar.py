"""A source that lies in a way that nobody thought of costs itself and no other; what it sends costs no more than its length.

Integers that Python does not write out (`sys.set_int_max_str_digits`), JSON that nests, keys that are long, boxes that cut each
other, and plain bugs of ours that only one source's answers reach.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.resharding import LONG, LyingSource, Reply, make_transport
from support.sources import manifest_of, strips
from torch.distributed.checkpoint.api import CheckpointException

from torchft_ckpt import PeerReader
from torchft_ckpt.__main__ import main
from torchft_ckpt.checkpointing import protocol
from torchft_ckpt.checkpointing.fetching import engine
from torchft_ckpt.checkpointing.fetching.streams import Stream
from torchft_ckpt.checkpointing.resharding import fetch as sharded_fetch
from torchft_ckpt.checkpointing.resharding import plan as plan_module
from torchft_ckpt.checkpointing.resharding.plan import SourceGroup, plan_parts
from torchft_ckpt.checkpointing.state import fit
from torchft_ckpt.checkpointing.state.format import decode_manifest
from torchft_ckpt.checkpointing.state.target import Want
from torchft_ckpt.checkpointing.state.tree import MAX_PATH_CHARS, in_words
from torchft_ckpt.cli.output import leaves
from torchft_ckpt.core.boxes.geometry import Box
from torchft_ckpt.errors import StateFormatError, StateMismatchError, TransferError, TransferTimeoutError
from torchft_ckpt.integrations.dcp import peer_reader

STEP = 7
BIG = 16**4000 - 1
BIG_NODE = {"i": "f" * 4000}
DEEP = b"[" * 30_000 + b"]" * 30_000
State = dict[str, Any]


def signed(reply: Reply, body: bytes) -> None:
    reply.body, reply.headers["X-Ckpt-Digest"] = body, xxhash.xxh3_128_hexdigest(body)
    reply.headers.pop("Content-Encoding", None)
    reply.send()


def body_of(manifest: bytes) -> Callable[[Reply], None]:
    """Another manifest."""

    def lie(reply: Reply) -> None:
        if reply.kind == "manifest":
            signed(reply, manifest)
        else:
            reply.send()

    return lie


def tree(node: object) -> Callable[[Reply], None]:
    """Another tree, in an otherwise empty state."""
    return body_of(manifest_of(node, step=STEP))


def deep_refusal(reply: Reply) -> None:
    reply.status, reply.body = 403, b'{"error":"x","message":"y","more":' + DEEP + b"}"
    reply.send()


LIES = {
    "a refusal that nests": deep_refusal,
    "a large integer twice as a key": tree({"d": [[BIG_NODE, 1], [BIG_NODE, 2]]}),
    "one within a tuple twice": tree({"d": [[{"t": [BIG_NODE, 1]}, 1], [{"t": [BIG_NODE, 1]}, 2]]}),
    "an integer that Python does not read": body_of(manifest_of("X", step=STEP).replace(b'"X"', b"9" * 5000)),
    "a manifest that nests": body_of(manifest_of("X", step=STEP).replace(b'"X"', DEEP)),
    "a long key above many leaves": tree({"d": [["k" * 60_000, [0] * 20_000]]}),
}


@contextmanager
def source_of(state: State) -> Iterator[str]:
    source = make_transport()
    source.send_checkpoint([], STEP, state, LONG)
    try:
        yield source.metadata()
    finally:
        source.shutdown()


def receive(groups: list[list[str]], sharded: bool, local: State, timeout: timedelta = LONG) -> State:
    receiver = make_transport(stall_timeout=timedelta(seconds=10))
    try:
        if sharded:
            return receiver.fetch_sharded(groups, 0, 1, STEP, timeout, local_state=local)
        return receiver.fetch_checkpoint([url for group in groups for url in group], STEP, timeout)
    finally:
        receiver.shutdown()


# --------------------------------------------------------------------------------------- one liar costs one source


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_beside_a_liar_the_honest_sources_state_arrives(lie: str, sharded: bool, first: bool) -> None:
    state = {"w": torch.arange(5000.0)}
    with source_of(state) as honest, LyingSource(honest, LIES[lie]) as lying:
        groups = [[lying.url], [honest]] if first else [[honest], [lying.url]]
        received = receive(groups, sharded, {"w": torch.zeros(5000)})
    assert torch.equal(received["w"], state["w"])


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_alone_is_named_by_the_command_line_without_a_traceback(
    lie: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with source_of({"w": torch.arange(5000.0)}) as honest, LyingSource(honest, LIES[lie]) as lying:
        for command in (["inspect"], ["pull", "-o", str(tmp_path / "state.safetensors"), "--timeout", "3"]):
            status = main([*command, lying.url])
            assert (status, "torchft_ckpt: " in capsys.readouterr().err) == (1, True)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_bug_that_one_sources_answers_reach_costs_that_source_and_is_in_the_log_with_its_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sharded: bool
) -> None:
    state = {"w": torch.arange(5000.0)}
    with source_of(state) as honest, LyingSource(honest, Reply.send) as other:

        class Client(engine.SourceClient):
            def fetch_manifest(self, **arguments: Any) -> Any:
                if self.name == other.url:
                    raise ZeroDivisionError("nobody thought of that")
                return super().fetch_manifest(**arguments)

        monkeypatch.setattr(engine, "SourceClient", Client)
        with caplog.at_level(logging.ERROR):
            received = receive([[other.url], [honest]], sharded, {"w": torch.zeros(5000)})
    assert torch.equal(received["w"], state["w"])
    (record,) = [record for record in caplog.records if record.exc_info]
    assert other.url in record.message and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("is_first", [True, False])
def test_such_a_bug_in_the_plan_of_a_transfer_costs_that_source_alone(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    state = {"w": torch.arange(5000.0)}
    with source_of(state) as honest, LyingSource(honest, Reply.send) as other:

        def fail(wants: Any, groups: Any, check: Any) -> Any:
            if any(other.url in group.names for group in groups):
                raise KeyError("nobody thought of that")
            return plan_parts(wants, groups, check)

        monkeypatch.setattr(sharded_fetch, "plan_parts", fail)
        groups = [[other.url], [honest]] if is_first else [[honest], [other.url]]
        received = receive(groups, True, {"w": torch.zeros(5000)})
    assert torch.equal(received["w"], state["w"])


def test_parts_that_a_source_was_asked_for_when_such_a_bug_came_are_asked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be waited for until the deadline: of a lost source that is asked for no more, its thread gives them back."""
    monkeypatch.setattr(plan_module, "PART_BYTES", 2048)
    state = {"w": torch.arange(5000.0)}
    real = Stream._receive
    with source_of(state) as honest, LyingSource(honest, Reply.send) as other:

        def fail(self: Any, number: int, client: Any, *rest: Any) -> bool:
            if client.name == other.url:
                raise ZeroDivisionError("nobody thought of that")
            return real(self, number, client, *rest)

        monkeypatch.setattr(Stream, "_receive", fail)
        received = receive([[honest], [other.url]], True, {"w": torch.zeros(5000)}, timedelta(seconds=10))
    assert torch.equal(received["w"], state["w"])


def test_where_it_is_the_only_source_the_error_says_what_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(engine.SourceClient):
        def fetch_manifest(self, **_: Any) -> Any:
            raise ZeroDivisionError("nobody thought of that")

    monkeypatch.setattr(engine, "SourceClient", Client)
    with source_of({}) as url, pytest.raises(TransferError, match="ZeroDivisionError: nobody thought of that"):
        receive([[url]], False, {})


@pytest.mark.parametrize(
    "decode",
    [
        protocol.decode_refusal,
        protocol.decode_index,
        protocol.decode_peers,
        protocol.decode_digests,
        protocol.decode_part_digests,
        protocol.decode_parts_request,
    ],
)
def test_json_that_nests_is_an_error_of_its_decoder(decode: Callable[[bytes], object]) -> None:
    for body in (DEEP, b'{"more":' + DEEP + b"}"):
        with pytest.raises(msgspec.MsgspecError):
            decode(body)


# ------------------------------------------------------------------------------------------------- large integers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("a", "a"),
        (BIG, "0xff"),
        (-BIG, "-0xff"),
        ((BIG, "a", (1, BIG)), "(0xff"),
        (frozenset({BIG}), "a froz"),
    ],
    ids=["small", "text", "large", "negative", "tuple", "set"],
)
def test_any_value_has_words(value: object, text: str) -> None:
    assert in_words(value).startswith(text)


def test_a_state_with_large_integers_arrives_and_is_named_by_hex() -> None:
    state = {"n": BIG, BIG: torch.ones(2), (BIG, 1): {"s": {BIG}}}
    with source_of(state) as url:
        received = receive([[url]], False, {})
    assert received["n"] == BIG and received[(BIG, 1)] == {"s": {BIG}} and torch.equal(received[BIG], torch.ones(2))
    assert [path[:4] for path, _ in leaves(received)] == ["n", "0xff", "(0xf"]


def test_a_reader_of_dcps_refuses_a_key_that_has_no_name() -> None:
    with source_of({"w": torch.ones(2), BIG: 1}) as url:
        with pytest.raises(StateFormatError, match="a key of which DCP makes no name"):
            PeerReader([url], step=STEP, root="", timeout=LONG).read_metadata()


# --------------------------------------------------------------------------------------------------- long paths


def test_a_long_key_above_many_leaves_is_refused_before_anybody_names_them() -> None:
    key, children = "k" * 60_000, 20_000
    body = manifest_of({"d": [[key, [0] * children]]})
    assert len(body) < 200_000 and len(key) * children > MAX_PATH_CHARS
    began = time.process_time()
    with pytest.raises(StateFormatError, match=r"the paths of the leaves have 12\d{8} characters together"):
        decode_manifest(body)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "wrap",
    [
        lambda node: {"d": [["k" * 9, node]]},
        lambda node: {"o": [[["k" * 9, node]], None]},
        lambda node: {"default": [None, [["k" * 9, node]]]},
        lambda node: [node],
        lambda node: {"t": [node]},
        lambda node: {"deque": [None, [node]]},
        lambda node: {"named": ["m.C", ["a"], [node]]},
    ],
)
def test_leaves_are_counted_in_every_container(
    wrap: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: object = {"d": [["k" * 9, 1], ["l" * 9, 2]]}
    monkeypatch.setattr("torchft_ckpt.checkpointing.state.tree.MAX_PATH_CHARS", 29)
    decode_manifest(manifest_of(inner))
    with pytest.raises(StateFormatError, match="paths of the leaves"):
        decode_manifest(manifest_of(wrap(inner)))


def test_long_keys_are_cut_in_the_names_of_leaves() -> None:
    ((path, _),) = leaves({"k" * 1000: {"l" * 1000: 1}})
    assert path == f"{'k' * 200}.{'l' * 200}"


@given(st.lists(st.text("ab.", max_size=6)), st.text("ab.", max_size=9))
def test_a_path_begins_with_one_of_the_prefixes_exactly_where_a_search_finds_one(
    prefixes: list[str], path: str
) -> None:
    assert fit._Prefixes(prefixes).begin(path) == any(path.startswith(prefix) for prefix in prefixes)


# ---------------------------------------------------------------------------------------------- plans and deadlines


class OverError(Exception):
    pass


class Clock:
    """Says that it is over after so many questions."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OverError


SMALL = {"rows": 32, "columns": 80, "num_tensors": 3}
"""Strips that cut each other into 2000 cells."""


def strips_group() -> SourceGroup:
    return SourceGroup(["a"], [decode_manifest(strips("a", **SMALL))])


def test_a_plan_asks_all_the_time_whether_it_is_wanted() -> None:
    group = strips_group()
    want = Want("t0", Box((0, 0), (32, 80)), torch.zeros(32, 80, dtype=torch.uint8))
    for after in (0, 1, 40):
        with pytest.raises(OverError):
            plan_parts([want], [group], Clock(after))
    with pytest.raises(StateMismatchError, match="holds t0"):
        plan_parts([want], [group], Clock(100_000))


def test_a_plan_of_more_parts_than_any_state_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MAX_PLANNED", 3)
    monkeypatch.setattr(plan_module, "PART_BYTES", 1024)
    target = torch.zeros(32 * 80 * 3, dtype=torch.uint8)
    with pytest.raises(StateFormatError, match="into more than 3 parts"):
        plan_parts([Want("large", Box((0,), (len(target),)), target)], [strips_group()])


def wanted(num_tensors: int = 3) -> State:
    local: State = {f"t{number}": torch.zeros(32, 80, dtype=torch.uint8) for number in range(num_tensors)}
    return {**local, "large": torch.zeros(32 * 80 * num_tensors, dtype=torch.uint8)}


def test_a_fetch_whose_plan_takes_too_long_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as planning goes on the clock stands at the deadline."""

    def plan(wants: object, groups: object, go_on: Callable[[], None]) -> Any:
        monkeypatch.setattr(sharded_fetch.time, "monotonic", lambda: real() + 3600)
        go_on()

    real = time.monotonic
    monkeypatch.setattr(sharded_fetch, "plan_parts", plan)
    with source_of({"w": torch.ones(5)}) as url:
        with pytest.raises(TransferTimeoutError, match=r"reached its deadline with nothing .*takes long to compare"):
            receive([[url]], True, {"w": torch.zeros(5)})


@pytest.mark.parametrize("error", [StateFormatError("boxes of no mesh"), TransferTimeoutError("takes long")])
def test_a_second_group_that_cannot_be_planned_with_is_left_aside_and_the_third_is_used(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(sharded_fetch, "_GRACE_S", 60.0)  # what the others hold is known before it is planned with
    state = {"w": torch.arange(5.0)}
    real, planned = sharded_fetch.plan_parts, []

    def plan(wants: Any, groups: Any, go_on: Any) -> Any:
        if any(liar.url in group.names for group in groups):
            raise error
        planned.append(len(groups))
        return real(wants, groups, go_on)

    monkeypatch.setattr(sharded_fetch, "plan_parts", plan)
    with source_of(state) as one, source_of(state) as other, LyingSource(one, Reply.send) as liar:
        received = receive([[one], [liar.url], [other]], True, {"w": torch.zeros(5)})
    assert torch.equal(received["w"], state["w"]) and planned == [1, 2]


def test_a_reader_of_dcps_compares_only_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with source_of(wanted()) as url, LyingSource(url, body_of(strips("s", step=STEP, **SMALL))) as lying:
        reader = PeerReader([lying.url], step=STEP, root="", timeout=LONG)
        cells_of, hours = peer_reader.cells_of, itertools.count(time.monotonic() + 3600, 3600)

        def late(*arguments: Any) -> Any:
            monkeypatch.setattr(peer_reader, "time", SimpleNamespace(monotonic=lambda: next(hours)))
            return cells_of(*arguments)

        monkeypatch.setattr(peer_reader, "cells_of", late)
        with pytest.raises(CheckpointException, match="could not be compared in 90 s"):
            dcp.load(wanted(), storage_reader=reader, no_dist=True)
