"""Collectives between the decision on a step and the next `start_quorum`: a loss or a metric, averaged for the log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.replicas import Replica, lighthouse_of, shutdown, together
from support.waiting import wait_until

from torchft_ckpt import Optimizer
from torchft_ckpt.errors import CollectiveFailedError, ConfigError


@pytest.fixture
def pair() -> Iterator[list[Replica]]:
    server = lighthouse_of(2)
    with ThreadPoolExecutor(2) as pool:
        replicas = list(pool.map(lambda name: Replica(server, name, min_replica_size=2), ["a", "b"]))
    yield replicas
    shutdown(*replicas)
    server.shutdown()


def place(replica: Replica) -> float:
    return 0.0 if replica.manager.replica_id().startswith("a") else 1.0


def test_a_metric_averaged_after_each_step_has_the_value_of_all_groups_and_costs_no_step(pair: list[Replica]) -> None:
    def train(replica: Replica) -> list[tuple[bool, bool, float]]:
        seen = []
        for _ in range(4):
            committed = replica.step()
            loss = torch.tensor([place(replica)])
            seen.append((committed, replica.manager.allreduce(loss).wait(), loss.item()))
        return seen

    assert together(pair, train) == [[(True, True, 0.5)] * 4] * 2
    assert [replica.manager.statistics().quorum_id for replica in pair] == [1, 1]


def test_what_is_in_flight_when_the_next_step_begins_ends_first(pair: list[Replica]) -> None:
    def train(replica: Replica) -> list[tuple[bool, float]]:
        seen = []
        for _ in range(3):
            committed = replica.step()
            loss = torch.tensor([place(replica)])
            work = replica.manager.allreduce(loss)
            replica.optimizer.zero_grad()
            seen.append((committed and work.wait(), loss.item()))
        return seen

    assert together(pair, train) == [[(True, 0.5)] * 3] * 2


def test_a_metric_of_a_discarded_step_is_right_or_says_that_it_is_not(pair: list[Replica]) -> None:
    together(pair, Replica.step)

    def lose(replica: Replica) -> tuple[bool, bool]:
        replica.optimizer.zero_grad()
        if place(replica) == 1.0:
            replica.manager.report_error(ArithmeticError("the loss is not a number"))
        committed = replica.manager.should_commit()
        loss = torch.tensor([place(replica)])
        is_good = replica.manager.allreduce(loss).wait()
        return committed, not is_good or loss.item() == 0.5

    assert together(pair, lose) == [(False, True)] * 2
    assert together(pair, Replica.step) == [True, True]


@pytest.mark.slow
def test_a_group_that_goes_on_without_it_ends_it_for_the_others_and_the_next_step_counts(pair: list[Replica]) -> None:
    a, _ = pair
    together(pair, Replica.step)

    def log_and_go_on(replica: Replica) -> tuple[bool, str]:
        work = replica.manager.allreduce(torch.ones(1)) if replica is a else None
        why = str(replica.manager.errored()) if work is not None and not work.wait() else ""
        return replica.step(), why

    (a_committed, why), (b_committed, _) = together(pair, log_and_go_on)
    assert (a_committed, b_committed) == (True, True)
    assert "has ended the step after" in why
    assert [replica.manager.statistics().num_discarded for replica in pair] == [0, 0]


def test_a_group_that_leaves_ends_it_for_the_others_and_costs_no_step(pair: list[Replica]) -> None:
    a, b = pair
    together(pair, Replica.step)
    leaves = threading.Timer(0.2, b.manager.shutdown)
    leaves.start()
    work = a.manager.allreduce(torch.ones(1))
    assert work.wait() is False
    # The lost connection may be noticed before the lighthouse says who left.
    wait_until(lambda: b.manager.replica_id() in str(a.manager.errored()))
    assert a.manager.statistics().num_discarded == 0
    leaves.join()


def test_an_error_that_names_nobody_gives_way_to_the_word_of_who_left(pair: list[Replica]) -> None:
    a, b = pair
    together(pair, Replica.step)
    b.manager._pg.abort()
    assert a.manager.allreduce(torch.ones(1)).wait() is False
    error = a.manager.errored()
    assert error is not None and isinstance(error.original_exception, CollectiveFailedError)
    b.manager.shutdown()
    wait_until(lambda: b.manager.replica_id() in str(a.manager.errored()))
    named = a.manager.errored()
    assert named is not None and named.original_exception.__cause__ is error.original_exception


def test_a_decision_that_is_asked_for_again_is_the_same_and_counts_nothing(pair: list[Replica]) -> None:
    def twice(replica: Replica) -> tuple[bool, bool, bool]:
        replica.optimizer.zero_grad()
        return tuple(replica.manager.should_commit() for _ in range(3))  # type: ignore[return-value]

    assert together(pair, twice) == [(True, True, True)] * 2
    assert [(r.manager.current_step(), r.manager.statistics().num_committed) for r in pair] == [(1, 1), (1, 1)]
    assert together(pair, Replica.step) == [True, True]


def test_gradients_that_no_vote_is_about_are_refused_before_a_second_optimizer_steps_on_them(
    pair: list[Replica],
) -> None:
    """Both clear, the first computes and steps, and only then the second computes: its averages come after the decision."""

    def train(replica: Replica) -> str:
        second = Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))
        replica.optimizer.zero_grad()
        second.zero_grad()
        for optimizer in (replica.optimizer, second):
            replica.manager.allreduce(torch.ones(3)).wait()
            if optimizer is second:
                with pytest.raises(
                    ConfigError,
                    match=r"do all backward passes of a step before the first.*clears all of them once before it begins",
                ):
                    optimizer.step()
            else:
                optimizer.step()
        return str(replica.manager.view().torn)

    assert together(pair, train) == ["True", "True"]


def test_what_was_never_started_says_so_also_when_the_next_step_has_begun(pair: list[Replica]) -> None:
    a, _ = pair
    together(pair, Replica.step)
    a.manager._client.note_collective_error(ConnectionError("a peer is gone"))
    work = a.manager.allreduce(torch.ones(1))
    together(pair, lambda replica: replica.optimizer.zero_grad())
    assert work.wait() is False


def test_what_was_averaged_is_judged_as_it_was_when_the_next_step_began(pair: list[Replica]) -> None:
    together(pair, Replica.step)

    def average_and_go_on(replica: Replica) -> bool:
        work = replica.manager.allreduce(torch.ones(1))
        replica.optimizer.zero_grad()
        replica.manager.report_error(ArithmeticError("a bad batch"))
        return work.wait()

    assert together(pair, average_and_go_on) == [True, True]


@pytest.mark.slow
def test_groups_have_the_part_in_it_that_they_had_in_the_step_whatever_became_of_their_state(
    pair: list[Replica],
) -> None:
    a, _ = pair
    together(pair, Replica.step)

    def average(replica: Replica) -> tuple[bool, float]:
        if replica is a:
            replica.manager.report_torn_state()
        value = torch.tensor([4.0])
        return replica.manager.allreduce(value).wait(), value.item()

    assert together(pair, average) == [(True, 4.0)] * 2


def test_a_loss_between_two_optimizers_that_are_cleared_in_turn_never_steps_on_a_discarded_steps_gradients(
    pair: list[Replica],
) -> None:
    def train(replica: Replica) -> list[str]:
        both = [replica.optimizer, Optimizer(replica.manager, torch.optim.SGD(replica.model.parameters(), lr=0.1))]
        said = []
        for optimizer in both:
            optimizer.zero_grad()
        for index in range(2):
            if index == 0 and place(replica) == 1.0:
                replica.manager.report_error(ArithmeticError("a bad batch"))
            for optimizer in both:
                before = replica.bits()
                try:
                    optimizer.step()
                except ConfigError as error:
                    said.append(str(error))
                assert index or replica.bits() == before, "the step was discarded"
                optimizer.zero_grad()
                if index == 0:
                    replica.manager.allreduce(torch.ones(1)).wait()
        return said

    assert together(pair, train) == [[], []]
