"""Healing straight into the model: from all sources, only while the trainer waits, and a torn state is never trained on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from support import answers
from support.fake_transport import FakeNetwork, FakeTransport
from support.replicas import Replica, lighthouse_of, shutdown, together
from support.waiting import wait_until

from torchft_ckpt import HTTPTransport, LighthouseServer
from torchft_ckpt.core.coordination.messages import Answer, Source, StateVersion
from torchft_ckpt.core.training.outer_schedule import OuterSchedule
from torchft_ckpt.errors import (
    CoordinationError,
    LayoutMismatchError,
    SourceLostError,
    SourceRefusedError,
    StateFormatError,
    StateMismatchError,
    TransferError,
)
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.state_registry import OwnState, StateRegistry

TIMEOUT = timedelta(seconds=20)
VERSION = StateVersion(step=5, quorum_id=2, epoch="e")


def torn(message: str = "lost midway") -> TransferError:
    error = TransferError(message, "source")
    error.state_overwritten = True
    return error


# ---------------------------------------------------------------------------------------------------------- `Healing`


class RecordingTransport(FakeTransport[Any]):
    """Notes what it is asked for and gives what it is told."""

    def __init__(self) -> None:
        super().__init__(FakeNetwork(), "fake://0")
        self.asked: list[dict[str, Any]] = []
        self.give: Any = state_of(VERSION)
        self.refuses_in_place = False
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        self.asked.append({"sources": list(sources), "step": step, "timeout": timeout, **how})
        self.begun.set()
        assert self.go_on.wait(120)
        if self.refuses_in_place and how.get("in_place"):
            raise StateMismatchError("a tensor of another shape")
        if isinstance(self.give, BaseException):
            raise self.give
        return self.give

    def cancel_recv(self) -> None:
        self.go_on.set()


def state_of(version: StateVersion) -> dict[str, Any]:
    own = {"step": version.step, "quorum_id": version.quorum_id, "epoch": version.epoch, "batches_committed": 9}
    return {"user": {"default": 1}, "torchft": own}


def formed(*addresses: list[str]) -> Answer:
    sources = [
        Source(replica_id=f"group_{index}", replica_rank=index, checkpoint_addresses=of_ranks)
        for index, of_ranks in enumerate(addresses)
    ]
    return answers.given(1, VERSION, sources=sources, quorum_id=3)


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
def own() -> OwnState:
    return OwnState()


@pytest.fixture
def healing(transport: RecordingTransport, own: OwnState) -> Iterator[Healing]:
    healing = Healing(transport, TIMEOUT, rank=0, world_size=1, own=own)
    yield healing
    healing.shutdown()


def test_all_sources_are_passed_in_order_and_the_local_state_under_user(healing, transport):
    local = {"default": {"w": torch.zeros(3)}}
    healing.start(formed(["http://a:1"], [], [""], ["http://b:2"], ["http://c:3"]), local, in_place=True)
    assert healing.wait() == state_of(VERSION)
    (asked,) = transport.asked
    assert asked["local_state"]["user"] is local and list(asked["local_state"]) == ["user"]
    del asked["local_state"], asked["on_progress"]
    sources = ["http://a:1", "http://b:2", "http://c:3"]
    assert asked == {"sources": sources, "step": 5, "timeout": TIMEOUT, "in_place": True}


@pytest.mark.parametrize("in_place", [True, False])
def test_into_the_local_state_only_if_that_is_wanted(healing, transport, in_place):
    healing.start(formed(["http://a:1"]), {}, in_place)
    healing.wait()
    assert transport.asked[0]["in_place"] is in_place


def test_no_source_that_can_be_reached_is_an_error_that_tears_nothing(healing, transport):
    healing.start(formed([], [""]), {}, in_place=True)
    with pytest.raises(SourceLostError) as raised:
        healing.wait()
    assert raised.value.party is None and transport.asked == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [(torn(), True), (TransferError("before the first byte"), False), (RuntimeError("a transport's bug"), True)],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_failed_fetch_has_torn_is_what_its_error_owns_up_to(healing, transport, error, expected, in_place):
    """An error that is none of a transport's says nothing, so the worst is assumed."""
    transport.give = error
    healing.start(formed(["http://a:1"]), {}, in_place)
    with pytest.raises(type(error)):
        healing.wait()
    assert healing.has_overwritten() is (expected and in_place)


def test_a_state_that_cannot_be_received_in_place_is_fetched_beside_it(healing, transport):
    """Whether a tensor of another shape can be loaded is for the user's function to say."""
    transport.refuses_in_place = True
    healing.start(formed(["http://a:1"]), {}, in_place=True)
    assert healing.wait() == state_of(VERSION)
    assert [asked.get("in_place", False) for asked in transport.asked] == [True, False]
    assert not healing.has_overwritten()


def test_an_abandoned_fetch_in_place_leaves_a_torn_state_whether_it_failed_or_not(healing, transport):
    for given, expected in ((state_of(VERSION), True), (torn(), True), (TransferError("cancelled in time"), False)):
        transport.give = given
        transport.begun.clear()
        transport.go_on.clear()
        healing.start(formed(["http://a:1"]), {}, in_place=True)
        assert transport.begun.wait(120)
        healing.cancel()
        assert healing.has_overwritten() is expected


def test_an_abandoned_fetch_beside_the_state_tears_nothing(healing, transport):
    healing.start(formed(["http://a:1"]), {}, in_place=False)
    healing.cancel()
    assert not healing.has_overwritten()


@pytest.mark.parametrize("other", [StateVersion(step=5, quorum_id=1, epoch="e"), StateVersion(step=5, quorum_id=2)])
def test_a_state_of_another_name_is_refused(healing, transport, other):
    transport.give = state_of(other)
    healing.start(formed(["http://a:1"]), {}, in_place=False)
    with pytest.raises(SourceRefusedError, match="asked group_0 for"):
        healing.wait()


def test_a_state_of_another_name_that_was_received_in_place_has_torn_the_one_that_was_here(healing, transport):
    transport.give = state_of(StateVersion(step=5, quorum_id=1, epoch="e"))
    healing.start(formed(["http://a:1"]), {}, in_place=True)
    with pytest.raises(SourceRefusedError):
        healing.wait()
    assert healing.has_overwritten()


@pytest.mark.parametrize("batches", ["9", None, -1, 2**64, 9.0, True, [9]])
def test_a_count_of_batches_that_is_none_is_refused_before_anything_is_loaded(healing, transport, batches):
    transport.give = state_of(VERSION)
    transport.give["torchft"]["batches_committed"] = batches
    healing.start(formed(["http://a:1"]), {}, in_place=False)
    with pytest.raises(StateFormatError, match=r"group_0 sent .* with a number of committed batches that is none"):
        healing.wait()


@pytest.mark.parametrize("place", [None, 3, [1], [1, 2, 3], [-1, 0], [1, 2**64], [1.0, 0], [True, 0], {"1": 0}])
def test_a_place_in_a_round_that_is_none_is_refused_before_anything_is_loaded(healing, transport, place):
    transport.give = state_of(VERSION)
    transport.give["torchft"]["place"] = place
    healing.start(formed(["http://a:1"]), {}, in_place=False)
    with pytest.raises(StateFormatError, match=r"group_0 sent .* with a place in its round that is none"):
        healing.wait()


@pytest.mark.parametrize("num_ends_left", [4, 2**40])
def test_a_place_that_no_group_with_this_schedule_has_is_refused_before_anything_is_loaded(
    healing, transport, own, num_ends_left
):
    """Else a group would train so many iterations that change nothing."""
    own.outer_schedule = OuterSchedule(10, sync_delay=2)
    transport.give = state_of(VERSION)
    transport.give["torchft"]["place"] = [num_ends_left, 0]
    healing.start(formed(["http://a:1"]), {}, in_place=False)
    with pytest.raises(
        StateFormatError, match=f"group_0 sent .* with a place .* sync_every=10.*: {num_ends_left} ends"
    ):
        healing.wait()


def test_what_was_overwritten_before_it_was_re_sharded_is_torn_though_that_wrote_nothing(healing, transport):
    """Of two sources that differ the first had sent something when the second turned out to hold other shards."""
    first = LayoutMismatchError("other shards", "b")
    first.mark_torn()
    transport.give = first

    def fetch_sharded(*_: Any, **__: Any) -> Any:
        raise TransferError("nobody there", "b")

    transport.fetch_sharded = fetch_sharded
    healing.start(formed(["http://a:1"]), {}, in_place=True)
    with pytest.raises(TransferError, match="nobody there; the state that was here is torn") as caught:
        healing.wait()
    assert caught.value.state_overwritten and healing.has_overwritten()


# ---------------------------------------------------------------------------------------------------------- `Manager`


class SteeredTransport(HTTPTransport[Any]):
    """Notes how it is asked to fetch, and fails as it is told."""

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT, hostname="127.0.0.1", bind="127.0.0.1", num_chunks=1)
        self.asked: list[dict[str, Any]] = []
        self.failures: list[Callable[[Any], BaseException]] = []

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        self.asked.append({"sources": list(sources), "step": step, **how})
        if self.failures:
            raise self.failures.pop(0)(how["local_state"])
        return super().fetch_checkpoint(sources, step, timeout, **how)


class Group:
    """A replica whose transport is steered, and that notes what was loaded and after which step it was torn."""

    def __init__(self, server: LighthouseServer, name: str, seed: int, **options: Any) -> None:
        self.transport = SteeredTransport()
        self.loaded: list[dict[str, Any]] = []
        self.log: list[tuple[bool, bool]] = []
        self.replica = Replica(
            server, name, seed, checkpoint_transport=self.transport, load_state_dict=self.load, **options
        )

    def load(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self.replica.load(state)

    def step(self) -> bool:
        committed = self.replica.step()
        self.log.append((committed, self.replica.manager.view().torn))
        return committed

    def close(self) -> None:
        shutdown(self.replica)
        self.transport.shutdown()


@pytest.fixture
def server() -> Iterator[LighthouseServer]:
    server = lighthouse_of(1)
    yield server
    server.shutdown()


def join(server: LighthouseServer, failures: Sequence[Callable[[Any], BaseException]] = (), **options: Any) -> Group:
    """Two groups train; a third one joins them and trains along until it has committed twice. Returns it, closed."""
    others = [Group(server, name, 0, **options) for name in ("a", "b")]
    for _ in range(2):
        together(others, Group.step)
    joiner = Group(server, "late", 1, **options)
    joiner.transport.failures = list(failures)
    joined = threading.Event()

    until = time.monotonic() + 60

    def train(group: Group) -> None:
        while not joined.is_set() and time.monotonic() < until:
            group.step()
            if group is joiner and group.replica.manager.statistics().num_committed >= 2:
                joined.set()

    def train_and_leave(group: Group) -> None:
        """Whoever ends leaves at once, because the others would wait for its next step."""
        try:
            train(group)
        finally:
            joined.set()
            group.close()

    together([*others, joiner], train_and_leave)
    return joiner


def parameters(group: Group) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in group.replica.model.state_dict().items()}


def test_where_the_trainer_waits_the_state_is_received_into_the_model_from_all_sources(server):
    joiner = join(server, use_async_quorum=False)
    (asked,) = joiner.transport.asked
    assert asked["in_place"] is True and len(asked["sources"]) == 2
    local = asked["local_state"]["user"]["default"]["model"]
    loaded = joiner.loaded[0]["model"]
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == parameters(joiner)
    assert all(loaded[name] is local[name] for name in local)


@pytest.mark.slow
def test_a_failure_that_tore_the_model_is_followed_by_others_until_a_whole_state_is_there(server):
    seen: list[bool] = []

    def tear(local: Any) -> BaseException:
        local["user"]["default"]["model"]["weight"].fill_(1e9)
        return torn()

    def tear_again(local: Any) -> BaseException:
        late = next(name for name in server._jobs.states["default"].members if name.startswith("late"))
        seen.append(server._jobs.states["default"].members[late].version.proven)
        return tear(local)

    joiner = join(server, [tear, tear_again], use_async_quorum=False)
    assert [asked["in_place"] for asked in joiner.transport.asked] == [True, True, True]
    assert len(joiner.loaded) == 1 and seen == [False]
    assert [committed for committed, _ in joiner.log] == [False] + [True] * (len(joiner.log) - 1)
    assert not any(was_torn for _, was_torn in joiner.log)
    assert max(abs(value) for value in joiner.replica.model.weight.flatten().tolist()) < 1e6


def test_a_failure_before_the_first_byte_leaves_the_replica_behind_but_whole(server):
    joiner = join(server, [lambda local: TransferError("nobody there")], use_async_quorum=False)
    assert joiner.log[0] == (False, False)
    assert len(joiner.transport.asked) == 2 and len(joiner.loaded) == 1


def test_two_replicas_are_equal_in_every_bit_after_one_of_them_was_torn():
    server = lighthouse_of(2)
    groups = [Group(server, name, seed, use_async_quorum=False) for seed, name in enumerate("ab")]

    def tear(local: Any) -> BaseException:
        for tensor in local["user"]["default"]["model"].values():
            tensor.fill_(1e9)
        return torn()

    for group in groups:
        group.transport.failures = [tear]

    def train(group: Group) -> None:
        while group.replica.manager.current_step() < 3:
            group.step()

    together(groups, train)
    assert sum(len(group.transport.asked) for group in groups) == 2
    assert groups[0].replica.bits() == groups[1].replica.bits()
    assert all(abs(value) < 1e6 for group in groups for value in group.replica.model.weight.flatten().tolist())
    for group in groups:
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["not_returned", "take_settings"])
def test_weights_that_were_loaded_without_what_belongs_to_them_are_torn_and_healed_again(server, monkeypatch, what):
    """Else the replica goes on with weights of a step that it does not count, until the next time it heals."""
    real = getattr(StateRegistry, what)
    healed: list[StateRegistry] = []

    def fail_once(self: StateRegistry, *arguments: Any) -> Any:
        if self not in healed:
            healed.append(self)
            if len(healed) == 2:  # the second group to heal is the joiner: the first takes what both begin with
                raise ValueError("after the user's state was loaded")
        return real(self, *arguments)

    monkeypatch.setattr(StateRegistry, what, fail_once)
    joiner = join(server, use_async_quorum=False)
    assert joiner.log[0] == (False, False), "it was torn, and has loaded once more"
    assert len(joiner.loaded) == 2
    assert not any(was_torn for _, was_torn in joiner.log)


def test_who_holds_the_step_of_another_attempt_keeps_it_whole_if_its_source_dies_as_it_gives_that_of_now(server):
    """Its copy is the only one then: the job would have lost the step."""
    only = Group(server, "only", 0)
    while only.replica.manager.current_step() < 2:
        only.step()

    def discards() -> None:
        with contextlib.suppress(CoordinationError):
            while True:
                only.replica.optimizer.zero_grad()
                only.replica.manager.report_error(ValueError("a loss that is not a number"))
                only.replica.optimizer.step()

    late = Group(server, "late", 1, quorum_timeout=TIMEOUT, quorum_retries=0)
    loop = threading.Thread(target=discards)
    loop.start()
    while not late.replica.manager.view().came_in:
        late.step()
    num_attempts = only.replica.manager.statistics().num_discarded + 1
    wait_until(
        lambda: only.replica.manager.statistics().num_discarded > num_attempts, "the other has gone on without it"
    )

    def dies(local: Any) -> BaseException:
        only.close()
        if not late.transport.asked[-1]["in_place"]:
            return SourceLostError("lost midway", "only")
        local["user"]["default"]["model"]["weight"].fill_(1e9)
        return torn()

    late.transport.failures = [dies]
    committed = [late.step() for _ in range(4)]
    loop.join(60)
    assert [asked["in_place"] for asked in late.transport.asked] == [True, False]
    assert committed[-1] and late.replica.manager.current_step() > 2
    late.close()
