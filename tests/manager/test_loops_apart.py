"""The groups' loops differ: the step in which they do is discarded soon, in all of them, and the log names who waits for whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from support.fake_process_group import FakeFabric, FakeProcessGroup
from support.replicas import end_all, lighthouse_of, manager_of
from torch import nn

from torchft_ckpt import LighthouseServer, Optimizer, ProcessGroupGloo
from torchft_ckpt.manager import collectives
from torchft_ckpt.process_group import ProcessGroup

pytestmark = pytest.mark.slow

TIMEOUT = timedelta(seconds=300)
SOON_S = 60.0
"""Far from the timeout; on a machine that does much else a step that is discarded at once may take a while."""

Gradients = list[torch.Tensor]
Loop = Callable[[Gradients], Gradients]
"""From the gradients of one backward pass to what a group averages of them."""


def every(gradients: Gradients) -> Gradients:
    return gradients


def none(gradients: Gradients) -> Gradients:
    return []


def all_but_the_last(gradients: Gradients) -> Gradients:
    return gradients[:-1]


def one_more(gradients: Gradients) -> Gradients:
    return [*gradients, torch.ones(1)]


def other_way_round(gradients: Gradients) -> Gradients:
    return gradients[::-1]


def as_one_row(gradients: Gradients) -> Gradients:
    return [gradients[0].flatten(), *gradients[1:]]


def longer(gradients: Gradients) -> Gradients:
    return [*gradients[:-1], torch.ones(gradients[-1].numel() + 1)]


def in_double_precision(gradients: Gradients) -> Gradients:
    return [*gradients[:-1], gradients[-1].double()]


@dataclass
class Step:
    """What a group does in one step."""

    averages: Loop = every
    window: int = 1
    """Backward passes, each of which averages."""


ALIKE = Step()


class Group:
    """One rank that goes through given steps."""

    def __init__(self, lighthouse: LighthouseServer, process_group: ProcessGroup, name: str, num_groups: int) -> None:
        self.model = nn.Linear(8, 4)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = manager_of(
            lighthouse,
            self.model.load_state_dict,
            self.model.state_dict,
            name=name,
            pg=process_group,
            min_replica_size=num_groups,
            timeout=TIMEOUT,
        )
        self.optimizer = Optimizer(self.manager, self.sgd)
        self.committed: list[bool] = []
        self.took_s: list[float] = []

    def go(self, steps: list[Step]) -> None:
        for step in steps:
            before = time.monotonic()
            self.optimizer.zero_grad()
            for _ in range(step.window):
                self.model(torch.ones(2, 8)).square().mean().backward()
                gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
                works = [self.manager.allreduce(gradient) for gradient in step.averages(gradients)]
                for work in works:
                    work.wait()  # the next backward pass adds to them
            num_committed = self.manager.statistics().num_committed
            self.optimizer.step()
            self.committed.append(self.manager.statistics().num_committed > num_committed)
            self.took_s.append(time.monotonic() - before)

    def bits(self) -> list[list[int]]:
        return [p.detach().view(torch.int32).flatten().tolist() for p in self.model.parameters()]


def train(loops: list[list[Step]], process_group: Callable[[], ProcessGroup]) -> list[Group]:
    """Have groups "a", "b" and so on go through their steps, at once."""
    lighthouse = lighthouse_of(len(loops))
    with ThreadPoolExecutor(len(loops)) as pool:
        names = [chr(ord("a") + number) for number in range(len(loops))]
        groups = list(pool.map(lambda name: Group(lighthouse, process_group(), name, len(loops)), names))
        try:
            list(pool.map(lambda group, steps: group.go(steps), groups, loops))
        finally:
            end_all()
    return groups


def train_over_gloo(*loops: list[Step]) -> list[Group]:
    return train(list(loops), lambda: ProcessGroupGloo(TIMEOUT))


def train_in_memory(*loops: list[Step]) -> list[Group]:
    """Where sizes differ: Gloo ends the process if it gets to see it."""
    fabric = FakeFabric()
    return train(list(loops), lambda: FakeProcessGroup(fabric, TIMEOUT))


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records if record.name == "torchft_ckpt.manager.outcomes"]
    lines = [" ".join(map(str.strip, text.splitlines())) for text in told]  # a long reason is folded
    return [line.partition("reason=")[2] for line in lines if "verdict=discard" in line]


def assert_the_one_step_was_discarded_by_name(groups: list[Group], odd: str, caplog: pytest.LogCaptureFixture) -> None:
    """All but one step were committed, with the same weights; who looks at any group's log finds the odd one and another."""
    discarded = [not committed for committed in groups[0].committed]
    assert sum(discarded) == 1
    for group in groups:
        assert [not committed for committed in group.committed] == discarded
        assert max(group.took_s) < SOON_S
        assert group.bits() == groups[0].bits()
    said = reasons(caplog)
    assert len(said) == len(groups)
    for reason in said:
        assert f"{odd}:" in reason
        assert any(f"{group.manager.replica_id().partition(':')[0]}:" in reason for group in groups[:-1])
        assert "the loops of the groups differ" in reason


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(collectives, "REPORT_WAIT_S", 0.05)
    caplog.set_level(logging.INFO, "torchft_ckpt.manager")


@pytest.mark.parametrize("num_alike_before", [0, 2])
def test_a_shorter_accumulation_window_in_one_group_does_not_cost_the_timeout(
    num_alike_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = [Step(window=4)] * num_alike_before
    groups = train_over_gloo([*before, Step(window=4), ALIKE], [*before, Step(window=2), ALIKE])
    assert_the_one_step_was_discarded_by_name(groups, "b", caplog)


@pytest.mark.parametrize("num_alike_before", [0, 2])
@pytest.mark.parametrize("averages", [none, all_but_the_last, one_more])
def test_one_group_that_averages_less_or_more_is_named(
    averages: Loop, num_alike_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`none`: its all-reduce hook was forgotten."""
    before = [ALIKE] * num_alike_before
    groups = train_over_gloo([*before, ALIKE, ALIKE], [*before, Step(averages), ALIKE])
    assert_the_one_step_was_discarded_by_name(groups, "b", caplog)


@pytest.mark.parametrize("num_alike_before", [0, 2])
@pytest.mark.parametrize("averages", [other_way_round, as_one_row, longer, in_double_precision])
def test_one_group_that_averages_other_tensors_is_named(
    averages: Loop, num_alike_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = [ALIKE] * num_alike_before
    groups = train_in_memory([*before, ALIKE, ALIKE], [*before, Step(averages), ALIKE])
    assert_the_one_step_was_discarded_by_name(groups, "b", caplog)


def test_one_of_three_groups_is_named(caplog: pytest.LogCaptureFixture) -> None:
    groups = train_over_gloo([ALIKE, ALIKE, ALIKE], [ALIKE, ALIKE, ALIKE], [ALIKE, Step(none), ALIKE])
    assert_the_one_step_was_discarded_by_name(groups, "c", caplog)


def test_groups_that_change_what_they_average_in_the_same_step_lose_nothing() -> None:
    """A metric each few steps, say."""
    loop = [ALIKE, Step(one_more), ALIKE, ALIKE, Step(one_more), Step(window=2)]
    groups = train_over_gloo(loop, loop)
    assert [group.committed for group in groups] == [[True] * 6] * 2
    assert groups[0].bits() == groups[1].bits()


def test_groups_that_average_nothing_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """The hook was forgotten in all of them: their weights drift apart, and each step is committed."""
    groups = train_in_memory([Step(none)] * 3, [Step(none)] * 3)
    assert [group.committed for group in groups] == [[True] * 3] * 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "averaged" in r.getMessage()]
    assert sorted(warning.partition(":")[0] for warning in warnings) == ["a", "b"]


def test_what_is_issued_after_a_collective_that_was_not_cleared_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' collective is still there until the abort: it would have met the next one of the odd group."""
    abort = FakeProcessGroup.abort

    def abort_late(group: FakeProcessGroup, errored: bool = True) -> None:
        time.sleep(0.05)
        abort(group, errored)

    monkeypatch.setattr(FakeProcessGroup, "abort", abort_late)
    started: list[int] = []
    allgather = FakeProcessGroup.allgather
    monkeypatch.setattr(FakeProcessGroup, "allgather", lambda *args: (started.append(1), allgather(*args))[1])
    groups = train_in_memory([ALIKE] * 3, [ALIKE, ALIKE, Step(other_way_round)])
    assert [group.committed for group in groups] == [[True, True, False]] * 2
    assert len(started) == 4, "each group has compared its two collectives of the first step"
