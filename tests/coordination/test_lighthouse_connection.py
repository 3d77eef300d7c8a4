"""A group's connection to the lighthouse ends: whether it was lost, what is said of it, and who connects again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from support.services import make_group_service

from torchft_ckpt import LighthouseServer
from torchft_ckpt.coordination import RankSession
from torchft_ckpt.core.coordination.messages import PROTOCOL_VERSION, Dropped, Hello, StateVersion

LIMIT_S = 60
LONG = timedelta(seconds=LIMIT_S)
LOST = "lost the connection to the lighthouse"


class Group:
    """A group of two ranks; rank 1 says nothing."""

    def __init__(self, lighthouse: LighthouseServer) -> None:
        self.lighthouse = lighthouse
        self.num_hellos = 0
        self.over = threading.Event()
        self.service = make_group_service(
            lighthouse.address(), hello=self.hello, heartbeat_interval=timedelta(seconds=0.1), connect_timeout=LONG
        )
        self.rank = RankSession(
            address=self.service.address,
            group_rank=1,
            on_message=lambda message: None,
            token="",
            heartbeat_interval=timedelta(seconds=0.1),
            connect_timeout=LONG,
        )

    def hello(self) -> Hello:
        self.num_hellos += 1
        if self.num_hellos > 1:
            self.over.set()
        return Hello(protocol=PROTOCOL_VERSION, replica_id="group:1", group_world_size=2, version=StateVersion())

    def connects_again(self) -> bool:
        """Return whether it does, or stays away for good."""
        keeps_up = self.service._client._task
        assert keeps_up is not None
        self.service._thread.call_soon(keeps_up.add_done_callback, lambda _: self.over.set())
        assert self.over.wait(LIMIT_S)
        return self.num_hellos > 1

    def end(self) -> None:
        self.rank.shutdown("the test is over")
        self.service.shutdown("the test is over")


@pytest.fixture
def group() -> Iterator[Group]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=60_000)
    group = Group(lighthouse)
    yield group
    group.end()
    lighthouse.shutdown()


def cut_off(group: Group) -> None:
    (channel,) = group.lighthouse._channels.values()
    group.lighthouse._thread.call_soon(channel.abort)


def drop(group: Group) -> None:
    (channel,) = group.lighthouse._channels.values()
    group.lighthouse._thread.call_soon(lambda: (channel.send(Dropped(reason="nothing heard from it")), channel.close()))


def stay_away_for_a_while(group: Group) -> None:
    group.service._thread.call_soon(group.service._client.hold)
    group.service._thread.call_later(0.05, group.service._client.release)


@pytest.mark.parametrize(("end", "said"), [(cut_off, LOST), (drop, "dropped this group"), (stay_away_for_a_while, "")])
def test_a_connection_that_ends_is_called_lost_only_where_it_was_and_is_opened_again(
    group: Group, end: Callable[[Group], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "torchft_ckpt.coordination.lighthouse_connection"):
        end(group)
        assert group.connects_again()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)
    assert all(said in line for line in lines)


def test_a_group_that_is_over_leaves_and_does_not_come_back(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 may be at work for a while yet: it connected a thousand times a second, and was taken for one that joins."""
    with caplog.at_level(logging.WARNING, "torchft_ckpt.coordination.lighthouse_connection"):
        group.rank.shutdown("it is done")
        assert not group.connects_again()
    assert caplog.records == []


def test_a_group_that_is_told_to_leave_in_the_instant_in_which_an_attempt_fails_leaves(group: Group) -> None:
    """Up to Python 3.11 `wait_for` passes on how the attempt ended, and forgets that it was cancelled."""
    client = group.service._client
    tries = threading.Event()

    async def connect(attempt_s: float) -> None:
        tries.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionRefusedError from None

    client._connect = connect  # type: ignore[assignment, method-assign]
    group.lighthouse.shutdown()
    assert tries.wait(LIMIT_S)
    leaving = threading.Thread(target=group.service.shutdown, args=("it is over",), daemon=True)
    leaving.start()
    leaving.join(LIMIT_S)
    assert not leaving.is_alive()
