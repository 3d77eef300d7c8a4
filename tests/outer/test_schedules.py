"""What a script does after `optimizer.step()`, beside an outer loop: a group that comes into a running job does as the others.

Real managers on threads, two groups of one rank. Both take the same batch in the same iteration, so they are bit-equal.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.fake_outer_manager import FakeOuterManager, Hub
from support.late import AsksLate
from support.replicas import manager_of
from torch import nn
from torch.distributed import Work
from torch.optim.lr_scheduler import LambdaLR

from torchft_ckpt import DiLoCo, HTTPTransport, LighthouseServer, LocalSGD
from torchft_ckpt.core.training.outer_schedule import OuterSchedule, RoundPlace

LONG_S = 60.0
SYNC_EVERY = 4
NUM_ROUNDS_ALONE = 3
NUM_ROUNDS_TOGETHER = 3

Bits = list[list[int]]


def bits(tensors: list[torch.Tensor]) -> Bits:
    return [tensor.detach().reshape(-1).view(torch.int32).tolist() for tensor in tensors]


@dataclass(frozen=True)
class Case:
    kind: str
    delay: int = 0
    round_retries: int = 3
    num_failures: int = 0
    """Attempts that fail, from the first on in which both groups are."""
    uses_closure: bool = False


@dataclass(frozen=True)
class Place:
    """Where a script is at the end of an iteration."""

    num_scheduled: int
    rate: float
    state: Bits


class Script:
    """A training script of one group: its state is of model, inner optimizer, schedule and a count of its iterations.

    It steps the schedule where everybody does, after the optimizer.
    """

    def __init__(
        self, address: str, number: int, case: Case, transport: HTTPTransport[dict[str, Any]] | None = None
    ) -> None:
        torch.manual_seed(number)
        self._case = case
        self._num_failures = case.num_failures if number == 0 else 0
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = LambdaLR(self.inner, lambda step: 1 / (1 + step))
        self.iteration = 0
        self.manager = manager_of(
            address,
            self._load,
            self._state,
            name=f"group_{number}",
            use_async_quorum=False,
            checkpoint_transport=transport,
        )
        self._allreduce = self.manager.allreduce
        self.manager.allreduce = self._allreduce_and_fail  # type: ignore[method-assign,assignment]
        self.loop: Any
        if case.kind == "diloco":
            outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            self.loop = DiLoCo(
                self.manager,
                [self.model],
                self.inner,
                outer,
                SYNC_EVERY,
                fragment_sync_delay=case.delay,
                round_retries=case.round_retries,
            )
        else:
            sync_every = 1000 if case.kind == "by_hand" else SYNC_EVERY
            self.loop = LocalSGD(self.manager, self.model, self.inner, sync_every, round_retries=case.round_retries)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
            "schedule": self.schedule.state_dict(),
            "iteration": self.iteration,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.schedule.load_state_dict(state["schedule"])
        self.iteration = state["iteration"]

    def _allreduce_and_fail(self, *arguments: Any, **options: Any) -> Work:
        work = self._allreduce(*arguments, **options)
        formed = self.manager.view().quorum
        if (
            formed is not None
            and formed.replica_world_size == 2
            and self._num_failures
            and self.manager.errored() is None
        ):
            self._num_failures -= 1
            work.wait()
            self.manager.report_error(RuntimeError("made to fail"))
        return work

    def _loss(self) -> torch.Tensor:
        self.inner.zero_grad()
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.iteration))
        loss = self.model(batch).sub(batch.flip(1)).square().mean()
        loss.backward()
        return loss

    def train(self, told: threading.Event, after: int) -> dict[int, Place]:
        """Train until both groups were in some rounds; return where the script was after each iteration.

        `told`: set after so many rounds.
        """
        seen: dict[int, Place] = {}
        num_rounds = num_together = 0
        with self.loop:
            self.model(torch.zeros(1, 4))  # the loop begins: the iteration is known
            while num_together < NUM_ROUNDS_TOGETHER:
                self.iterate()
                seen[self.iteration] = self._place()
                if self._case.kind == "by_hand" and self.iteration % SYNC_EVERY == 0:
                    self.loop.sync()
                counts = self.manager.statistics()
                if counts.num_committed > num_rounds:
                    num_rounds = counts.num_committed
                    num_together += self.manager.num_participants() == 2
                    if num_rounds >= after:
                        told.set()
        return seen

    def iterate(self) -> None:
        if self._case.uses_closure:
            self.inner.step(self._loss)  # type: ignore[arg-type]
        else:
            self._loss()
            self.inner.step()
        self.schedule.step()
        self.iteration += 1

    def _place(self) -> Place:
        own = [value for state in self.inner.state_dict()["state"].values() for value in state.values()]
        return Place(self.schedule.last_epoch, self.inner.param_groups[0]["lr"], bits([*self.model.parameters(), *own]))


class CountsRounds(Script):
    """Counts those in which it has seen `current_step` move, which a group that comes in does not see of its first one."""

    rounds = 0

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "rounds": self.rounds}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.rounds = state["rounds"]

    def iterate(self) -> None:
        step = self.manager.current_step()
        super().iterate()
        self.rounds += self.manager.current_step() > step

    def _place(self) -> Any:
        return self.manager.current_step(), self.rounds, self.manager.statistics().num_corrected


def train_two(case: Case, kind: type[Script] = Script) -> tuple[dict[int, Place], dict[int, Place]]:
    """Let a second group come to one that trains; return where both were after each iteration."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    may_come = threading.Event()

    def run(number: int, told: threading.Event) -> dict[int, Place]:
        script = kind(lighthouse.address(), number, case)
        try:
            return script.train(told, NUM_ROUNDS_ALONE)
        finally:
            script.manager.shutdown()

    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(run, 0, may_come)
            assert may_come.wait(LONG_S)
            second = pool.submit(run, 1, threading.Event())
            return first.result(LONG_S), second.result(LONG_S)
    finally:
        lighthouse.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("diloco"),
        Case("diloco", uses_closure=True),
        Case("local_sgd"),
        Case("local_sgd", num_failures=1),
        Case("by_hand"),
        Case("by_hand", num_failures=1),
    ],
    ids=str,
)
def test_a_group_that_comes_is_bit_equal_to_the_others_after_each_inner_step(case: Case) -> None:
    """The state of theirs is of the middle of an iteration, or of between two where they called `sync` by hand."""
    there, here = train_two(case)
    assert len(here) >= NUM_ROUNDS_TOGETHER * SYNC_EVERY
    assert here == {iteration: there[iteration] for iteration in here}


@pytest.mark.parametrize(
    "case",
    [
        Case("diloco", delay=1),
        Case("diloco", delay=1, num_failures=1),
        Case("diloco", delay=1, round_retries=0, num_failures=1),
        Case("local_sgd", round_retries=1, num_failures=2),
    ],
    ids=str,
)
def test_a_group_that_comes_has_the_schedule_of_the_others_where_its_inner_optimizer_is_its_own(case: Case) -> None:
    """It came at PREPARE, and the others made more inner steps until the round was decided."""
    there, here = train_two(case)
    assert len(here) >= NUM_ROUNDS_TOGETHER * SYNC_EVERY
    for iteration, place in here.items():
        assert (place.num_scheduled, place.rate) == (there[iteration].num_scheduled, there[iteration].rate)


def test_a_script_that_has_gone_on_hands_out_its_state_of_where_the_round_began(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The round waits for a second group, which comes for the state when the script has ended the iteration of PREPARE.

    Loaded with what the script did since, that group would be one iteration ahead. It is not told that its script loads the
    model wrong, which holds the global parameters then.
    """
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
    may_come = threading.Event()

    def run(number: int, last_round: int) -> dict[int, int]:
        """Return for each round the iteration in which it was decided."""
        script, decided = Script(lighthouse.address(), number, Case("diloco", delay=1)), {}
        try:
            with script.loop:
                script.model(torch.zeros(1, 4))  # the loop begins: the iteration is known
                while (step := script.manager.current_step()) < last_round:
                    script.iterate()
                    if number == 0 and script.iteration == 3 * SYNC_EVERY - 1:
                        may_come.set()  # the third round has begun, and its iteration is over
                        script.manager.wait_quorum()
                    if script.manager.current_step() > step:
                        decided[script.manager.current_step()] = script.iteration
            return decided
        finally:
            script.manager.shutdown()

    try:
        with ThreadPoolExecutor(3) as pool:
            stays, leaves = pool.submit(run, 0, 5), pool.submit(run, 1, 2)
            assert may_come.wait(LONG_S)
            comes = pool.submit(run, 2, 5)
            assert stays.result(LONG_S) == {number: number * SYNC_EVERY for number in range(1, 6)}
            assert leaves.result(LONG_S) == {1: SYNC_EVERY, 2: 2 * SYNC_EVERY}
            assert comes.result(LONG_S) == {4: 4 * SYNC_EVERY, 5: 5 * SYNC_EVERY}
        assert "does not return what was loaded" not in caplog.text
    finally:
        lighthouse.shutdown()


@pytest.mark.parametrize("kind", ["diloco", "local_sgd"])
def test_a_group_that_begins_slowly_gets_the_state_of_the_first_quorum_from_a_source_that_has_gone_on(
    kind: str,
) -> None:
    """The source makes its inner steps meanwhile, and asks for the quorum of its first round, which has to wait for this group.

    Both quorums are of one state. The source must not think that nobody needs it any more.
    """
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
    transports = [AsksLate(lighthouse, "group_") for _ in range(2)]

    def run(number: int) -> list[Bits]:
        script, seen = Script(lighthouse.address(), number, Case(kind), transports[number]), []
        try:
            with script.loop:
                script.model(torch.zeros(1, 4))
                while script.manager.current_step() < 2:
                    script.iterate()
                    seen.append(bits(list(script.model.parameters())))
            return seen
        finally:
            script.manager.shutdown()

    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = [pool.submit(run, number) for number in range(2)]
            assert first.result(LONG_S) == second.result(LONG_S)
        assert sum(transport.num_received for transport in transports) == 1
    finally:
        lighthouse.shutdown()


@pytest.mark.parametrize("is_early", [False, True], ids=["after the first round", "before it"])
@pytest.mark.parametrize("case", [Case("diloco"), Case("diloco", delay=1), Case("local_sgd")], ids=str)
def test_a_script_that_moves_what_the_groups_agreed_on_loads_theirs_before_its_next_round(
    case: Case, is_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Group 1 overwrites the global parameters when it has come in. The round after that begins with the others' there, too."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)

    def run(number: int) -> tuple[dict[int, Bits], int]:
        script, agreed_on = Script(lighthouse.address(), number, case), {}
        try:
            with script.loop:
                script.model(torch.zeros(1, 4))
                held = list(script.loop.state_dict()["original_parameters"][0].values())
                num_iterations = 0
                while (step := script.manager.current_step()) < 5:
                    if number == 1 and num_iterations == (1 if is_early else SYNC_EVERY):
                        with script.manager.state_dict_lock.write():
                            held[0].zero_()
                    script.iterate()
                    num_iterations += 1
                    if script.manager.current_step() > step:
                        agreed_on[step + 1] = bits(held)
            return agreed_on, script.manager.statistics().num_corrected
        finally:
            script.manager.shutdown()

    try:
        with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "torchft_ckpt"):
            first, second = [pool.submit(run, number) for number in range(2)]
            assert first.result(LONG_S) == (second.result(LONG_S)[0], 0)
            assert second.result(LONG_S)[1] == 1
        assert "group_1" in caplog.text and "original_parameters.0.0.weight differed" in caplog.text
    finally:
        lighthouse.shutdown()


@pytest.mark.parametrize(
    "case",
    [
        Case("diloco"),
        Case("diloco", delay=1),
        Case("local_sgd", num_failures=1),
        Case("local_sgd", round_retries=0, num_failures=1),
    ],
    ids=str,
)
def test_a_script_that_lacks_a_round_loads_its_count_from_one_that_has_trained_alone(case: Case) -> None:
    """Nobody was there to compare it with in the rounds before that."""
    there, here = train_two(case, CountsRounds)
    (step, rounds, num_corrected), last = there[max(here)], here[max(here)]
    assert (step, rounds, num_corrected) == (step, step, 0)
    assert last == (step, step, 1)


class Nudged(Script):
    """Counts its rounds, right but for once in group 1, when nobody has come in for long."""

    rounds = 0

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "rounds": self.rounds}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self.rounds = state["rounds"]

    def iterate(self) -> None:
        super().iterate()
        if self.loop.round_counted():
            self.rounds += 1
            if self.manager.current_step() == 6 and self.manager.replica_id().startswith("group_1"):
                self.rounds += 1


@pytest.mark.parametrize("case", [Case("diloco"), Case("diloco", delay=1), Case("local_sgd")], ids=str)
def test_votes_show_what_a_script_moves_with_the_rounds_so_a_group_that_differs_loads_it_without_any_event(
    case: Case,
) -> None:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)

    def run(number: int) -> tuple[int, int]:
        script = Nudged(lighthouse.address(), number, case)
        try:
            with script.loop:
                script.model(torch.zeros(1, 4))
                while script.manager.current_step() < 9:
                    script.iterate()
            return script.rounds, script.manager.statistics().num_corrected
        finally:
            script.manager.shutdown()

    try:
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(run, number) for number in range(2)]
            assert [end.result(LONG_S) for end in ends] == [(9, 0), (9, 1)]
    finally:
        lighthouse.shutdown()


def test_a_state_of_a_round_that_is_given_up_is_a_round_older_when_the_next_one_is_decided() -> None:
    schedule = OuterSchedule(10, sync_delay=2)
    place = RoundPlace(schedule.num_ends_left(8), retries_left=1)
    assert place.num_ends_left == 3  # the rest of the iterations 8, 9 and 10
    again = schedule.after_discard(place, round_retries=1)
    given_up = schedule.after_discard(again, round_retries=1)
    assert (again.num_ends_left, given_up.num_ends_left) == (3, 13)


@pytest.mark.parametrize(
    "schedule",
    [
        OuterSchedule(1),
        OuterSchedule(10),
        OuterSchedule(10, sync_delay=2),
        OuterSchedule(10, 2, 4),
        OuterSchedule(10, 5),
    ],
)
def test_only_places_at_which_a_group_hands_out_its_state_are_taken_from_others(schedule: OuterSchedule) -> None:
    """At PREPARE and SYNC, between two iterations, and rounds later where the others have given their rounds up."""
    handed_out = set()
    for place in [
        RoundPlace(),
        *(RoundPlace(schedule.num_ends_left(step)) for step in range(1, 11) if schedule.actions(step)),
    ]:
        waiting = place
        for _ in range(1001):
            assert schedule.complaint_about(waiting) == ""
            handed_out.add(waiting.num_ends_left)
            waiting = schedule.after_discard(waiting, round_retries=0)
    for number in range(max(handed_out) + 10):
        assert (schedule.complaint_about(RoundPlace(number)) == "") == (number in handed_out), number
    assert f"fragment_sync_delay={schedule.sync_delay}: {2**62} ends" in schedule.complaint_about(RoundPlace(2**62))


class LeftBehindOnce(FakeOuterManager):
    """Of a group that is left behind by its first round, and loads the others' state, of a place, in their next one."""

    has_live_state = True
    loop: Any = None
    num_asked = 0
    joins = False

    def __init__(self, place: RoundPlace) -> None:
        super().__init__(Hub(1), 0)
        self._place_of_others = place

    def should_commit(self) -> bool:
        self.num_asked += 1
        if self.num_asked == 1:
            self.is_behind = True
            return False
        return super().should_commit()

    def catch_up(self) -> bool:
        return False

    def start_quorum(self, **_: object) -> None:
        self.joins = self.is_behind
        if self.joins:
            self.loop._load_state(self.loop.state_dict())
            self.place, self.is_behind = self._place_of_others, False

    def is_counted(self) -> bool:
        return not self.joins


@pytest.mark.parametrize(("num_ends_left", "num_still", "warns"), [(3, 2, False), (1, 0, False), (0, 0, True)])
def test_a_group_that_comes_back_within_an_inner_step_ends_that_iteration_anyhow(
    num_ends_left: int, num_still: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An end of an iteration fewer is to be made up for, and what cannot be made right is said."""
    torch.manual_seed(0)
    model, manager = nn.Linear(4, 4), LeftBehindOnce(RoundPlace(num_ends_left))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.loop = LocalSGD(manager, model, inner, 2)
    seen = []
    with manager.loop, caplog.at_level(logging.WARNING, "torchft_ckpt.outer"):
        for _ in range(2 + num_still + 1):
            inner.zero_grad()
            model(torch.ones(1, 4)).sub(1.0).square().mean().backward()
            inner.step()
            seen.append(bits(list(model.parameters())))
    assert manager.num_asked == 2
    assert [seen[1] == after for after in seen[2:]] == [True] * num_still + [False]
    assert ("is one step ahead" in caplog.text) == warns


class Counts(torch.optim.Optimizer):
    """Counts its steps among its settings, also those without a gradient, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "k": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_group_that_finds_itself_behind_in_a_round_has_the_schedule_of_the_others_after_it(delay: int) -> None:
    """Its state is torn in the middle of a round, so it loads that of the other at the vote. Nobody has left."""
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)

    def run(number: int) -> tuple[int, int, Bits]:
        torch.manual_seed(number)
        model = nn.Linear(4, 4)
        inner = Counts(model.parameters())
        schedule = LambdaLR(inner, lambda step: 1 / (1 + step))
        states: dict[str, Any] = {"model": model, "inner": inner, "schedule": schedule}
        manager = manager_of(
            lighthouse,
            lambda state: [states[name].load_state_dict(state[name]) for name in states] and None,
            lambda: {name: value.state_dict() for name, value in states.items()},
            name=f"g{number}",
            use_async_quorum=False,
        )
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        loop = DiLoCo(manager, [model], inner, outer, SYNC_EVERY, fragment_sync_delay=delay)
        generator = torch.Generator().manual_seed(0)
        is_torn = False
        with loop:
            while manager.current_step() < 7:
                inner.zero_grad()
                model(torch.randn(8, 4, generator=generator)).square().mean().backward()
                inner.step()
                schedule.step()
                is_within = loop._inner_step == 1 and manager.num_participants() == 2
                if number == 1 and not is_torn and manager.current_step() == 3 and is_within:
                    is_torn = True
                    manager.report_torn_state()
        assert is_torn == (number == 1)
        end = (
            schedule.last_epoch,
            inner.param_groups[0]["k"],
            bits([loop.state_dict()["original_parameters"][0]["weight"]]),
        )
        manager.shutdown()
        return end

    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(run, number) for number in range(2)]
        assert second.result(LONG_S) == first.result(LONG_S)
    lighthouse.shutdown()
