"""Groups whose states come apart are named, with the tensor; they heal by majority or all stop, as their Managers were told."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.replicas import Replica, lighthouse_of, shutdown, together
from torch import nn

from torchft_ckpt import LighthouseServer
from torchft_ckpt.errors import ConfigError, ReplicasDifferError, StateDictLoadError
from torchft_ckpt.manager import checking

EVERY = 3


@pytest.fixture
def lighthouse() -> LighthouseServer:
    return lighthouse_of(3)


class Normed(Replica):
    """Has BatchNorm, and sees data of its own; its random generators are part of its state."""

    def __init__(self, lighthouse: LighthouseServer, name: str, seed: int = 0, **options: Any) -> None:
        super().__init__(lighthouse, name, seed, check_equal_every=EVERY, **options)
        self.norm = nn.BatchNorm1d(8)
        self.sgd.add_param_group({"params": list(self.norm.parameters())})
        self.scale = 1.0
        self.python, self.numpy = random.Random(name), np.random.RandomState(len(name))
        self.data = torch.Generator().manual_seed(sum(map(ord, name)))

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if "norm" in state:
            self.norm.load_state_dict(state["norm"])
            self.scale = state["scale"]

    def state(self) -> dict[str, Any]:
        generators = [self.python.getstate(), self.numpy.get_state(), self.data.get_state()]
        return {**super().state(), "norm": self.norm.state_dict(), "scale": self.scale, "generators": generators}

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.optimizer.zero_grad()
        batch = torch.randn(4, 8, generator=self.data) * self.python.random() * self.numpy.rand()
        self.norm(self.model(batch)).square().sum().backward()
        for parameter in [*self.model.parameters(), *self.norm.parameters()]:
            assert parameter.grad is not None
            self.manager.allreduce(parameter.grad).wait()
        self.optimizer.step()
        return self.manager.statistics().num_committed > before

    def flip_a_bit(self) -> None:
        self.model.weight.data.view(torch.int32)[3, 4] ^= 1 << 12


def groups(lighthouse: LighthouseServer, count: int = 3, **options: Any) -> list[Normed]:
    return [Normed(lighthouse, f"group_{'abc'[number]}", number, **options) for number in range(count)]


def train_to(replicas: list[Normed], step: int) -> None:
    def train(replica: Normed) -> None:
        while replica.manager.current_step() < step:
            replica.step()

    together(replicas, train)  # type: ignore[arg-type]


def said(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if all(word in r.getMessage() for word in words)]


def test_running_statistics_and_generators_of_each_groups_own_give_no_alarm(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = groups(lighthouse)
    compared: list[str] = []
    right = replicas[0].manager._parts.check.digest
    replicas[0].manager._parts.check.digest = lambda: compared.append(right()) or compared[-1]  # type: ignore[method-assign, func-returns-value]
    with caplog.at_level(logging.WARNING):
        train_to(replicas, 4 * EVERY + 1)
    assert len({str(replica.norm.running_mean) for replica in replicas}) == 3
    assert len({digest[16:] for digest in compared if len(digest) == 32}) >= 4  # of all, each third step, each another
    assert not said(caplog, "different states") and not said(caplog, "It has loaded theirs")


def test_one_bit_of_one_weight_is_named_by_group_and_tensor_and_loaded_from_the_majority(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = groups(lighthouse, on_replicas_differ="heal")
    train_to(replicas, EVERY + 3)  # between two trials: the votes find it
    at = replicas[1].manager.current_step()
    replicas[1].flip_a_bit()
    with caplog.at_level(logging.WARNING):
        train_to(replicas, at + EVERY + 8)
    assert said(caplog, "different states", "group_b", "They are compared before the next step")
    (named,) = said(caplog, "It has loaded theirs")
    assert named.startswith("group_b") and "default.model.weight" in named
    assert len({str(replica.bits()) for replica in replicas}) == 1
    assert [replica.manager.statistics().num_corrected for replica in replicas] == [0, 1, 0]
    assert [replica.manager.statistics().num_left_behind for replica in replicas] == [0, 0, 0]
    assert all(replica.manager.num_participants() == 3 for replica in replicas)
    assert all(replica.manager.statistics().num_discarded == 0 for replica in replicas)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (Normed.flip_a_bit, "default.model.weight"),
        (lambda replica: replica.sgd.state[replica.model.bias]["momentum_buffer"].add_(1e-6), "momentum_buffer"),
        (lambda replica: replica.sgd.param_groups[0].update(lr=0.1000001), "default.sgd.param_groups.0.lr"),
        (lambda replica: setattr(replica, "scale", 1.5), "default.scale"),
    ],
    ids=["weight", "momentum", "learning rate", "value"],
)
def test_of_two_groups_that_differ_the_one_that_is_shorter_in_the_job_loads_what_is_named(
    caplog: pytest.LogCaptureFixture, change: Callable[[Normed], None], name: str
) -> None:
    server = lighthouse_of(2)
    replicas = groups(server, 2, on_replicas_differ="heal")
    train_to(replicas, EVERY)
    change(replicas[1])
    with caplog.at_level(logging.WARNING):
        train_to(replicas, EVERY + 3)
    assert said(caplog, "No state has a majority") and said(caplog, "It has loaded theirs", name)
    assert len({str(replica.bits()) for replica in replicas}) == 1
    assert [replica.manager.statistics().num_left_behind for replica in replicas] == [0, 0]


def test_a_group_that_comes_in_and_sets_a_rate_of_its_own_in_each_step_ends_at_the_third() -> None:
    """Nobody has seen yet which leaves of its state have to be equal; a setting of an optimizer that is guarded has to be."""
    server = lighthouse_of(1)
    (first,) = groups(server, 1)
    train_to([first], EVERY)
    second = Normed(server, "group_b", 1)
    has_ended = threading.Event()

    def train(replica: Normed) -> str:
        while replica is first and not has_ended.is_set():
            replica.step()
        with contextlib.ExitStack() as at_end:
            at_end.callback(has_ended.set)
            for number in range(40 if replica is second else 0):
                try:
                    if replica.step():
                        replica.sgd.param_groups[0]["lr"] = 0.01 * (2 + number)
                except ReplicasDifferError as error:
                    shutdown(second)  # as its process would end
                    return str(error)
        return ""

    ended = together([first, second], train)[1]  # type: ignore[arg-type]
    assert "for the third time in a row" in ended and "default.sgd.param_groups.0.lr" in ended
    assert second.manager.statistics().num_committed == 3
    assert first.manager.statistics().num_discarded <= 1


class Scaled(Normed):
    """Has a scale that it sets by itself."""

    def step(self) -> bool:
        counts = super().step()
        if counts:
            self.scale = self.python.random()
        return counts


def test_the_error_names_plain_values_of_the_groups_own_that_differ_as_well() -> None:
    """A raw loop's own learning rate is each group's own by then, and the weights that differ by it say nothing of that."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=30_000)
    replicas = [Scaled(server, name, seed) for seed, name in enumerate(("group_a", "group_b"))]
    train_to(replicas, EVERY + 3)  # type: ignore[arg-type]
    has_ended = threading.Event()

    def train(replica: Scaled) -> str:
        with contextlib.ExitStack() as at_end:
            at_end.callback(has_ended.set)
            while not has_ended.is_set():
                try:
                    if replica.step() and replica is replicas[1]:
                        replica.sgd.param_groups[0]["lr"] = replica.scale
                except ReplicasDifferError as error:
                    shutdown(replica)  # as its process would end
                    return str(error)
        return ""

    ended = together(replicas, train)[1]  # type: ignore[arg-type]
    assert (
        "for the third time in a row" in ended and "Each group has its own default.scale, and no step may be" in ended
    )
    shutdown(replicas[0])
    server.shutdown()


def test_what_differs_again_and_again_is_warned_of_the_first_time_and_at_powers_of_two(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = groups(lighthouse)
    train_to(replicas, EVERY)
    with caplog.at_level(logging.INFO):
        for number in range(4):
            replicas[1].sgd.param_groups[0]["lr"] = 0.2 + number
            train_to(replicas, replicas[1].manager.current_step() + 4)
    loaded = [record for record in caplog.records if "It has loaded theirs" in record.getMessage()]
    assert [record.levelname for record in loaded] == ["WARNING", "WARNING", "INFO", "WARNING"]
    assert "4 times by now (a warning at each power of two)" in loaded[-1].getMessage()
    shutdown(*replicas)


def test_stop_raises_in_all_groups_and_leaves_each_with_the_state_that_differs(lighthouse: LighthouseServer) -> None:
    replicas = groups(lighthouse, on_replicas_differ="stop")
    train_to(replicas, EVERY)
    replicas[2].flip_a_bit()

    def raised(replica: Replica) -> str:
        with pytest.raises(ReplicasDifferError) as error:
            for _ in range(100):
                replica.step()
        return str(error.value)

    messages = together(replicas, raised)  # type: ignore[arg-type]
    assert all("group_c" in message and "differ in default.model.weight" in message for message in messages)
    assert [replica.manager.current_step() for replica in replicas] == [EVERY] * 3


def test_an_argument_that_cannot_be_used_is_refused() -> None:
    for options in ({"check_equal_every": -1}, {"check_equal_every": 1, "on_replicas_differ": "explode"}):
        with pytest.raises(ConfigError):
            Replica("127.0.0.1:1", "a", **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("holds_lock", [True, False])
def test_a_loop_that_changes_weights_and_puts_them_back_gives_no_alarm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, holds_lock: bool
) -> None:
    """Who holds the lock waits for the digest; who does not is told, and compared with nobody."""
    server = lighthouse_of(2)
    replicas = groups(server, 2)
    is_changed = threading.Event()
    right = checking.digest_of

    def slow(value: Any) -> str:
        if isinstance(value, nn.Parameter):  # it is digested beside the loop
            is_changed.wait(0.02 if holds_lock else 10)
        return right(value)

    train_to(replicas, EVERY)
    monkeypatch.setattr(checking, "digest_of", slow)
    held = [replica.model.weight.detach().clone() for replica in replicas]
    lock = replicas[1].manager.state_dict_lock

    def step(replica: Replica) -> None:
        replica.optimizer.zero_grad()
        if replica is replicas[1]:
            with lock.write() if holds_lock else contextlib.nullcontext(), torch.no_grad():
                replica.model.weight.add_(1)
                is_changed.set()
            with lock.write() if holds_lock else contextlib.nullcontext(), torch.no_grad():
                replica.model.weight.copy_(held[1])
        replica.step()

    with caplog.at_level(logging.WARNING):
        together(replicas, step)  # type: ignore[arg-type]
    assert not said(caplog, "different states")
    assert bool(said(caplog, "is not compared: default.model.weight was written to")) is not holds_lock


def test_a_state_dict_that_returns_copies_in_one_group_gives_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    server = lighthouse_of(2)
    replicas = groups(server, 2)
    right = replicas[1].manager.hooks.registry.capture
    replicas[1].manager.hooks.registry.capture = lambda: copy.deepcopy(right())  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        train_to(replicas, EVERY + 1)
    assert not said(caplog, "different states")


class Scheduled(Replica):
    """Its scheduler sets the learning rate when it steps, and not when it is loaded: one step late."""

    def load(self, state: dict[str, Any]) -> None:
        rate = self.sgd.param_groups[0]["lr"]
        super().load(state)
        self.sgd.param_groups[0]["lr"] = rate


class Cached(Replica):
    """What it returns of its optimizer it has noted when it was made, as torchtitan 0.3.0 does."""

    def state(self) -> dict[str, Any]:
        self.noted: dict[str, Any] = getattr(
            self, "noted", {"param_groups": copy.deepcopy(self.sgd.state_dict()["param_groups"])}
        )
        return {**super().state(), "sgd": {**self.sgd.state_dict(), **self.noted}}


@pytest.mark.parametrize("kind", [Scheduled, Cached])
def test_a_learning_rate_that_is_stale_after_healing_is_the_sources_and_told_by_name(
    kind: type[Replica], caplog: pytest.LogCaptureFixture
) -> None:
    server = lighthouse_of(2)
    replicas = [kind(server, name, seed) for seed, name in enumerate(("group_a", "group_b"))]
    for replica in replicas:
        replica.state()
    for replica, rate in zip(replicas, (0.125, 0.25), strict=True):
        replica.sgd.param_groups[0]["lr"] = rate
    with caplog.at_level(logging.WARNING):
        together(replicas, Replica.step)
    (line,) = said(caplog, "did not set what the source's optimizers are set to")
    assert "optimizer 0.param_groups.0.lr: " in line and ", at the source 0." in line
    assert len({replica.sgd.param_groups[0]["lr"] for replica in replicas}) == 1
    assert len({replica.model.weight.detach().numpy().tobytes() for replica in replicas}) == 1


def test_a_load_that_takes_all_is_told_nothing(caplog: pytest.LogCaptureFixture, lighthouse: LighthouseServer) -> None:
    replicas = groups(lighthouse)
    with caplog.at_level(logging.WARNING):
        train_to(replicas, 2)
    assert sum(replica.manager.statistics().num_healed for replica in replicas) == 2
    shutdown(*replicas)
    assert not said(caplog, "does not return what was loaded", "model")


class TakesLater(Normed):
    """Its `load` does nothing with a count, as callbacks keep things for an `on_train_start` that does not come any more."""

    count = 0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "count": self.count}


def test_what_load_state_dict_does_not_take_is_told_at_the_first_heal_and_an_error_at_the_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Random generators, which it does not take either, are a group's own."""
    server = lighthouse_of(1)
    kept, healing = (TakesLater(server, f"group_{'ab'[number]}", number) for number in range(2))
    kept.count = 7
    is_over = threading.Event()

    def train(replica: Normed) -> None:
        while not is_over.is_set():
            replica.step()

    def heal_again(replica: Normed) -> None:
        replica.manager.report_torn_state()
        try:
            train(replica)
        finally:
            is_over.set()
            shutdown(replica)  # the other one waits for it

    with caplog.at_level(logging.WARNING):
        train_to([kept, healing], 1)
        (told,) = said(caplog, "does not return what was loaded")
        with pytest.raises(StateDictLoadError, match="for the second time") as error:
            together([kept, healing], lambda replica: (train if replica is kept else heal_again)(replica))
    for said_of in (told, str(error.value)):
        assert "(default.count)" in said_of
