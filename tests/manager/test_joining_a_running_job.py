"""A group comes into a running job. Its first iteration is its own: nobody waits for it, and nothing of it counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.replicas import SHORT, Replica, Run, lighthouse_of

from torchft_ckpt import HTTPTransport

pytestmark = pytest.mark.usefixtures("patient")


def step(replica: Replica, meanwhile: Callable[[], None]) -> bool:
    """A step whose forward pass takes as long as something else."""
    before = replica.manager.statistics().num_committed
    replica.optimizer.zero_grad()
    loss = replica.model(torch.ones(2, 8)).square().mean()
    meanwhile()
    loss.backward()
    for parameter in replica.model.parameters():
        assert parameter.grad is not None
        replica.manager.allreduce(parameter.grad).wait()
    replica.optimizer.step()
    return replica.manager.statistics().num_committed > before


def test_others_train_on_while_a_group_warms_up_and_it_contributes_from_its_second_iteration_on() -> None:
    run = Run()
    slow = Replica(run.server, "c", seed=7)
    weights = slow.bits()
    discarded = [replica.manager.statistics().num_discarded for replica in run.at_work]
    found: list[object] = []

    def meanwhile() -> None:
        run.wait_for_steps(5)
        found.append(slow.bits())

    assert not step(slow, meanwhile)
    assert found == [weights], "nothing is loaded in the middle of an iteration"
    assert slow.manager.view().came_in and not slow.manager.is_participating()
    assert slow.step() and slow.manager.is_participating()
    run.end(slow)
    assert len({str(replica.bits()) for replica in (*run.at_work, slow)}) == 1
    assert [replica.manager.statistics().num_discarded for replica in run.at_work] == discarded


def test_warming_up_counts_for_no_limit_of_failures() -> None:
    run = Run()
    joined = Replica(run.server, "c", seed=7, max_retries=0)
    assert not joined.step()
    run.end(joined)


def test_groups_that_begin_together_do_not_warm_up() -> None:
    server = lighthouse_of(2)
    replicas = [Replica(server, name, seed) for seed, name in enumerate("ab")]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(Replica.step, replicas)) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize("slow", ["load_state_dict", "state_dict after it"])
def test_a_state_that_takes_long_to_load_comes_in_at_its_first_attempt(use_async_quorum: bool, slow: str) -> None:
    run = Run(use_async_quorum=use_async_quorum)

    class Slow(Replica):
        is_slow = False

        def load(self, state: dict[str, Any]) -> None:
            self.is_slow = slow != "load_state_dict"
            if not self.is_slow:
                time.sleep(0.8)
            super().load(state)

        def state(self) -> dict[str, Any]:
            if self.is_slow:
                self.is_slow = False
                time.sleep(0.8)
            return super().state()

    joined = Slow(run.server, "c", seed=7, use_async_quorum=use_async_quorum)
    run.end(joined)
    assert joined.manager.statistics().num_healed == 1
    assert [replica.manager.statistics().num_discarded for replica in (*run.at_work, joined)] == [0, 0, 0]


class Unfreezing(Replica):
    """Its bias is trained from the third step on, as the step of its manager says."""

    def step(self) -> bool:
        before = self.manager.statistics().num_committed
        self.model.bias.requires_grad_(self.manager.current_step() >= 2)
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.manager.allreduce(parameter.grad)
        self.optimizer.step()
        return self.manager.statistics().num_committed > before


def test_a_state_that_a_group_has_to_learn_first_is_kept_for_it_when_the_others_go_on() -> None:
    """Nobody waits for a group that does not train the same parameters yet: it receives the state of a step that is over."""
    run = Run(replica=Unfreezing)

    class Late(HTTPTransport[Any]):
        def fetch_checkpoint(self, *args: Any, **options: Any) -> Any:
            if not joined.manager.current_step():
                run.wait_for_steps(2)
            return super().fetch_checkpoint(*args, **options)

    joined = Unfreezing(run.server, "c", seed=7, checkpoint_transport=Late(SHORT))
    assert not joined.step()
    assert joined.manager.statistics().num_healed == 1
    run.end(joined)
    assert len({str(replica.bits()) for replica in (*run.at_work, joined)}) == 1


class Attempts(Replica):
    """Counts its attempts at steps in what it registers, as a loop does that counts batches; every second one may fail."""

    fails = False

    def __init__(self, *arguments: Any, fabric: FakeFabric, **options: Any) -> None:
        self.attempts = 0
        super().__init__(*arguments, pg=FakeProcessGroup(fabric, SHORT), **options)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "attempts": self.attempts}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.attempts = state["attempts"]

    def step(self) -> bool:
        def note_attempt() -> None:
            self.attempts += 1
            if self.fails and self.attempts % 2:
                self.manager.report_error(RuntimeError("a batch went wrong"))

        return step(self, note_attempt)


def test_groups_that_come_in_between_discarded_steps_get_the_state_of_now() -> None:
    """A discarded step leaves another state under the same name as before: what was served of that before is of no use."""
    fabric = FakeFabric()  # each discard is a group to connect anew, of some hundred here
    run = Run(Attempts, fabric=fabric)
    run.at_work[0].fails = True  # type: ignore[attr-defined]
    come = [Attempts(run.server, name, seed=7, fabric=fabric) for name in "cd"]

    def train(replica: Replica) -> None:
        while not all(other.manager.is_participating() for other in come):
            replica.step()
        run.last_step = min(run.last_step, replica.manager.current_step() + 10)
        run.train(replica)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, come))
    for loop in run._loops:
        loop.result(60)
    groups = [*run.at_work, *come]
    assert len({(str(one.bits()), one.attempts) for one in groups}) == 1  # type: ignore[attr-defined]
    assert run.at_work[0].manager.statistics().num_discarded > 0
    assert [one.manager.statistics().num_healed for one in come] == [1, 1]
