"""A transport of somebody else that sends over the process group: the group is there before it serves, and one source sends."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from test_manager_in_process import Replica, shutdown, together

from torchft_ckpt import HTTPTransport, LighthouseServer, ProcessGroupGloo
from torchft_ckpt.checkpointing import PGTransport
from torchft_ckpt.checkpointing.state.tree import TreeEncoder, decode_tree, from_tensors

SHORT = timedelta(seconds=20)


class OverTheGroup:
    """Sends a state to ranks of the process group, tensor by tensor, and waits until it is there. It is no class of ours."""

    def __init__(self, pg: ProcessGroupGloo) -> None:
        self.pg = pg
        self.sent_to: list[list[int]] = []
        self.received_from: list[int] = []
        self.num_disallowed = 0

    def metadata(self) -> str:
        return "over the process group"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        self.sent_to.append(dst_ranks)
        encoder = TreeEncoder()
        node = encoder.encode(state_dict)
        about = [[str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for _, tensor in encoder.tensors]
        head = torch.frombuffer(bytearray(json.dumps([step, node, about]).encode()), dtype=torch.uint8)
        for rank in dst_ranks:
            for tensor in (torch.tensor([len(head)]), head, *(tensor.detach() for _, tensor in encoder.tensors)):
                self.pg.send([tensor.contiguous()], rank, 1).wait(timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self.received_from.append(src_rank)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            self.pg.recv([tensor], src_rank, 1).wait(timeout)
            return tensor

        head = take(torch.empty(int(take(torch.empty(1, dtype=torch.int64)).item()), dtype=torch.uint8))
        sent_step, node, about = json.loads(head.numpy().tobytes())
        assert sent_step == step
        return decode_tree(
            node, from_tensors([take(torch.empty(shape, dtype=getattr(torch, dtype))) for dtype, shape in about])
        )

    def disallow_checkpoint(self) -> None:
        self.num_disallowed += 1

    def shutdown(self, wait: bool = True) -> None:
        pass


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=3)
    yield server
    server.shutdown()


def replica(lighthouse: LighthouseServer, seed: int, **options: Any) -> tuple[Replica, OverTheGroup]:
    group = ProcessGroupGloo(timeout=SHORT)
    transport = OverTheGroup(group)
    return Replica(lighthouse, f"group_{seed}", seed, pg=group, checkpoint_transport=transport, **options), transport


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_groups_that_heal_over_the_process_group_commit_each_step_and_are_equal(
    lighthouse: LighthouseServer, use_async_quorum: bool
) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda seed: replica(lighthouse, seed, use_async_quorum=use_async_quorum), range(3)))
    replicas, transports = [one for one, _ in made], [transport for _, transport in made]
    assert together(replicas, lambda each: [each.step() for _ in range(3)]) == [[True] * 3] * 3
    assert len({str(each.bits()) for each in replicas}) == 1
    assert sorted(len(transport.received_from) for transport in transports) == [0, 1, 1]
    shutdown(*replicas)


def test_where_several_hold_the_state_the_one_that_is_asked_sends_it(lighthouse: LighthouseServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda seed: replica(lighthouse, seed), range(3)))
    replicas = [one for one, _ in made]
    together(replicas, lambda each: [each.step() for _ in range(2)])
    for _, transport in made:
        transport.sent_to.clear()
        transport.received_from.clear()
    replicas[1].manager.report_torn_state()  # it has to heal, and two hold the state
    assert together(replicas, lambda each: [each.step() for _ in range(4)])[0] == [True] * 4
    assert len({str(each.bits()) for each in replicas}) == 1
    sent = [transport.sent_to for _, transport in made]
    times = len(made[1][1].received_from)
    assert times >= 1
    assert sum(map(len, sent)) == times, sent
    shutdown(*replicas)


def test_who_unpickles_is_named_once_and_ours_are_not(
    lighthouse: LighthouseServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="torchft_ckpt.manager"):
        foreign, _ = replica(lighthouse, 0)
        group = ProcessGroupGloo(timeout=SHORT)
        ours = Replica(
            lighthouse, "ours", pg=group, checkpoint_transport=PGTransport(group, SHORT, torch.device("cpu"))
        )
    told = [record.getMessage() for record in caplog.records if record.name.startswith("torchft_ckpt.manager")]
    assert len(told) == 1
    assert "OverTheGroup" in told[0]
    assert "unpickles" in told[0]
    shutdown(foreign, ours)


def test_it_is_told_once_before_each_step_of_the_optimizer() -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    alone, transport = replica(server, 0)
    assert alone.step()
    assert alone.manager.transport is transport  # type: ignore[comparison-overlap]
    before = transport.num_disallowed
    assert alone.step()
    assert (
        transport.num_disallowed - before == 1 + 1
    )  # and once as the step is committed, when nobody needs it any more
    shutdown(alone)
    server.shutdown()


def test_a_subclass_of_ours_is_told_once_before_each_step_of_the_optimizer() -> None:
    class Counting(HTTPTransport[Any]):
        num_disallowed = 0

        def disallow_checkpoint(self) -> None:
            self.num_disallowed += 1
            super().disallow_checkpoint()

    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    transport = Counting(SHORT)
    alone = Replica(server, "alone", checkpoint_transport=transport)
    assert alone.step()
    before = transport.num_disallowed
    assert alone.step()
    assert transport.num_disallowed - before == 1
    shutdown(alone)
    server.shutdown()


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
    source = PGTransport(None, SHORT, "cpu")
    receiver = PGTransport(None, SHORT, torch.device("cpu"), state_dict=lambda: here)
    assert isinstance(source, HTTPTransport)
    source.send_checkpoint([1], 3, {"w": torch.arange(4.0), "step": 3}, SHORT)
    received = receiver.recv_checkpoint(0, source.metadata(), 3, SHORT)
    assert (received["w"] is here["w"], here["w"].tolist(), received["step"]) == (True, [0.0, 1.0, 2.0, 3.0], 3)
    for transport in (source, receiver):
        transport.shutdown()
