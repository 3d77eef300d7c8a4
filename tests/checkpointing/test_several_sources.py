"""From several sources comes one state, that of a single source, whatever becomes of the others on the way."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import warnings
import zlib
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_proxy import Answer, AnswerFault, Gate, ScriptedProxy, Wire, pass_on
from support.sources import BLOCK, make_transport
from support.thoroughness import by_default

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.fetching import block_transfer
from torchft_ckpt.checkpointing.fetching.block_transfer import BlockTransfer
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.checkpointing.protocol import parse_metadata
from torchft_ckpt.core.transfer import scheduler as ledger
from torchft_ckpt.errors import (
    ConfigError,
    ReplicaDivergenceWarning,
    SourceLostError,
    SourceRefusedError,
    TransferError,
    TransferStalledError,
    TransferTimeoutError,
)
from torchft_ckpt.testing.transport_conformance import differences

pytestmark = pytest.mark.filterwarnings("ignore::torchft_ckpt.errors.ReplicaDivergenceWarning")
LONG = timedelta(seconds=90)
STEP = 3
NUM_BLOCKS = 48


def make_state(who: str = "", changed: tuple[int, ...] = ()) -> dict[str, Any]:
    """12 tensors of 4 blocks each; those that are `changed` hold the bits of `who`."""
    state: dict[str, Any] = {"who": who}
    for index in range(NUM_BLOCKS // 4):
        seed = zlib.crc32(f"{who} {index}".encode()) if index in changed else index
        state[f"layer{index}"] = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    return state


class Scene:
    """Sources behind gates, and a destination."""

    def __init__(self, proxy: ScriptedProxy) -> None:
        self._proxy = proxy
        self.sources: list[HTTPTransport[Any]] = []
        self.gates: list[Gate] = []
        self.destination = make_transport(stall_timeout=LONG, connect_timeout=LONG)
        self.hasty = make_transport(stall_timeout=timedelta(seconds=12), connect_timeout=LONG)
        self.progress: list[TransferProgress] = []

    def add(self, state: Any, fault: AnswerFault = pass_on, step: int = STEP) -> Gate:
        source = make_transport()
        self.sources.append(source)
        source.send_checkpoint([1], step, state, timedelta(minutes=5))
        gate = self._proxy.gate(parse_metadata(source.metadata()).port)
        gate.arm(fault)
        self.gates.append(gate)
        return gate

    def fetch(self, timeout: timedelta = LONG, urls: list[str] | None = None, **how: Any) -> Any:
        destination = self.hasty if how.pop("hasty", False) else self.destination
        urls = [gate.url for gate in self.gates] if urls is None else urls
        return destination.fetch_checkpoint(urls, STEP, timeout, on_progress=self.progress.append, **how)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """No source is left for another, or asked for beside it, because it or who receives from it stood still for a while."""
    monkeypatch.setattr(block_transfer, "_PRIMARY_PATIENCE_S", 10 * LONG.total_seconds())
    monkeypatch.setattr(ledger, "_MIN_PATIENCE_S", LONG.total_seconds())
    with ScriptedProxy() as proxy:
        scene = Scene(proxy)
        yield scene
        for transport in (*scene.sources, scene.destination, scene.hasty):
            transport.shutdown()


def test_of_a_state_without_tensors_all_is_told(scene: Scene) -> None:
    scene.add({"epoch": 3})
    assert scene.fetch() == {"epoch": 3}
    assert scene.progress[-1].total_bytes == 0 and scene.progress[-1].fraction == 1.0


def num_blocks_asked(gate: Gate) -> int:
    runs = [path.rpartition("/")[2].split("-") for path in gate.paths if "/blocks/" in path]
    return sum(int(last) - int(first) + 1 for first, last in runs)


def until(condition: Callable[[], bool], then: AnswerFault = pass_on) -> AnswerFault:
    """Hold answers that carry blocks until something has happened elsewhere."""

    async def fault(answer: Answer, wire: Wire) -> None:
        deadline = time.monotonic() + 60
        while answer.kind == "blocks" and not condition() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        await then(answer, wire)

    return fault


class Losing:
    """A fault that lets some blocks pass and then becomes `loss`, for every connection."""

    def __init__(self, num_blocks: int, loss: Callable[[Answer, Wire], Awaitable[None]]) -> None:
        self.left = num_blocks
        self.loss = loss
        self.num_passed = 0
        self.is_lost = False

    async def __call__(self, answer: Answer, wire: Wire) -> None:
        num_blocks = len(answer.blocks())
        if answer.kind == "blocks" and num_blocks > self.left:
            self.is_lost = True
        if self.is_lost:
            await self.loss(answer, wire)
            return
        self.left -= num_blocks
        self.num_passed += num_blocks
        await wire.send(answer.raw)


async def cut(answer: Answer, wire: Wire) -> None:
    await wire.cut()


async def hang(answer: Answer, wire: Wire) -> None:
    await wire.hang()


async def refuse(answer: Answer, wire: Wire) -> None:
    body = b'{"error": "gone", "message": "freed", "serving_step": null}'
    await wire.send(b"HTTP/1.1 410 Gone\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def flip(answer: Answer, wire: Wire) -> None:
    damaged = bytearray(answer.raw)
    if answer.kind == "blocks":
        damaged[answer.head_bytes + 10] ^= 4
    await wire.send(bytes(damaged))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What fetches have learnt so far: sources by the name of the method that was told of them."""
    found: dict[str, set[str]] = {"learn_digests": set(), "note_divergence": set(), "promote": set()}
    for method in found:
        original = getattr(BlockTransfer, method)

        def wrapper(self: BlockTransfer, name: str, what: Any, original: Any = original, method: str = method) -> Any:
            result = original(self, name, what)
            found[method].add(name)
            return result

        monkeypatch.setattr(BlockTransfer, method, wrapper)
    return found


def test_blocks_come_from_every_source(scene):
    state = make_state()
    for _ in range(3):
        scene.add(state, until(lambda: all(num_blocks_asked(gate) for gate in scene.gates)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert differences(scene.fetch(), state) == []
    asked = [num_blocks_asked(gate) for gate in scene.gates]
    assert min(asked) > 0 and sum(asked) == NUM_BLOCKS
    assert scene.progress[-1].num_sources == 3 and scene.progress[-1].resent_bytes == 0


def test_a_source_that_is_named_twice_is_asked_once(scene):
    gate = scene.add(make_state())
    scene.fetch(urls=[gate.url, gate.url + "/", gate.url])
    assert num_blocks_asked(gate) == NUM_BLOCKS
    assert [path.partition("?")[0] for path in gate.paths].count(f"/v1/checkpoint/{STEP}/manifest") == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("loss", [cut, hang, refuse, flip])
def test_a_source_that_is_lost_midway_is_dropped_and_what_it_brought_is_kept(scene, loss, lost):
    state = make_state()
    fault = Losing(10, loss)
    other = until(lambda: fault.is_lost)
    for index in range(2):
        scene.add(state, fault if index == lost else other)
    assert differences(scene.fetch(hasty=loss is hang), state) == []
    assert fault.num_passed > 0
    assert num_blocks_asked(scene.gates[1 - lost]) == NUM_BLOCKS - fault.num_passed
    assert scene.progress[-1].resent_bytes <= BLOCK
    assert scene.progress[-1].num_sources == 1


@pytest.mark.parametrize("first", ["http://127.0.0.1:1", "nobody", "of another step"])
def test_the_first_source_does_not_have_to_have_it(scene, first):
    """Nobody waits for one that is known not to: with this patience the receive would not end before its deadline."""
    gate = scene.add(make_state())
    url = scene.add(make_state(), step=STEP + 1).url if first == "of another step" else first
    assert differences(scene.fetch(urls=[url, gate.url]), make_state()) == []


def test_blocks_that_differ_come_from_the_primary_and_the_tensors_are_named(scene, learnt):
    first, second = make_state("a"), make_state("a", changed=())
    second["layer2"] = second["layer2"] + 1
    second["layer7"] = second["layer7"].clone()
    second["layer7"].view(torch.int32)[5] ^= 1
    scene.add(first, until(lambda: len(learnt["learn_digests"]) == 2))
    scene.add(second)
    with pytest.warns(ReplicaDivergenceWarning) as caught:
        state = scene.fetch()
    assert differences(state, first) == []
    (warning,) = [str(each.message) for each in caught]
    assert f"{scene.gates[1].url} differs from {scene.gates[0].url}" in warning
    assert "5 blocks differ; what differs is among layer2, layer7" in warning
    assert warning.count("layer") == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_state("b"), "values that are no tensors differ"),
        ({"layer0": torch.zeros(NUM_BLOCKS * BLOCK // 4)}, "its tensors have other names, shapes or dtypes"),
    ],
)
def test_other_plain_values_or_another_layout_are_warned_of_and_never_mixed_in(scene, learnt, other, message):
    scene.add(make_state("a"), until(lambda: bool(learnt["note_divergence"])))
    scene.add(other)
    with pytest.warns(ReplicaDivergenceWarning, match=message):
        assert differences(scene.fetch(), make_state("a")) == []
    assert len(other) > 1 or num_blocks_asked(scene.gates[1]) == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_another_layout_is_received_from_the_beginning_where_the_first_source_is_lost(scene, learnt, in_place):
    first, second = make_state("a"), {**make_state("b", changed=(1, 5)), "more": torch.ones(3000)}
    scene.add(first, Losing(10, cut))
    scene.add(second)
    local = make_state("old", changed=tuple(range(12))) if in_place else None
    state = scene.fetch(local_state=local, in_place=in_place)
    assert differences(state, second) == []
    assert not in_place or state["layer3"] is local["layer3"]


def test_when_the_primary_is_lost_another_one_is_adopted_and_what_differs_comes_anew(scene, learnt):
    first, second = make_state("a", changed=(0, 1)), make_state("a")
    fault = Losing(16, cut)
    scene.add(first, until(lambda: len(learnt["learn_digests"]) == 2, fault))
    scene.add(
        second, until(lambda: scene.gates[1].url in learnt["promote"])
    )  # or the first one's state may be whole before
    with pytest.warns(
        ReplicaDivergenceWarning, match="8 blocks differ; what differs is among layer0, layer1"
    ) as caught:
        assert differences(scene.fetch(), second) == []
    assert [f"{scene.gates[0].url} differs from {scene.gates[1].url}" in str(each.message) for each in caught] == [True]
    assert num_blocks_asked(scene.gates[1]) == NUM_BLOCKS - fault.num_passed + 8


def test_an_heir_is_not_said_to_differ_from_itself(scene, learnt):
    fault = Losing(10, cut)
    scene.add(make_state("a"), fault)
    scene.add(make_state("b"), until(lambda: scene.gates[1].url in learnt["promote"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert differences(scene.fetch(), make_state("b")) == []
    heir = scene.gates[1].url
    assert [each for each in caught if f"{heir} differs from {heir}" in str(each.message)] == []


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_whatever_diverges_and_whoever_is_lost_when_the_state_is_that_of_one_source(scene, in_place):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    names = ["a", "b", "c"]
    for _ in range(by_default(4, thorough=12)):
        states = [make_state(name, tuple(i for i in range(12) if generator.random() < 0.4)) for name in names]
        survivor = generator.randrange(3)
        lost = {i: generator.randrange(NUM_BLOCKS) for i in range(3) if i != survivor and generator.random() < 0.8}
        faults = [Losing(lost.get(i, 10**6), generator.choice([cut, refuse, flip])) for i in range(3)]
        first = len(scene.gates)
        for state, fault in zip(states, faults, strict=True):
            scene.add(state, fault)
        local = make_state("old", tuple(range(12))) if in_place else None
        urls = [gate.url for gate in scene.gates[first:]]
        received = scene.fetch(urls=urls, local_state=local, in_place=in_place)
        wrong = {state["who"]: differences(received, state) for state in states}
        assert wrong[received["who"]] == [], f"a mixture: {wrong}"
        assert not in_place or differences({**local, "who": received["who"]}, received) == []


def test_a_replica_that_agreed_with_the_lost_primary_is_not_blamed_for_differing_from_the_new_one(
    scene, learnt, monkeypatch
):
    monkeypatch.setattr(ledger, "_MIN_PATIENCE_S", 1.0)  # else nobody asks the third one for what the others hold up
    primary, heir, third = make_state("a", changed=(0,)), make_state("b"), make_state("c", changed=())
    third["layer0"] = primary["layer0"]
    asked = threading.Event()

    async def hold_until_adopted(answer: Answer, wire: Wire) -> None:
        if any(block < 4 for block in answer.blocks()):
            asked.set()
            await until(lambda: scene.gates[1].url in learnt["promote"])(answer, wire)
        else:
            await wire.send(answer.raw)

    scene.add(primary, until(asked.is_set, Losing(0, cut)))
    scene.add(heir, until(asked.is_set))
    scene.add(third, hold_until_adopted)
    assert differences(scene.fetch(), heir) == []
    assert scene.progress[-1].num_sources == 2


def test_progress_never_tells_of_more_than_there_is(scene):
    fault = Losing(40, cut)
    scene.add(make_state("a", changed=tuple(range(12))), fault)
    scene.add(make_state("b"), until(lambda: fault.is_lost))
    scene.fetch()
    assert max(each.fraction for each in scene.progress) <= 1.0


def test_where_all_are_bad_the_error_names_each(scene):
    with pytest.raises(ConfigError, match="sources"):
        scene.fetch(urls=[])
    other_step = scene.add(make_state(), step=STEP + 1).url
    with pytest.raises(TransferError, match=r"no source is left.*409 over") as raised:
        scene.fetch(urls=["http://127.0.0.1:1", other_step])
    places = [str(raised.value).find(f"{url}: ") for url in ("http://127.0.0.1:1", other_step)]
    assert min(places) > 0
    # The kind is that of whichever failed first, which is named first.
    assert type(raised.value) is (SourceLostError if places[0] < places[1] else SourceRefusedError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "kind"), [(cut, SourceLostError), (refuse, SourceRefusedError), (hang, TransferStalledError)]
)
def test_where_all_are_lost_midway_there_is_no_state(scene, loss, kind):
    for _ in range(3):
        scene.add(make_state(), Losing(8, loss))
    with pytest.raises(kind, match="no source is left") as raised:
        scene.fetch(hasty=True)
    assert [gate.url for gate in scene.gates if gate.url not in str(raised.value)] == []


def test_the_deadline_is_one_for_all_sources_together(scene):
    """Nothing else ends this receive: its patience with a source that hangs has no end."""
    for _ in range(2):
        scene.add(make_state(), Losing(8, hang))
    patient = make_transport(stall_timeout=timedelta(hours=1))
    started = time.monotonic()
    try:
        with pytest.raises(TransferTimeoutError, match=r"\d+ of 48 blocks received"):
            patient.fetch_checkpoint([gate.url for gate in scene.gates], STEP, timedelta(seconds=0.6))
    finally:
        patient.shutdown()
    assert time.monotonic() - started >= 0.6


def test_no_thread_of_a_fetch_touches_the_filters_of_warnings(scene, monkeypatch):
    """They belong to the process: where two threads set them back out of order, every later warning is lost."""
    threads: list[str] = []
    original = warnings.catch_warnings.__enter__
    monkeypatch.setattr(
        warnings.catch_warnings,
        "__enter__",
        lambda self: (threads.append(threading.current_thread().name), original(self))[1],
    )
    scene.add(make_state())
    scene.fetch()
    assert "torchft_ckpt-fetch" not in threads
