"""Source ranks that are lost, hang or lie while their state is received onto another layout.

Either others make up for them and the state is that of one group, in every bit, or a named error comes within the deadline
and says whether something was written to.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import xxhash
from support.forging import forge
from support.resharding import (
    LONG,
    PLAIN,
    Group,
    Layout,
    LyingSource,
    Model,
    Reply,
    State,
    imagined_rank,
    make_transport,
    nothing_leaks,
    overwrite,
    snapshot_of,
    untouched,
)

from torchft_ckpt.checkpointing.http_transport import HTTPTransport
from torchft_ckpt.checkpointing.resharding import fetch
from torchft_ckpt.checkpointing.resharding import plan as plan_module
from torchft_ckpt.checkpointing.resharding.transfer import BoxTransfer
from torchft_ckpt.core.transfer.scheduler import mask_of_each
from torchft_ckpt.errors import (
    CheckpointError,
    DigestMismatchError,
    ReplicaDivergenceWarning,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    TransferCancelledError,
    TransferStalledError,
    TransferTimeoutError,
)

STEP = 7
ROWS = {"w": Layout((2,), ((0, 0),)), "b": Layout((2,))}
ROWS_OF_THREE = {"w": Layout((3,), ((0, 0),)), "b": PLAIN}
COLUMNS = {"w": Layout((3,), ((0, 1),)), "b": PLAIN}
WHOLE = {"w": PLAIN, "b": PLAIN}
Change = Callable[[Reply], None]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some hundred parts, and nothing left over in the end."""
    monkeypatch.setattr(plan_module, "PART_BYTES", 2048)
    with nothing_leaks():
        yield


def model_of(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return Model({"w": torch.randn(48, 300, generator=generator), "b": torch.randn(17, generator=generator)}, {})


def group_of(layouts: dict[str, Layout], world_size: int, seed: int = 0, **options: Any) -> Group:
    return Group(model_of(seed).states(layouts, world_size, lr=float(seed)), STEP, **options)


class Receiver:
    """Rank 1 of three, whose weight lies in columns.

    Args:
        stall_s: how long a source may send nothing; by default longer than a busy machine keeps a healthy one from sending.
        num_streams: connections that all sources of boxes share; 0 for as many as it takes by itself.
    """

    def __init__(self, *, in_place: bool = False, stall_s: float = 60.0, num_streams: int = 0) -> None:
        self.in_place = in_place
        self.transport = make_transport(stall_timeout=timedelta(seconds=stall_s), num_chunks=num_streams)
        with imagined_rank(1, 3):
            self.local = model_of(0).state(COLUMNS, 1, lr=-1.0)
        overwrite(self.local)
        self.before = snapshot_of(self.local)

    def fetch(self, groups: list[list[str]], timeout: timedelta = LONG, step: int = STEP) -> State:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return self.fetch_with_warnings(groups, timeout, step)

    def fetch_with_warnings(self, groups: list[list[str]], timeout: timedelta = LONG, step: int = STEP) -> State:
        return self.transport.fetch_sharded(groups, 1, 3, step, timeout, local_state=self.local, in_place=self.in_place)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.shutdown()


def whose(state: State) -> set[int]:
    """The seeds of the models that the state is wholly of; plain values count."""
    return {seed for seed in range(4) if not model_of(seed).wrong(state, COLUMNS, 1) and lr_of(state) == float(seed)}


def lr_of(state: State) -> float:
    return state["optim"]["param_groups"][0]["lr"]


def on(kind: str, act: Change, *, after: int = 0) -> Change:
    """Act on the answers of one kind, from the given one on; pass all others on."""
    seen = [0]

    def change(reply: Reply) -> None:
        if reply.kind == kind and reply.status == 200:
            seen[0] += 1
            if seen[0] > after:
                act(reply)
                return
        reply.send()

    return change


def cut_in_the_middle(reply: Reply) -> None:
    reply.send(len(reply.body) // 2)
    reply.cut()


def stall_in_the_middle(reply: Reply) -> None:
    reply.send(len(reply.body) // 2)
    reply.hang()


def never_answer(reply: Reply) -> None:
    reply.hang()


def wrong_digest(reply: Reply) -> None:
    reply.body = reply.body[:-1] + bytes([reply.body[-1] ^ 1])
    reply.send()


def wrong_bit(reply: Reply) -> None:
    reply.body = bytes([reply.body[0] ^ 1]) + reply.body[1:]
    reply.send()


def shorter(reply: Reply) -> None:
    reply.body = reply.body[:-1]
    reply.send()


def longer(reply: Reply) -> None:
    reply.body += b"more"
    reply.send()


def other_snapshot(reply: Reply) -> None:
    reply.headers["ETag"] = '"another"'
    reply.send()


def garbage(reply: Reply) -> None:
    reply.send_raw(b"\x00\xff not HTTP at all\r\n\r\n")


def refusal(status: int, error: str) -> Change:
    def act(reply: Reply) -> None:
        reply.status = status
        reply.body = json.dumps({"error": error, "message": "so it is", "serving_step": 9}).encode()
        reply.send()

    return act


def manifest(**members: Any) -> Change:
    def act(reply: Reply) -> None:
        reply.body = json.dumps({**json.loads(reply.body), **members}).encode()
        reply.headers["X-Ckpt-Digest"] = xxhash.xxh3_128_hexdigest(reply.body)
        reply.send()

    return act


FAULTS: dict[str, tuple[Change, type[CheckpointError]]] = {
    "cut in the middle, each time": (on("parts", cut_in_the_middle), SourceLostError),
    "cut from the third time on": (on("parts", cut_in_the_middle, after=2), SourceLostError),
    "cut at the manifest": (on("manifest", cut_in_the_middle), SourceLostError),
    "stalls in the middle": (on("parts", stall_in_the_middle, after=1), TransferStalledError),
    "never answers": (on("parts", never_answer), TransferStalledError),
    "another digest": (on("parts", wrong_digest), DigestMismatchError),
    "another bit": (on("parts", wrong_bit, after=1), DigestMismatchError),
    "too short": (on("parts", shorter), StateFormatError),
    "too long": (on("parts", longer), StateFormatError),
    "another snapshot": (on("parts", other_snapshot), StateFormatError),
    "garbage for parts": (on("parts", garbage), SourceLostError),
    "garbage for a manifest": (on("manifest", garbage), SourceLostError),
    "gone": (on("parts", refusal(410, "gone"), after=1), SourceRefusedError),
    "an internal error": (on("parts", refusal(500, "failed")), SourceRefusedError),
    "the step is over": (on("manifest", refusal(409, "over")), SourceRefusedError),
    "another step": (on("manifest", manifest(step=STEP + 1)), SourceRefusedError),
    "a manifest that is none": (on("manifest", manifest(tensors=3)), StateFormatError),
    "another version of the format": (on("manifest", manifest(version=99)), StateFormatError),
}


def stall_of(name: str) -> float:
    """How long the receiver waits for a source that has this fault; those that hang are waited for that long."""
    return 4.0 if FAULTS[name][1] is TransferStalledError else 60.0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_is_made_up_for_by_another_group(name, monkeypatch):
    monkeypatch.setattr(fetch, "_GRACE_S", 60.0)  # a group that answers later is left aside
    change, _ = FAULTS[name]
    receiver = Receiver(in_place=True, stall_s=stall_of(name))
    with group_of(ROWS, 2) as primary, group_of(ROWS_OF_THREE, 3) as other, receiver:
        with LyingSource(primary.urls[1], change) as lying:
            received = receiver.fetch([[primary.urls[0], lying.url], other.urls])
    assert whose(received) == {0}
    assert whose({**receiver.local, "optim": received["optim"]}) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_place"),
    [*((name, True) for name in FAULTS), *((name, False) for name in ("another bit", "cut from the third time on"))],
)
def test_a_rank_that_fails_and_that_nobody_makes_up_for_is_a_named_error(name, in_place):
    change, error_type = FAULTS[name]
    with group_of(ROWS, 2) as primary, Receiver(in_place=in_place, stall_s=stall_of(name)) as receiver:
        with LyingSource(primary.urls[1], change) as lying:
            with pytest.raises(CheckpointError) as caught:
                receiver.fetch([[primary.urls[0], lying.url]], LONG)
            is_before_any_byte = "manifest" in lying.kinds and "parts" not in lying.kinds
            if is_before_any_byte:  # then what is missing is known before anything is asked for
                assert "w" in str(caught.value) and lying.url in str(caught.value), caught.value
            else:
                assert type(caught.value) is error_type, caught.value
            is_touched = not untouched(receiver.before, receiver.local)
            assert not is_touched or caught.value.state_overwritten
            assert not caught.value.state_overwritten or (in_place and not is_before_any_byte)
            assert caught.value.state_overwritten == ("the state that was here is torn" in str(caught.value))
    with group_of(ROWS, 2) as again, Receiver(in_place=in_place) as receiver:
        assert whose(receiver.fetch([again.urls])) == {0}


def test_fetches_that_fail_again_and_again_leave_nothing_behind():
    """What one of them left would add up to more than the fixture lets pass."""
    change, _ = FAULTS["cut from the third time on"]
    for _ in range(8):
        with group_of(ROWS, 2) as primary, Receiver() as receiver, LyingSource(primary.urls[1], change) as lying:
            with pytest.raises(CheckpointError):
                receiver.fetch([[primary.urls[0], lying.url]], LONG)


def test_boxes_come_from_one_source_over_several_connections_at_once():
    """The first three requests are answered when all of them are there."""
    three, turns = threading.Barrier(3), itertools.count()

    def meet(reply: Reply) -> None:
        if next(turns) < 3:
            three.wait(20)
        reply.send()

    with group_of(WHOLE, 1) as primary, Receiver(num_streams=3) as receiver:
        with LyingSource(primary.urls[0], on("parts", meet)) as lying:
            received = receiver.fetch([[lying.url]])
    assert whose(received) == {0} and not three.broken


def test_a_source_that_is_shut_down_in_the_middle_is_made_up_for():
    with group_of(ROWS, 2) as primary, group_of(WHOLE, 1) as other, Receiver() as receiver:
        down = threading.Event()

        def shut_down(reply: Reply) -> None:
            if not down.is_set():
                down.set()
                primary.transports[1].shutdown()
            reply.send()

        with LyingSource(primary.urls[0], on("parts", shut_down)) as lying:
            received = receiver.fetch([[lying.url, primary.urls[1]], other.urls])
        assert down.is_set()
    assert whose(received) == {0}


# Another group than the primary


@pytest.mark.parametrize("heir", [0, 1])
@pytest.mark.parametrize(("num_answers", "in_place"), [(0, True), (1, False), (2, True), (4, False), (4, True)])
def test_a_primary_that_is_lost_on_the_way_gives_way_to_another_groups_whole_state(heir, num_answers, in_place):
    """Whatever bits that one has; what is no tensor comes from it, too."""
    with group_of(WHOLE, 1) as primary, group_of(ROWS, 2, seed=heir) as other, Receiver(in_place=in_place) as receiver:
        lost = threading.Event()

        def answer_some(reply: Reply) -> None:
            if lost.is_set() or (reply.kind == "parts" and lying.kinds.count("parts") > num_answers):
                lost.set()
                reply.cut()
            else:
                reply.send()

        with LyingSource(primary.urls[0], answer_some) as lying, warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicaDivergenceWarning)
            received = receiver.fetch_with_warnings([[lying.url], other.urls])
    assert whose(received) == ({heir} if lost.is_set() else {0})
    assert not in_place or whose({**receiver.local, "optim": received["optim"]}) == whose(received)


@pytest.mark.parametrize("seed", range(8))
def test_a_state_is_never_a_mixture(seed):
    """Three groups of three states, whose ranks are lost at random moments."""
    print("seed", seed)
    chance = random.Random(seed)
    with ExitStack() as stack:
        groups = [
            stack.enter_context(group_of(layouts, world_size, seed=number))
            for number, (layouts, world_size) in enumerate([(ROWS, 2), (ROWS_OF_THREE, 3), (WHOLE, 1)])
        ]
        receiver = stack.enter_context(Receiver())
        urls = []
        for group in groups:
            urls.append([])
            for url in group.urls:
                num_answers = chance.choice([1, 2, 4, 10_000])

                def answer_some(reply: Reply, left: list[int]) -> None:
                    left[0] -= reply.kind.startswith("parts")
                    if left[0] < 0:
                        reply.cut()
                    else:
                        reply.send()

                left = [num_answers]
                lying = LyingSource(url, lambda reply, left=left: answer_some(reply, left))
                urls[-1].append(stack.enter_context(lying).url)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicaDivergenceWarning)
            try:
                received = receiver.fetch_with_warnings(urls, timedelta(seconds=20))
            except CheckpointError as error:
                outcome: object = type(error)
                assert untouched(receiver.before, receiver.local)
            else:
                outcome = len(whose(received))
        assert outcome in (1, SourceLostError, TransferStalledError)


def test_a_group_that_has_diverged_is_named_and_its_bits_are_not_used():
    with group_of(ROWS, 2) as primary, group_of(ROWS_OF_THREE, 3) as other, Receiver() as receiver:
        for state in other.states:
            state["w"].data.add_(1)  # not counted: a source that notices a write to what it serves refuses it
        with pytest.warns(ReplicaDivergenceWarning, match=r"step 7.* differs from the primary.* in w$") as caught:
            received = receiver.fetch_with_warnings([primary.urls, other.urls])
    assert {url for url in other.urls for warning in caught if url in str(warning.message)}
    assert whose(received) == {0}


def test_parts_that_another_group_forges_do_not_count():
    """Each with the xxh3 of the primary's part, which says nothing: xxh3 has second preimages."""
    num_forged = [0]

    def forge_parts(reply: Reply) -> None:
        left, sent = memoryview(reply.body), b""
        for _, _, seed, _, sizes in json.loads(reply.asked)["parts"]:
            num_bytes = 4 * math.prod(sizes)
            true, digest, left = bytes(left[:num_bytes]), left[num_bytes : num_bytes + 16], left[num_bytes + 16 :]
            forged = forge(true, seed, bytes(num_bytes))
            assert xxhash.xxh3_128_digest(forged, seed=seed) == digest
            num_forged[0] += forged != true
            sent += forged + digest
        reply.body = sent
        reply.send()

    with group_of(ROWS, 2) as primary, group_of(ROWS, 2) as other, Receiver(in_place=True) as receiver:
        with LyingSource(other.urls[0], on("parts", forge_parts)) as forger:
            with pytest.warns(ReplicaDivergenceWarning, match=f"{forger.url} differs .* in w"):
                state = receiver.fetch_with_warnings([primary.urls, [forger.url, other.urls[1]]])
    assert num_forged[0] > 0
    assert whose(state) == {0}


@pytest.mark.slow
def test_nothing_of_a_part_that_another_group_sent_is_left_where_it_does_not_count(monkeypatch):
    """It may be forged, and what is received next into this memory looks there for what it need not fetch."""
    marker = bytes(range(1, 17))

    def mark_and_cut(reply: Reply) -> None:
        reply.body = marker * (len(reply.body) // 16) + reply.body[len(reply.body) // 16 * 16 :]
        cut_in_the_middle(reply)

    with group_of(ROWS, 2) as primary, group_of(ROWS, 2) as other, Receiver(in_place=True, stall_s=2.0) as receiver:
        with LyingSource(primary.urls[0], on("parts", never_answer)) as silent:
            with LyingSource(other.urls[0], on("parts", mark_and_cut)) as marking:
                with pytest.raises(CheckpointError) as raised:
                    receiver.fetch_with_warnings([[silent.url, primary.urls[1]], [marking.url, other.urls[1]]])
    assert raised.value.state_overwritten
    assert marker not in receiver.local["w"].to_local().numpy().tobytes()


def test_a_part_that_counted_is_not_wiped_though_it_is_invalidated_in_that_moment(monkeypatch):
    """Another group may be adopted as soon as a part counts, and another thread be asked for it and be writing there."""
    invalidated: list[int] = []
    wiped: list[int] = []
    confirmed, wipe = BoxTransfer.confirmed, plan_module.Plan.wipe

    def confirmed_and_invalidated(self: BoxTransfer, stream: int, path: str, agreed: set[int], group: int) -> None:
        with self.changed:
            confirmed(self, stream, path, agreed, group)
            if not invalidated and not self.over:
                invalidated.extend(agreed)
                self._ledger.invalidate(mask_of_each(agreed))

    monkeypatch.setattr(BoxTransfer, "confirmed", confirmed_and_invalidated)
    monkeypatch.setattr(plan_module.Plan, "wipe", lambda self, part: (wiped.append(part), wipe(self, part)))
    with group_of(ROWS, 2) as primary, group_of(ROWS, 2) as other, Receiver(in_place=True) as receiver:
        received = receiver.fetch([primary.urls, other.urls])
    assert (whose(received), wiped) == ({0}, [])


def test_a_group_of_other_shapes_is_left_aside():
    with group_of(ROWS, 2) as primary, Receiver() as receiver:
        with Group([{"w": torch.ones(96, 300), "b": torch.ones(34)}], STEP) as other:
            received = receiver.fetch([primary.urls, other.urls])
    assert whose(received) == {0}


def test_a_primary_of_which_a_part_is_missing_gives_way_before_anything_is_asked_for():
    with group_of(ROWS, 2) as primary, group_of(WHOLE, 1, seed=1) as other, Receiver() as receiver:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicaDivergenceWarning)
            received = receiver.fetch_with_warnings([["", primary.urls[1]], other.urls])
    assert whose(received) == {1}


# Time


def test_a_source_that_serves_a_moment_later_is_waited_for():
    receiver, late = Receiver(), make_transport()
    (state,) = model_of(2).states(WHOLE, 1, lr=2.0)
    with receiver, ThreadPoolExecutor(1) as threads:
        received = threads.submit(receiver.fetch, [[late.metadata()]])
        time.sleep(0.2)
        late.send_checkpoint([1], STEP, state, LONG)
        assert whose(received.result(30)) == {2}
    late.shutdown()


def test_a_second_group_that_never_serves_keeps_nobody_waiting():
    silent = make_transport()
    with group_of(ROWS, 2) as primary, Receiver() as receiver:
        assert whose(receiver.fetch([primary.urls, [silent.metadata()]], timedelta(seconds=20))) == {0}
    silent.shutdown()


def test_a_step_that_is_never_served_is_an_error_at_the_deadline():
    silent = make_transport()
    with Receiver(in_place=True, stall_s=3600.0) as receiver:  # the deadline alone ends this
        with pytest.raises(TransferTimeoutError) as caught:
            receiver.fetch([[silent.metadata()]], timedelta(seconds=0.5))
        assert not caught.value.state_overwritten and untouched(receiver.before, receiver.local)
    silent.shutdown()


def test_a_receive_that_is_cancelled_ends_at_once():
    with group_of(WHOLE, 1) as primary, Receiver(stall_s=60.0) as receiver, ThreadPoolExecutor(1) as threads:
        hanging = threading.Event()

        def hang(reply: Reply) -> None:
            hanging.set()
            stall_in_the_middle(reply)

        with LyingSource(primary.urls[0], on("parts", hang)) as lying:
            received = threads.submit(receiver.fetch, [[lying.url]])
            assert hanging.wait(120)
            receiver.transport.cancel_recv()
            with pytest.raises(TransferCancelledError):
                received.result(60)
        assert untouched(receiver.before, receiver.local)


# A source that goes on


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_a_source_that_trains_on_in_the_middle_gives_the_state_of_the_step(when):
    """At the moment of an answer its snapshot is detached, its tensors change, and the next step is served."""
    with group_of(ROWS, 2) as group, Receiver() as receiver:
        gone_on = threading.Event()

        def go_on(reply: Reply) -> None:
            if len(lying.kinds) > when and not gone_on.is_set():
                gone_on.set()
                for transport, state in zip(group.transports, group.states, strict=True):
                    train_on(transport, state)
            reply.send()

        with LyingSource(group.urls[0], go_on) as lying:
            try:
                received = receiver.fetch([[lying.url, group.urls[1]]], timedelta(seconds=20))
            except SourceRefusedError:  # rank 1 had not been asked yet
                assert when == 0
                return
        assert gone_on.is_set()
    assert whose(received) == {0}


def train_on(transport: HTTPTransport[State], state: State) -> None:
    transport.disallow_checkpoint()
    overwrite(state)
    transport.send_checkpoint([], STEP + 1, state, LONG)


def test_what_was_kept_for_a_receiver_is_freed_when_it_is_done():
    """By all three ranks of its group."""
    with group_of(ROWS, 2, num_receivers=1) as group, Receiver() as receiver:
        registries = [transport._snapshots for transport in group.transports]
        for _ in range(3):
            receiver.fetch([group.urls])
        for transport in group.transports:
            transport.disallow_checkpoint()
        deadline = time.monotonic() + 60
        while any(registry.open_snapshots() for registry in registries) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [registry.open_snapshots() for registry in registries] == [[], []]
