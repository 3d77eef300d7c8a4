"""A group hands its state over to another one: real managers, lighthouse and transports in one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from support.replicas import Replica, lighthouse_of, shutdown

from torchft_ckpt import LighthouseServer

LONG = timedelta(seconds=60)
SOON = timedelta(milliseconds=300)

pytestmark = pytest.mark.slow


@pytest.fixture
def lighthouse() -> LighthouseServer:
    return lighthouse_of(1, join_timeout_ms=100)


@pytest.fixture
def old(lighthouse: LighthouseServer) -> Iterator[Replica]:
    """A group that has trained for some steps."""
    replica = Replica(lighthouse, "old", seed=1)
    assert [replica.step() for _ in range(3)] == [True] * 3
    yield replica
    shutdown(replica)


def test_both_say_that_it_worked_before_the_new_group_has_asked_for_any_quorum(
    lighthouse: LighthouseServer, old: Replica
) -> None:
    """It may be busy then for longer than the old one waits: it compiles, or validates."""
    new = Replica(lighthouse, "new", seed=2)
    with ThreadPoolExecutor(1) as pool:
        handed = pool.submit(old.manager.hand_over, LONG)
        assert new.manager.take_over(LONG)
        assert handed.result(60)
    assert new.bits() == old.bits()
    shutdown(old)
    assert new.step() and new.manager.current_step() == 4


def test_who_is_ready_when_the_old_group_has_given_up_is_told_so_and_the_old_one_trains_on(
    lighthouse: LighthouseServer, old: Replica
) -> None:
    gave_up = threading.Event()
    holder: list[Replica] = []

    def load(state: dict[str, Any]) -> None:
        gave_up.wait(60)  # to load takes longer than the old group waits
        holder[0].load(state)

    new = Replica(lighthouse, "new", seed=2, load_state_dict=load)
    holder.append(new)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(new.manager.take_over, timedelta(seconds=8))
        assert not old.manager.hand_over(timedelta(seconds=2))
        gave_up.set()
        assert taken.result(60) is False
    assert old.step() and old.manager.current_step() == 4


def test_where_nobody_hands_over_take_over_says_so_and_warns_of_no_running_step(
    lighthouse: LighthouseServer, old: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    new = Replica(lighthouse, "new", seed=2)
    stops = threading.Event()
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        training = pool.submit(lambda: [old.step() for _ in iter(stops.is_set, True)])
        assert new.manager.take_over(timedelta(seconds=1)) is False
        stops.set()
        training.result(60)
    assert not [record.message for record in caplog.records if "catching up" in record.message]


def test_one_that_comes_early_waits_until_the_state_is_handed_over(lighthouse: LighthouseServer, old: Replica) -> None:
    new = Replica(lighthouse, "new", seed=2)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(new.manager.take_over, LONG)
        assert old.step() and old.step()
        assert old.manager.hand_over(LONG)
        assert taken.result(60)
    assert (new.manager.current_step(), new.bits()) == (5, old.bits())


def test_nobody_takes_it_and_the_old_group_trains_on(old: Replica) -> None:
    assert not old.manager.hand_over(SOON)
    assert old.step()
