"""When a fetch is given up whose step is over: its sources may wait for this group in the next quorum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from torchft_ckpt.checkpointing import CheckpointTransport
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.core.coordination import joining
from torchft_ckpt.core.coordination.messages import Source, StateLocated, StateVersion
from torchft_ckpt.errors import TransferCancelledError
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.state_registry import OwnState

VERSION = StateVersion(step=3, quorum_id=1, epoch="e")
STATE = {"user": {}, "torchft": OwnState().served(VERSION)}
SOURCE = Source(replica_id="a", replica_rank=0, checkpoint_addresses=["http://a"])
WANTED = StateLocated(request_id=0, version=VERSION, sources=[SOURCE])
LONG_S = 20.0


def progress(received: int, total: int = 9) -> TransferProgress:
    return TransferProgress(
        step=3,
        total_bytes=total,
        received_bytes=received,
        skipped_bytes=0,
        resent_bytes=0,
        num_sources=1,
        elapsed_s=1.0,
        brought_bytes=received,
    )


class Minimal(CheckpointTransport[Any]):
    """A user's transport: what the contract asks for, and a receive of a second that can be cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def metadata(self) -> str:
        return "http://b"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None: ...

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        return self.receive(1.0)

    def receive(self, takes_s: float) -> Any:
        if self.cancelled.wait(takes_s):
            self.cancelled.clear()
            raise TransferCancelledError("cancelled", party="test")
        return STATE

    def cancel_recv(self) -> None:
        self.cancelled.set()

    def shutdown(self, wait: bool = True) -> None: ...


Tell = Callable[[TransferProgress], None]


class TakesBack(Minimal):
    """Its sources take back what they serve. Each receive is one of `scripts`, which gets what tells of its progress."""

    uses_memory_of_state = True

    def __init__(self, *scripts: Callable[[TakesBack, Tell], Any]) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self._scripts = list(scripts)

    def fetch_checkpoint(self, *_: Any, on_progress: Tell, **how: Any) -> Any:
        self.began.release()
        return self._scripts.pop(0)(self, on_progress)


def begins_and_stands(transport: TakesBack, tell: Tell) -> Any:
    tell(progress(1))
    return transport.receive(LONG_S)


def is_slow(transport: TakesBack, tell: Tell) -> Any:
    for received in range(10):
        tell(progress(received))
        time.sleep(0.1)
    return STATE


def has_all(transport: TakesBack, tell: Tell) -> Any:
    tell(progress(9))
    return transport.receive(1.0)


def tells_as_it_ends(transport: TakesBack, tell: Tell) -> Any:
    try:
        return transport.receive(LONG_S)
    finally:
        time.sleep(0.1)
        tell(progress(1))


def heal(transport: CheckpointTransport[Any]) -> Healing:
    return Healing(transport, timedelta(seconds=LONG_S), rank=0, world_size=1, own=OwnState())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "STANDSTILL_S", 0.3)


@pytest.mark.parametrize("script", [lambda transport, tell: transport.receive(LONG_S), begins_and_stands])
def test_a_fetch_that_brings_nothing_is_given_up_once_its_step_is_over(script: Any) -> None:
    healed = heal(TakesBack(script))
    healed.start(WANTED, {}, False)
    with pytest.raises(TransferCancelledError):
        healed.wait(lambda: True)
    healed.shutdown()


@pytest.mark.parametrize(
    "transport", [TakesBack(is_slow), TakesBack(has_all), Minimal()], ids=["slow", "has all", "minimal"]
)
def test_one_that_goes_on_and_one_that_nobody_takes_back_are_not(transport: Minimal) -> None:
    healed = heal(transport)
    healed.start(WANTED, {}, False)
    assert healed.wait(lambda: True) == STATE
    healed.shutdown()


def test_while_its_step_can_count_it_is_waited_for() -> None:
    healed = heal(TakesBack(lambda transport, tell: transport.receive(1.0)))
    healed.start(WANTED, {}, False)
    assert healed.wait(lambda: False) == STATE
    healed.shutdown()


def test_how_far_the_fetch_before_was_says_nothing_of_this_one() -> None:
    transport = TakesBack(tells_as_it_ends, lambda transport, tell: transport.receive(LONG_S))
    healed = heal(transport)
    healed.start(WANTED, {}, False)
    assert transport.began.acquire(timeout=LONG_S)
    healed.start(WANTED, {}, False)
    with pytest.raises(TransferCancelledError):
        healed.wait(lambda: True)
    assert healed.progress is None
    healed.shutdown()
