"""Whoever sends blocks that another source announces may forge them: xxh3 has second preimages. BLAKE3 has none.

Blocks straight from the source that announces them are checked by xxh3 alone, and nobody computes anything else for them.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3
from support.forging import forge
from support.waiting import wait_until
from test_peers import BLOCK, NUM_BLOCKS, STEP, Scene, WrongPeer, get, scene  # noqa: F401 (a fixture)

from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer
from torchft_ckpt.checkpointing.fetching.receive import BufferCache, Destination
from torchft_ckpt.checkpointing.fetching.streams import Stream
from torchft_ckpt.checkpointing.lock import StateDictLock
from torchft_ckpt.checkpointing.serving import handlers, sending
from torchft_ckpt.checkpointing.serving.buffers import BufferPool
from torchft_ckpt.checkpointing.serving.relay import Relay
from torchft_ckpt.checkpointing.serving.snapshot import Snapshot
from torchft_ckpt.checkpointing.state.blocks import digest_of, start_digest
from torchft_ckpt.errors import DigestMismatchError, SourceLostError
from torchft_ckpt.testing.transport_conformance import differences

STATE = {"w": torch.arange(2 * BLOCK, dtype=torch.uint8)}
BLOCKS = [bytes(range(256)) * (BLOCK // 256)] * 2
FORGED = [forge(block, number, bytes(BLOCK)) for number, block in enumerate(BLOCKS)]
BLAKE3S = {number: blake3(block).digest() for number, block in enumerate(BLOCKS)}
XXH3S = {number: digest_of(number, block) for number, block in enumerate(BLOCKS)}


class Receiving:
    """A receive from "source" that has begun; "other" holds both blocks, as another receiver or as a replica."""

    def __init__(self, kind: str) -> None:
        snapshot = Snapshot(STATE, step=STEP, lock=StateDictLock(), pool=BufferPool(BLOCK), num_expected=0)
        self.destination = Destination(snapshot.manifest, BufferCache())
        self.state = BlockTransfer(["source", "other"] if kind == "replica" else ["source"], seed=1)
        assert self.state.choose_primary("source", snapshot.manifest)
        self.state.begin("source", self.destination, {}, {}, (0, 1))
        if kind == "replica":
            assert not self.state.choose_primary("other", snapshot.manifest)
            self.state.add_replica("other")
            self.state.learn_digests("other", XXH3S)
            self.state.learn_digests("source", XXH3S)
        else:
            self.state.meet_peers({"other": 0b11}, 0)
        self.manifest = snapshot.manifest

    def announce(self) -> None:
        """The source says what BLAKE3 digests its blocks have."""
        self.state.learn_blake3s("source", BLAKE3S)

    def bring(self, name: str, sent: list[bytes], num_bytes: int = BLOCK) -> None:
        """Bring blocks from a source until all are here or it fails, each with its true xxh3; cut after so many bytes."""
        sender = Sender(name, sent, num_bytes)
        Stream(self.state, self.destination, sender.ask).run(sender, self.manifest, int)

    def contents(self) -> list[bytes]:
        return [b"".join(self.destination.views(block)) for block in range(2)]

    def is_asked(self, name: str) -> bool:
        """Whether a source would be asked for something now."""
        ledger = self.state._ledger
        stream = ledger.open_stream(name, 0.0)
        batch = ledger.next_batch(stream, 0.0)
        ledger.close_stream(stream)
        return bool(batch)


class Sender(SimpleNamespace):
    """A `SourceClient` that sends these blocks."""

    def __init__(self, name: str, sent: list[bytes], num_bytes: int) -> None:
        super().__init__(name=name, path=name)
        self.sent, self.num_bytes = sent, num_bytes

    def ask(self, client: Any, manifest: Any, blocks: list[int]) -> Iterator[tuple[int, Any]]:
        for block in blocks:
            yield block, SimpleNamespace(read_into=self._reader(block), start_part_digest=start_digest)

    def _reader(self, block: int) -> Callable[..., None]:
        coming = self.sent[block][: self.num_bytes] + (XXH3S[block] if self.num_bytes == BLOCK else b"")

        def read_into(target: memoryview, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
            nonlocal coming
            part, coming = coming[: len(target)], coming[len(target) :]
            target[: len(part)] = part
            on_bytes(len(part))
            if len(part) < len(target):
                raise SourceLostError("it closed the connection", "other")

        return read_into


KINDS = pytest.mark.parametrize("kind", ["receiver", "replica"])


def test_the_forged_blocks_have_the_digests_of_the_true_ones():
    assert [digest_of(number, block) for number, block in enumerate(FORGED)] == list(XXH3S.values())
    assert FORGED[0] != BLOCKS[0]


@KINDS
def test_a_forged_block_does_not_count_and_nothing_of_it_is_left(kind):
    receiving = Receiving(kind)
    receiving.announce()
    with pytest.raises(DigestMismatchError, match=r"from other does not have the BLAKE3 digest that its primary"):
        receiving.bring("other", FORGED)
    assert (receiving.state.over, receiving.state.arrived_text()) == (False, "0 of 2 blocks")
    assert FORGED[0] not in receiving.contents() and FORGED[1] not in receiving.contents()
    receiving.state.fail_peer("other")
    receiving.bring("source", BLOCKS)
    assert (receiving.state.outcome, receiving.contents()) == (None, BLOCKS)


@KINDS
def test_a_block_that_was_cut_before_it_could_be_checked_leaves_nothing(kind):
    """A next receive into this memory would take it for what it need not fetch."""
    receiving = Receiving(kind)
    receiving.announce()
    with pytest.raises(SourceLostError):
        receiving.bring("other", FORGED, num_bytes=BLOCK - 1)
    assert FORGED[0][:-1] not in [content[:-1] for content in receiving.contents()]


def test_a_block_that_counted_is_not_wiped_though_another_source_is_adopted_in_that_moment(monkeypatch):
    """It is missing again, so another stream may have asked for it and be writing there."""
    receiving = Receiving("replica")
    receiving.announce()
    state, arrived = receiving.state, receiving.state.arrived

    def arrived_and_adopted(*what: Any) -> bool:
        arrived(*what)
        assert state.arrived_text() == "1 of 2 blocks"
        state.fail_source("source", SourceLostError("it is gone", "source"))
        state.promote("other", {0: bytes(16), 1: bytes(16)})
        assert state.arrived_text() == "0 of 2 blocks"
        state.end(SourceLostError("enough", "other"))
        return False

    monkeypatch.setattr(state, "arrived", arrived_and_adopted)
    receiving.bring("other", BLOCKS)
    assert receiving.contents()[0] == BLOCKS[0]


@KINDS
def test_true_blocks_count(kind):
    receiving = Receiving(kind)
    receiving.announce()
    receiving.bring("other", BLOCKS)
    assert (receiving.state.over, receiving.state.outcome, receiving.contents()) == (True, None, BLOCKS)


@KINDS
def test_nothing_comes_from_others_before_the_source_has_announced_its_blake3_digest(kind):
    receiving = Receiving(kind)
    assert not receiving.is_asked("other")
    assert receiving.state.await_uncheckable("source", limit=1) == [0]
    receiving.state.learn_blake3s("other", BLAKE3S)
    assert not receiving.is_asked("other"), "only the source's count"
    receiving.announce()
    assert receiving.is_asked("other")


def test_the_source_is_asked_once_for_each_digest_and_not_for_what_is_here_already():
    receiving = Receiving("receiver")
    assert receiving.state.await_uncheckable("source", limit=9) == [0, 1]
    asked = threading.Thread(target=receiving.state.await_uncheckable, args=("source", 9))
    asked.start()
    receiving.bring("source", BLOCKS)
    asked.join(60)
    assert receiving.state.await_uncheckable("source", limit=9) == []


def test_what_a_lost_source_announced_does_not_count_for_the_next_one():
    receiving = Receiving("replica")
    state = receiving.state
    state.meet_peers({"peer": 0b11}, 0)
    assert state.await_uncheckable("source", limit=9) == [0, 1]
    receiving.announce()
    assert receiving.is_asked("peer")
    state.fail_source("source", SourceLostError("it is gone", "source"))
    assert state.await_uncheckable("source", limit=9) == []
    state.promote("other", XXH3S)
    state.meet_peers({"peer": 0b11}, 0)
    assert not receiving.is_asked("peer")
    assert (state.await_primary(), state.await_uncheckable("other", limit=9)) == ("other", [0, 1])
    state.learn_blake3s("other", BLAKE3S)
    assert receiving.is_asked("peer")


def test_a_block_that_came_while_its_source_was_lost_does_not_count_for_the_next_one():
    receiving = Receiving("replica")
    state = receiving.state
    stream = state.open_stream("source", "source")
    assert state.next_batch(stream, "source", "source") is not None
    state.fail_source("source", SourceLostError("it is gone", "source"))
    state.promote("other", XXH3S)
    state.arrived(stream, "source", "source", 0, XXH3S[0])
    assert state.arrived_text() == "0 of 2 blocks"


# ------------------------------------------------------------------------------------------------- over real transports


def space_of(state: dict[str, Any]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for name, tensor in state.items() if name != "step")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_receiver_that_forges_is_left_and_said_to(scene, in_place, caplog):  # noqa: F811
    (destination, _) = scene.serve(2)
    forger = WrongPeer(scene, true_digests=True)
    space = space_of(scene.state)
    forged = [forge(space[at * BLOCK : (at + 1) * BLOCK], at, bytes(BLOCK)) for at in range(NUM_BLOCKS)]
    forger.send = forged
    local = {name: torch.zeros_like(value) if name != "step" else 0 for name, value in scene.state.items()}
    state = scene.fetch(destination, local_state=local, in_place=in_place)
    forger.transport.shutdown()
    assert forger.num_lent > 0
    assert differences(state, scene.state) == []
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum(f"taking nothing more from {forger.url}: block" in line and "forged" in line for line in said) == 1


def test_who_receives_alone_asks_for_no_blake3_digest(scene):  # noqa: F811
    (destination,) = scene.serve(1)
    assert differences(scene.fetch(destination), scene.state) == []
    assert any("/peers" in path for path in scene.gate.paths), "it looked for others"
    assert [path for path in scene.gate.paths if "/blake3" in path] == []


def count_hashers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the BLAKE3 digests that a source begins to compute."""
    begun: list[int] = []
    monkeypatch.setattr(sending, "start_blake3", lambda: begun.append(1) or blake3())
    return begun


def test_a_source_computes_each_digest_once_whoever_asks(scene, monkeypatch):  # noqa: F811
    begun = count_hashers(monkeypatch)
    monkeypatch.setattr(handlers, "_BLAKE3_AT_ONCE_BYTES", 3 * BLOCK)
    scene.serve(8)
    url = f"{scene.source.metadata()}/v1/checkpoint/{STEP}/blake3?blocks=0-{NUM_BLOCKS - 1}"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: json.loads(get(url, {})), range(8)))
    space = space_of(scene.state)
    expected = {str(at): blake3(space[at * BLOCK : (at + 1) * BLOCK]).hexdigest() for at in range(NUM_BLOCKS)}
    assert [answer == expected for answer in answers] == [True] * 8
    assert len(begun) == NUM_BLOCKS


def test_nothing_more_is_computed_for_a_client_that_has_left(scene, monkeypatch):  # noqa: F811
    monkeypatch.setattr(handlers, "_BLAKE3_AT_ONCE_BYTES", BLOCK)
    begun, may_go_on = threading.Semaphore(0), threading.Event()
    num_begun = 0

    def wait(snapshot: Snapshot, blocks: list[int]) -> None:
        nonlocal num_begun
        num_begun += 1
        begun.release()
        may_go_on.wait(20)

    monkeypatch.setattr(handlers, "note_blake3s", wait)
    scene.serve(1)
    client = http.client.HTTPConnection(scene.source.metadata().removeprefix("http://"))
    client.request("GET", f"/v1/checkpoint/{STEP}/blake3?blocks=0-{NUM_BLOCKS - 1}")
    assert begun.acquire(timeout=60)
    client.close()
    computing = scene.source._server._handlers._computing_blake3
    wait_until(lambda: not computing.locked(), "the request ends as its client has left")
    may_go_on.set()
    assert num_begun == 1


def test_blocks_that_a_source_has_freed_are_left_out(scene):  # noqa: F811
    scene.serve(1)
    scene.join_as("me", "http://127.0.0.1:1", "0")
    scene.source.disallow_checkpoint()
    url = f"{scene.source.metadata()}/v1/checkpoint/{STEP}/blake3?blocks=0-1"
    assert json.loads(get(url, {})).keys() == {"1"}


def test_a_receiver_announces_no_digests(scene):  # noqa: F811
    (destination,) = scene.serve(1)
    manifest = scene.join_as("me", destination.metadata(), "0")
    relay = Relay(manifest, lambda block: [memoryview(bytes(BLOCK))], destination.lock)
    relay.add(0, bytes(16))
    destination._snapshots.add_relay(relay, ends=float("inf"))
    url = f"{destination.metadata()}/v1/checkpoint/{STEP}/blake3?blocks=0"
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(url, {"If-Match": f'"{manifest.snapshot}"'})
    assert raised.value.code == 404


def test_digests_that_are_none_are_refused(scene, monkeypatch):  # noqa: F811
    """A source that says something else than 32 bytes of blocks that were asked about is none."""
    (destination, _) = scene.serve(2)
    monkeypatch.setattr(
        sending, "start_blake3", lambda: SimpleNamespace(update=lambda _: None, digest=lambda: b"short")
    )
    liar = WrongPeer(scene, true_digests=True)
    state = destination.fetch_checkpoint([scene.gate.url], STEP, timedelta(seconds=20))
    liar.transport.shutdown()
    assert (differences(state, scene.state), liar.num_lent) == ([], 0)
