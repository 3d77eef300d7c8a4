"""Receivers of one state take blocks from each other; what a receiver serves ends before it may change, and is not trusted."""

from __future__ import annotations

import asyncio
import functools
import operator
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_proxy import Answer, Gate, ScriptedProxy, Wire
from support.sources import BLOCK, make_transport
from support.waiting import wait_until

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.protocol import MAX_PEERS, parse_metadata
from torchft_ckpt.checkpointing.serving.receivers import PeerBlocks, Receivers
from torchft_ckpt.checkpointing.serving.relay import Relay
from torchft_ckpt.checkpointing.state.blocks import digest_of
from torchft_ckpt.checkpointing.state.format import Manifest, decode_manifest
from torchft_ckpt.testing.transport_conformance import differences

LONG = timedelta(seconds=90)
NUM_BLOCKS = 96
STEP = 3
BLOCK_S = 0.006
"""So long the throttled source takes for a block, whoever asks: 0.58 s for the state."""


def make_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"step": STEP, **{f"w{i}": torch.randn(8 * BLOCK // 4, generator=generator) for i in range(NUM_BLOCKS // 8)}}


class Scene:
    """A source behind a gate as narrow as a slow link, and destinations."""

    def __init__(self, proxy: ScriptedProxy) -> None:
        self.source = make_transport()
        self.state = make_state()
        self._transports = [self.source]
        self._link = asyncio.Lock()
        self.gate: Gate = proxy.gate(parse_metadata(self.source.metadata()).port)
        self.gate.arm(self._throttle)

    async def _throttle(self, answer: Answer, wire: Wire) -> None:
        if answer.kind == "blocks":
            async with self._link:
                await asyncio.sleep(BLOCK_S * len(answer.blocks()))
        await wire.send(answer.raw)

    def serve(self, num_destinations: int) -> list[HTTPTransport[Any]]:
        self.source.send_checkpoint(list(range(num_destinations)), STEP, self.state, timedelta(minutes=5))
        destinations = [make_transport() for _ in range(num_destinations)]
        self._transports += destinations
        return destinations

    def fetch(self, destination: HTTPTransport[Any], **how: Any) -> Any:
        return destination.fetch_checkpoint([self.gate.url], STEP, LONG, **how)

    def fetch_all(self, destinations: list[HTTPTransport[Any]]) -> list[Any]:
        with ThreadPoolExecutor(len(destinations)) as threads:
            return list(threads.map(self.fetch, destinations))

    def num_blocks_sent(self) -> int:
        runs = [path.rpartition("/")[2].split("-") for path in self.gate.paths if "/blocks/" in path]
        return sum(int(last) - int(first) + 1 for first, last in runs)

    def join_as(self, receiver: str, address: str, held: str) -> Manifest:
        """Be a receiver that serves at an address."""
        headers = {"X-Ckpt-Receiver": receiver}
        body = get(f"{self.source.metadata()}/v1/checkpoint/{STEP}/manifest", headers)
        headers |= {"X-Ckpt-Received": held, "X-Ckpt-Address": address}
        get(f"{self.source.metadata()}/v1/checkpoint/{STEP}/peers", headers)
        return decode_manifest(body)

    def close(self) -> None:
        for transport in self._transports:
            transport.shutdown()


def get(url: str, headers: dict[str, str]) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.read()


def served(transport: HTTPTransport[Any]) -> list[str]:
    return [entry.phase for entry in transport._snapshots.index(0.0).snapshots]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ScriptedProxy() as proxy:
        scene = Scene(proxy)
        try:
            yield scene
        finally:
            scene.close()


# ------------------------------------------------------------------------------------------------------------- together


def test_three_receivers_get_the_state_for_little_more_than_one_of_the_sources_links(scene):
    destinations = scene.serve(3)
    started = time.monotonic()
    states = scene.fetch_all(destinations)
    took_s = time.monotonic() - started
    assert [differences(state, scene.state) for state in states] == [[], [], []]
    assert NUM_BLOCKS <= scene.num_blocks_sent() < 2 * NUM_BLOCKS
    print(f"{scene.num_blocks_sent()} of {NUM_BLOCKS} blocks sent, {took_s:.2f} s")


def test_received_in_place_they_serve_each_other_as_well(scene):
    destinations = scene.serve(2)
    local = [make_state(seed) for seed in (1, 2)]

    def fetch(index: int) -> Any:
        return scene.fetch(destinations[index], local_state=local[index], in_place=True)

    with ThreadPoolExecutor(2) as threads:
        states = list(threads.map(fetch, range(2)))
    assert [differences(state, scene.state) for state in [*states, *local]] == [[], [], [], []]
    assert scene.num_blocks_sent() < 1.7 * NUM_BLOCKS


def test_a_receiver_that_is_done_serves_one_that_comes_later(scene):
    destinations = scene.serve(2)
    early, late = destinations
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(scene.fetch, early)
        wait_until(lambda: scene.num_blocks_sent() > NUM_BLOCKS // 2, "half of the blocks are sent")
        second = threads.submit(scene.fetch, late)
        states = [first.result(60), second.result(60)]
    assert [differences(state, scene.state) for state in states] == [[], []]
    assert scene.num_blocks_sent() < 1.8 * NUM_BLOCKS


def test_a_lone_receiver_keeps_serving_nothing(scene):
    (destination,) = scene.serve(1)
    assert differences(scene.fetch(destination), scene.state) == []
    assert served(destination) == []


# -------------------------------------------------------------------------------------------------------- not trusted


class WrongPeer:
    """Another receiver, which serves bytes of its own under the snapshot's name."""

    def __init__(self, scene: Scene, *, true_digests: bool) -> None:
        self.transport = make_transport()
        self.url = self.transport.metadata()
        self.num_lent = 0
        manifest = scene.join_as("liar", self.transport.metadata(), f"0-{NUM_BLOCKS - 1}")
        wrong = bytes(BLOCK)
        self.send = [wrong] * NUM_BLOCKS
        relay = Relay(manifest, self._views, self.transport.lock)
        space = b"".join(tensor.numpy().tobytes() for name, tensor in scene.state.items() if name != "step")
        for block in range(NUM_BLOCKS):
            right = space[block * BLOCK : (block + 1) * BLOCK]
            relay.add(block, digest_of(block, right if true_digests else wrong))
        self.transport._snapshots.add_relay(relay, ends=time.monotonic() + 600)

    def _views(self, block: int) -> list[memoryview]:
        self.num_lent += 1
        return [memoryview(self.send[block])]


@pytest.mark.parametrize("true_digests", [True, False], ids=["the_sources_digests", "digests_of_its_own"])
def test_a_peer_that_serves_other_bytes_is_dropped_and_the_state_is_right(scene, true_digests):
    (destination, _) = scene.serve(2)
    liar = WrongPeer(scene, true_digests=true_digests)
    state = scene.fetch(destination)
    liar.transport.shutdown()
    assert liar.num_lent > 0
    assert differences(state, scene.state) == []
    assert scene.num_blocks_sent() == NUM_BLOCKS


@pytest.mark.parametrize("in_place", [False, True])
def test_a_peer_at_an_address_where_nobody_listens_costs_nothing(scene, in_place):
    (destination, _) = scene.serve(2)
    gone = make_transport()
    gone.shutdown()
    scene.join_as("ghost", gone.metadata(), f"0-{NUM_BLOCKS - 1}")
    state = scene.fetch(destination, local_state=make_state(1), in_place=in_place)
    assert differences(state, scene.state) == []


def test_a_peer_that_serves_another_snapshot_is_dropped(scene):
    """Of the same step, with the same names: the id of the snapshot tells them apart."""
    (destination, _) = scene.serve(2)
    other = make_transport()
    other.send_checkpoint([1], STEP, make_state(9), timedelta(minutes=5))
    scene.join_as("other", other.metadata(), f"0-{NUM_BLOCKS - 1}")
    state = scene.fetch(destination)
    other.shutdown()
    assert differences(state, scene.state) == []


# ----------------------------------------------------------------------------------------------------- how a relay ends


@pytest.fixture
def relaying(scene: Scene) -> HTTPTransport[Any]:
    """A receiver that is done and serves on."""
    destinations = scene.serve(2)
    scene.fetch_all(destinations)
    relaying = [destination for destination in destinations if served(destination) == ["relay"]]
    assert relaying
    return relaying[0]


def test_a_relay_ends_when_its_owner_says_that_the_state_may_change(relaying):
    relaying.disallow_checkpoint()
    assert served(relaying) == []


def test_a_relay_ends_before_a_writer_has_the_lock(scene, relaying):
    snapshot = relaying._snapshots.index(0.0).snapshots[0].snapshot
    with relaying.lock.write():
        assert served(relaying) == []
    request = f"{relaying.metadata()}/v1/checkpoint/{STEP}/blocks/0-0"
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(request, {"If-Match": f'"{snapshot}"'})
    assert raised.value.code == 412


@pytest.mark.slow
def test_a_relay_ends_with_withdraw_and_with_shutdown(scene):
    for end in (HTTPTransport.withdraw_checkpoint, HTTPTransport.shutdown):
        destinations = scene.serve(2)
        scene.fetch_all(destinations)
        for destination in destinations:
            end(destination)
        assert [served(destination) for destination in destinations] == [[], []]


def test_a_relay_is_closed_once_nothing_of_it_is_lent(scene):
    (destination, _) = scene.serve(2)
    manifest = scene.join_as("me", destination.metadata(), "0")
    relay = Relay(manifest, lambda block: [memoryview(bytes(BLOCK))], destination.lock)
    relay.add(0, bytes(16))
    closed = threading.Event()

    def close() -> None:
        relay.close()
        closed.set()

    with relay.lend(0, 100) as views:
        closing = threading.Thread(target=close)
        closing.start()
        wait_until(lambda: relay.closed, "the relay is closed")
        assert not closed.is_set() and [len(view) for view in views] == [100]
    assert closed.wait(120)
    closing.join(60)
    assert not relay.holds(0, 100)


def test_a_relay_is_gone_after_its_time(scene):
    (destination, _) = scene.serve(2)
    manifest = scene.join_as("me", destination.metadata(), "0")
    relay = Relay(manifest, lambda block: [memoryview(bytes(BLOCK))], destination.lock)
    ends = time.monotonic() + 0.2
    destination._snapshots.add_relay(relay, ends=ends)
    destination._server.expire_at(ends)
    wait_until(lambda: relay.closed, "the relay is closed")


# --------------------------------------------------------------------------------------------------------- `Receivers`


def test_somebody_who_has_not_come_needs_everything():
    receivers = Receivers(4, num_expected=2)
    receivers.add("a", 0.0)
    receivers.acknowledge("a", 0b1111)
    assert (receivers.awaits_more, receivers.needed()) == (True, 0b1111)
    receivers.add("b", 0.0)
    receivers.acknowledge("b", 0b0011)
    assert (receivers.awaits_more, receivers.needed()) == (False, 0b1100)


def test_a_receiver_that_begins_again_serves_nothing_until_it_says_so():
    receivers = Receivers(4, num_expected=2)
    for says_so in (True, False):
        receivers.add("a", 0.0)
        receivers.contact("a", 0.0, "http://a:1" if says_so else None)
        receivers.finish("a")
        assert [peer.address for peer in receivers.peers_of("me")] == ["http://a:1"] * says_so


def test_a_receiver_that_begins_again_needs_everything_again():
    receivers = Receivers(4, num_expected=1)
    for _ in range(2):
        receivers.add("a", 0.0)
        assert receivers.needed() == 0b1111
        receivers.acknowledge("a", 0b0111)
        receivers.finish("a")
        assert (receivers.needed(), receivers.num_done, receivers.num_seen) == (0, 1, 1)


def test_leases_are_revoked_from_the_unseen_to_the_slowest_to_the_last():
    receivers = Receivers(8, num_expected=3)
    for name, held in (("fast", 0xF), ("slow", 0x1)):
        receivers.add(name, 0.0)
        receivers.acknowledge(name, held)
    unseen = "1 receivers that have not come yet"
    assert receivers.revoke_until(lambda blocks: True) == []
    assert receivers.revoke_until(lambda blocks: blocks.bit_count() <= 7) == [unseen]
    assert (receivers.is_revoked("unseen"), receivers.is_revoked("fast"), receivers.needed()) == (True, False, 0xFE)
    assert receivers.revoke_until(lambda blocks: blocks.bit_count() <= 6) == ["receiver slow"]
    assert (receivers.is_revoked("slow"), receivers.is_revoked("fast"), receivers.needed()) == (True, False, 0xF0)
    assert receivers.revoke_until(lambda blocks: not blocks) == ["receiver fast"]
    assert (receivers.revoke_until(lambda blocks: not blocks), receivers.num_active) == ([], 0)


def test_leases_are_revoked_as_one_after_the_other_would_be():
    random.seed(SEED := 20)
    for case in range(300):
        names = [f"r{number}" for number in range(random.randrange(6))]
        held = {name: random.getrandbits(8) for name in names}
        num_blocks = random.randrange(9)
        receivers = Receivers(8, num_expected=0)
        for name in names:
            receivers.add(name, 0.0)
            receivers.acknowledge(name, held[name])
        left = sorted(names, key=lambda name: (held[name].bit_count(), name))
        gone = []
        while (
            left and bin(functools.reduce(operator.or_, (0xFF & ~held[name] for name in left))).count("1") > num_blocks
        ):
            gone.append(f"receiver {left.pop(0)}")
        revoked = receivers.revoke_until(lambda blocks, most=num_blocks: blocks.bit_count() <= most)
        assert revoked == gone, (SEED, case)


def test_names_that_cost_nothing_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.receivers.MAX_RECEIVERS", 3)
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.receivers.MAX_NAMES", 5)
    receivers = Receivers(8, num_expected=1)
    receivers.add("early", 0.0, "10.0.0.1")
    for number in range(1000):
        receivers.add(f"made up {number}", 0.0, "10.0.0.2")
        receivers.acknowledge(f"made up {number}", 0xFF)
        if number % 3:
            receivers.finish(f"made up {number}")
    assert (receivers.num_active, receivers.num_seen, len(receivers._seen)) == (3, 1001, 5)
    assert receivers.needed() == 0xFF  # the one who came early is among those that are kept


def test_addresses_that_cost_nothing_do_not_push_out_those_of_others(monkeypatch):
    monkeypatch.setattr("torchft_ckpt.checkpointing.serving.receivers.MAX_SERVING", 4)
    receivers = Receivers(1, num_expected=0)

    def serves(name: str, client: str) -> None:
        receivers.add(name, 0.0, client)
        receivers.contact(name, 0.0, f"http://{name}:1")
        receivers.acknowledge(name, 1)

    for name, client in (("a", "10.0.0.1"), ("b", "10.0.0.1"), ("c", "10.0.0.3")):
        serves(name, client)
    receivers.finish("b")
    for number in range(100):
        serves(f"made-up-{number}", "10.0.0.2")
        receivers.finish(f"made-up-{number}")
    told = {peer.address for peer in receivers.peers_of("me")}
    assert told == {"http://a:1", "http://b:1", "http://c:1", "http://made-up-99:1"}


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_of_receivers_belongs_to_those_that_are_known(monkeypatch, seed):
    for limit, number in (("MAX_RECEIVERS", 4), ("MAX_SERVING", 3), ("MAX_NAMES", 9)):
        monkeypatch.setattr(f"torchft_ckpt.checkpointing.serving.receivers.{limit}", number)
    chance = random.Random(seed)
    receivers = Receivers(8, num_expected=2)
    for moment in range(500):
        name, client = f"r{chance.randrange(20)}", f"10.0.0.{chance.randrange(4)}"
        what = chance.randrange(7)
        if what < 3:
            receivers.add(name, moment, client)
            assert name in receivers._active
        elif what == 3:
            receivers.contact(name, moment, f"http://{name}:1")
        elif what == 4:
            receivers.acknowledge(name, chance.getrandbits(8))
        elif what == 5:
            receivers.finish(name)
        elif chance.random() < 0.1:
            receivers.lapse(moment - 20.0)
        elif chance.random() < 0.1:
            receivers.revoke_until(lambda blocks: blocks.bit_count() < 5)
        active, known = set(receivers._active), set(receivers._seen)
        assert set(receivers._places._client_of) == active <= known
        assert receivers._done | receivers._revoked <= known and not receivers._done & active
        assert set(receivers._serving._client_of) == set(receivers._addresses) <= active | receivers._done
        assert (len(active) <= 4, len(receivers._addresses) <= 3, len(known) <= 9) == (True, True, True)


def test_a_silent_receiver_lapses_and_may_begin_again():
    receivers = Receivers(4, num_expected=2)
    for name in ("silent", "alive"):
        receivers.add(name, 10.0)
    receivers.contact("alive", 50.0)
    assert receivers.lapse(silent_since=20.0) == ["silent"]
    assert receivers.is_revoked("silent") and not receivers.is_revoked("alive")
    assert receivers.lapse(55.0) == ["alive"]
    assert receivers.needed() == 0
    receivers.add("silent", 80.0)
    assert not receivers.is_revoked("silent") and receivers.needed() == 0b1111


def test_shares_are_given_in_the_order_of_coming_and_kept():
    receivers = Receivers(4, num_expected=2)
    for name in ("a", "b", "a", "c"):
        receivers.add(name, 0.0)
    assert [receivers.share_of(name) for name in ("a", "b", "c")] == [(0, 3), (1, 3), (2, 3)]


def test_peers_are_the_others_that_serve_something_and_whoever_is_done():
    receivers = Receivers(4, num_expected=0)
    for name in ("me", "nothing", "nowhere", "some", "done"):
        receivers.add(name, 0.0)
        if name != "nowhere":
            receivers.contact(name, 0.0, f"http://{name}:1")
        if name != "nothing":
            receivers.acknowledge(name, 0b0110)
    receivers.finish("done")
    expected = {PeerBlocks("http://some:1", 0b0110), PeerBlocks("http://done:1", 0b1111)}
    assert set(receivers.peers_of("me")) == expected


def test_of_many_peers_each_receiver_is_told_a_few_and_not_the_same():
    receivers = Receivers(1, num_expected=0)
    for index in range(200):
        receivers.add(f"r{index}", 0.0)
        receivers.contact(f"r{index}", 0.0, f"http://r{index}:1")
        receivers.acknowledge(f"r{index}", 1)
    told = [[peer.address for peer in receivers.peers_of(f"r{index}")] for index in range(200)]
    assert {len(addresses) for addresses in told} == {MAX_PEERS}
    assert [index for index in range(200) if f"http://r{index}:1" in told[index]] == []
    assert len({address for addresses in told for address in addresses}) > 150
