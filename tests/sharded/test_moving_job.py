"""A job moves on from group to group, each in another layout, and no bit of it changes on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.groups import Job, LighthouseProcess, Rank, running_job
from support.moving_trainer import Model, bits, gradients, make_optimizer
from support.waiting import wait_until

SEED = 5
STEPS = 3

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def plain_run(steps: int) -> list[list[int]]:
    """The bits after some steps of a loop in one process."""
    model = Model(SEED)
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        for parameter, gradient in zip(model.parameters(), gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return bits(model, optimizer)


def start(job: Job, number: int, layout: str, ranks: int, **options: object) -> list[Rank]:
    """Start the group that takes over from the one before; its own weights are others."""
    return job.start(
        f"group_{number}",
        ranks=ranks,
        layout=layout,
        until=(number + 1) * STEPS,
        seed=SEED + 100 * number,
        take_over=number > 0,
        **options,
    )


MOVES = [
    ("plain", 1),
    ("fsdp", 4),
    ("fsdp", 3),  # uneven shards
    ("fsdp+tp", 4),
    ("fsdp", 4),
    ("fsdp", 1),
    ("fsdp+tp", 4),
    ("plain", 1),
]


def test_each_group_takes_over_the_bits_of_the_one_before_and_goes_on(tmp_path: Path) -> None:
    """From each kind of layout to each other kind, but for growing under FSDP alone, which is in the next test."""
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, trainer="moving_trainer.py") as job:
        before: list[Rank] = []
        for number, (layout, ranks) in enumerate(MOVES):
            group = start(job, number, layout, ranks, hand_over=number < len(MOVES) - 1)
            expected = plain_run(number * STEPS)
            if number:
                took = [rank.wait_for_event("took") for rank in group]
                assert [event["is_held"] for event in took] == [True] * ranks
                assert [event["step"] for event in took] == [number * STEPS] * ranks
                assert [event["bits"] == expected for event in took] == [True] * ranks
                assert [rank.wait_for_event("handed")["is_taken"] for rank in before] == [True] * len(before)
                assert [rank.end() for rank in before] == [0] * len(before)
            there = [rank.wait_for_event("there") for rank in group]
            assert [event["bits"] == plain_run((number + 1) * STEPS) for event in there] == [True] * ranks
            before = group
        assert [rank.end() for rank in before] == [0] * len(before)


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 4), ("plain", 1)])
def test_a_group_that_lost_a_rank_comes_back_in_another_layout_and_takes_over(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    """A machine is gone for good, say. The group that is left trains on meanwhile, and then makes way."""
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, trainer="moving_trainer.py", pause_s=0.02) as job:
        stays = job.start("stays", ranks=2, layout="fsdp", seed=SEED, hand_over=True)
        stays[0].wait_for_event("step")
        leaves = job.start("leaves", ranks=2, layout="fsdp", seed=SEED + 1)
        for rank in (*stays, *leaves):
            rank.wait_for(lambda event: event["event"] == "step" and event["participants"] == 2)
        leaves[1].kill()
        assert leaves[0].end() != 0
        end = job.stop_soon(30)
        assert [rank.wait_for_event("there")["bits"] == plain_run(end) for rank in stays] == [True, True]
        # Only now: a state that it gets while the others train on is of an earlier step.
        back = job.start("leaves", ranks=ranks, layout=layout, until=end + 10, seed=SEED + 2, take_over=True)
        took = [rank.wait_for_event("took") for rank in back]
        assert [(event["is_held"], event["step"]) for event in took] == [(True, end)] * ranks
        assert [event["bits"] == plain_run(end) for event in took] == [True] * ranks
        assert [rank.wait_for_event("handed")["is_taken"] for rank in stays] == [True, True]
        assert [rank.wait_for_event("there")["bits"] == plain_run(end + 10) for rank in back] == [True] * ranks
        assert [rank.end() for rank in (*stays, *back)] == [0] * (2 + ranks)


def test_a_group_of_another_layout_waits_while_the_others_train_and_costs_them_nothing(tmp_path: Path) -> None:
    """Their collectives would be of other sizes: Gloo ends the processes of both over that."""
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, trainer="moving_trainer.py", pause_s=0.02) as job:
        trains = job.start("trains", ranks=2, layout="fsdp", seed=SEED)
        trains[0].wait_for_event("step")
        waits = job.start("waits", layout="plain", until=10, seed=SEED + 1)
        wait_until(lambda: "cannot train with" in waits[0].log(), "it is told that it waits")
        since = trains[0].steps()[-1]["step"]
        trains[0].wait_for(lambda event: event["event"] == "step" and event["step"] >= since + 40)
        end = job.stop_soon(20)
        there = [rank.wait_for_event("there") for rank in trains]
        steps = [event for rank in trains for event in rank.steps()]
        assert {event["participants"] for event in steps} == {1}
        assert waits[0].steps() == []
        assert [event["bits"] == plain_run(end) for event in there] == [True, True]
        waits[0].kill()
        assert [rank.end() for rank in trains] == [0, 0]


def test_the_plain_loop_is_exact() -> None:
    """Whatever the order of the sums: gradients times up to four ranks, halves and quarters of them lose no bit."""
    for step in range(10):
        for gradient in gradients(step):
            for ranks in (1, 2, 3, 4):
                assert torch.equal(gradient / ranks * ranks, gradient)
