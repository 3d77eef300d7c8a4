"""A transport of somebody else, with torchft's methods: a job heals by it. One that sends over the process group is refused."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.replicas import Replica, lighthouse_of, together

from torchft_ckpt import HTTPTransport, LighthouseServer, ProcessGroupGloo
from torchft_ckpt.checkpointing import PGTransport as OurPGTransport
from torchft_ckpt.errors import ConfigError

SHORT = timedelta(seconds=20)


SENT: dict[str, dict[int, Any]] = {}
"""What each transport gives now, by its address and the step."""


class ByPickle:
    """Pickles what it sends, as torchft's transport does. It is no class of ours, and has torchft's methods alone."""

    def __init__(self) -> None:
        self.address = f"mem:{len(SENT)}"
        SENT[self.address] = {}
        self.received_from: list[str] = []
        self.num_disallowed = 0

    def metadata(self) -> str:
        return self.address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        SENT[self.address] = {step: pickle.dumps(state_dict)}

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        until = time.monotonic() + timeout.total_seconds()
        while step not in SENT[metadata]:
            if time.monotonic() > until:
                raise TimeoutError(f"{metadata} does not send step {step}")
            threading.Event().wait(0.01)
        self.received_from.append(metadata)
        return pickle.loads(SENT[metadata][step])  # noqa: S301

    def disallow_checkpoint(self) -> None:
        self.num_disallowed += 1
        SENT[self.address] = {}

    def shutdown(self, wait: bool = True) -> None:
        pass


@pytest.fixture
def lighthouse() -> LighthouseServer:
    return lighthouse_of(3)


def replica(lighthouse: LighthouseServer, seed: int, **options: Any) -> tuple[Replica, ByPickle]:
    transport = ByPickle()
    return Replica(lighthouse, f"group_{seed}", seed, checkpoint_transport=transport, **options), transport


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_groups_that_heal_by_it_commit_each_step_and_are_equal(
    lighthouse: LighthouseServer, use_async_quorum: bool
) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda seed: replica(lighthouse, seed, use_async_quorum=use_async_quorum), range(3)))
    replicas, transports = [one for one, _ in made], [transport for _, transport in made]
    assert together(replicas, lambda each: [each.step() for _ in range(3)]) == [[True] * 3] * 3
    assert len({str(each.bits()) for each in replicas}) == 1
    assert sorted(len(transport.received_from) for transport in transports) == [0, 1, 1]
    replicas[1].manager.report_torn_state()  # it has to heal, and two hold the state
    counted = together(replicas, lambda each: [each.step() for _ in range(4 + (each is replicas[1]))])
    assert counted == [[True] * 4, [False, *[True] * 4], [True] * 4]
    assert len({str(each.bits()) for each in replicas}) == 1


class PGTransport(ByPickle):
    """Of this name torchft's sends over the process group, and says nothing of it."""


class OverTheGroup(ByPickle):
    needs_process_group = True


@pytest.mark.parametrize("kind", [PGTransport, OverTheGroup])
def test_one_that_needs_the_process_group_is_refused_by_name(lighthouse: LighthouseServer, kind: type[Any]) -> None:
    """A group receives its state before it is in a process group."""
    with pytest.raises(ConfigError, match=f"{kind.__name__} sends over the process group.*use HTTPTransport"):
        Replica(lighthouse, "group_0", checkpoint_transport=kind())


def test_who_unpickles_is_named_once_and_ours_are_not(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="torchft_ckpt.manager"):
        replica(lighthouse, 0)
        group = ProcessGroupGloo(timeout=SHORT)
        Replica(lighthouse, "ours", pg=group, checkpoint_transport=OurPGTransport(group, SHORT, torch.device("cpu")))
    told = [record.getMessage() for record in caplog.records if record.name.startswith("torchft_ckpt.manager")]
    assert len(told) == 1
    assert "ByPickle" in told[0]
    assert "unpickles" in told[0]


def test_it_is_told_once_before_each_step_of_the_optimizer() -> None:
    server = lighthouse_of(1)
    alone, transport = replica(server, 0)
    assert alone.step()
    assert alone.manager.hooks.transport is transport  # type: ignore[comparison-overlap]
    before = transport.num_disallowed
    assert alone.step()
    assert (
        transport.num_disallowed - before == 1 + 1
    )  # and once as the step is committed, when nobody needs it any more


def test_a_subclass_of_ours_is_told_once_before_each_step_of_the_optimizer() -> None:
    class Counting(HTTPTransport[Any]):
        num_disallowed = 0

        def disallow_checkpoint(self) -> None:
            self.num_disallowed += 1
            super().disallow_checkpoint()

    server = lighthouse_of(1)
    transport = Counting(SHORT)
    alone = Replica(server, "alone", checkpoint_transport=transport)
    assert alone.step()
    before = transport.num_disallowed
    assert alone.step()
    assert transport.num_disallowed - before == 1


def test_a_subclass_that_only_overrides_serves_the_state_of_its_step_all_the_same() -> None:
    class Silent(HTTPTransport[Any]):
        def disallow_checkpoint(self) -> None:
            pass

    source, receiver = Silent(SHORT), HTTPTransport[Any](SHORT)
    weight = torch.zeros(4)
    source.send_checkpoint([1], 3, {"w": weight}, SHORT)
    with source.state_lock.write():
        weight.numpy()[:] = 7.0
    assert receiver.recv_checkpoint(0, source.metadata(), 3, SHORT)["w"].tolist() == [0.0] * 4
    for end in (source, receiver):
        end.shutdown()


def test_ours_of_that_name_moves_a_state_and_fills_the_one_that_is_here() -> None:
    here = {"w": torch.zeros(4), "step": 0}
    source = OurPGTransport(None, SHORT, "cpu")
    receiver = OurPGTransport(None, SHORT, torch.device("cpu"), state_dict=lambda: here)
    assert isinstance(source, HTTPTransport)
    source.send_checkpoint([1], 3, {"w": torch.arange(4.0), "step": 3}, SHORT)
    received = receiver.recv_checkpoint(0, source.metadata(), 3, SHORT)
    assert (received["w"] is here["w"], here["w"].tolist(), received["step"]) == (True, [0.0, 1.0, 2.0, 3.0], 3)
    for transport in (source, receiver):
        transport.shutdown()
