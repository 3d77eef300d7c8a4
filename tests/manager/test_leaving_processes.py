"""Replica groups that are preempted: real processes get SIGTERM, save and go; the others discard nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.groups import Job, LighthouseProcess, Rank, all_reach, running_job
from support.thoroughness import by_default
from support.waiting import wait_until

from torchft_ckpt import checkpoints_in
from torchft_ckpt.core.coordination.patience import PENDING_NOTICE_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]
TRAINER = {"trainer": "leaving_trainer.py", "pause_s": 0.03, "min_replica_size": 1}
NAMES = ("group_0", "group_1", "group_2")
WITHIN_S = 180.0
"""A busy machine may need so long."""


@contextmanager
def job_of(directory: Path, **options: Any) -> Iterator[tuple[Job, LighthouseProcess]]:
    """A job whose lighthouse has patience with a busy machine."""
    lighthouse = LighthouseProcess(min_replicas=1, heartbeat_timeout_ms=20_000)
    with running_job(directory / "job", lighthouse=lighthouse, **{**TRAINER, **options}) as job:
        yield job, lighthouse


def start_groups(job: Job, names: Sequence[str] = NAMES, ranks: int = 2, **options: Any) -> dict[str, list[Rank]]:
    groups = {name: job.start(name, ranks=ranks, **options) for name in names}
    for rank in [rank for started in groups.values() for rank in started]:
        in_step_of(len(names), rank)
    return groups


def in_step_of(num_groups: int, rank: Rank) -> None:
    """Wait until a rank has made two steps with all groups: before the second one a group that came in cannot save alone."""
    for _ in range(2):
        rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == num_groups, WITHIN_S)


def staying(groups: dict[str, list[Rank]], *leaving: str) -> list[Rank]:
    return [rank for name, ranks in groups.items() if name not in leaving for rank in ranks]


def left_at(ranks: Sequence[Rank]) -> int:
    """Return the step after which all ranks of a group left, each of them with status 0."""
    for rank in ranks:
        assert rank.end(WITHIN_S) == 0, f"{rank.name} ended with {rank.process.returncode}\n{rank.log()}"
    reports = [next(e for e in rank.events if e["event"] == "left") for rank in ranks]
    assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports
    return int(reports[0]["step"])


def assert_lost_nothing(ranks: Sequence[Rank], since: float, ahead: int = 3) -> None:
    """See that groups go on, and have discarded nothing."""
    newest = max(rank.steps()[-1]["step"] for rank in ranks)
    all_reach(ranks, newest + ahead, WITHIN_S)
    lost = [(rank.name, step) for rank in ranks for step in rank.steps(since) if not step["committed"]]
    assert not lost, f"{lost}\n{ranks[0].log()}"


def test_groups_that_are_preempted_at_any_moment_save_and_go_and_the_others_lose_nothing(tmp_path: Path) -> None:
    """A signal may come to one rank, to both, or to both at different moments; and again while the group leaves."""
    storage = tmp_path / "storage"
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    with job_of(tmp_path, storage=str(storage), logs_loss=True) as (job, _):
        groups = start_groups(job)
        for _ in range(by_default(2, thorough=20)):
            name = chance.choice(NAMES)
            others = staying(groups, name)
            time.sleep(chance.uniform(0.0, 0.5))
            asked_at = time.monotonic()
            for rank in chance.choice([groups[name][:1], groups[name][1:], groups[name], groups[name][::-1]]):
                rank.signal(signal.SIGTERM)
                time.sleep(chance.choice([0.0, 0.0, 0.02, 0.1]))
            if chance.random() < 0.3 and groups[name][0].process.poll() is None:
                groups[name][0].process.send_signal(signal.SIGTERM)
            step = left_at(groups[name])
            print(f"{name} left at step {step} within {time.monotonic() - asked_at:.2f} s")
            assert_lost_nothing(others, asked_at)
            assert step in checkpoints_in(storage), groups[name][0].log()
            groups[name] = job.start(name, ranks=2)
            for rank in groups[name]:
                in_step_of(len(NAMES), rank)
        ends = job.finish()
    assert len({(end["step"], end["digest"]) for end in ends}) == 1, ends


@pytest.mark.parametrize("where", ["save", "loop"])
def test_after_the_deadline_a_group_that_hangs_goes_as_it_is(tmp_path: Path, where: str) -> None:
    """The others wait for a loop that hangs, as for any slow group, and not for a save."""
    with job_of(tmp_path, hangs_in=where, deadline_s=6.0) as (job, _):
        groups = start_groups(job, NAMES[:2])
        if where == "loop":
            newest = max(rank.steps()[-1]["step"] for rank in groups["group_0"])
            draft = job.control("group_0") / "hang.draft"
            draft.write_text(str(newest + 60))  # both ranks see it by then, and hang at one step
            draft.rename(draft.with_name("hang"))
            for rank in groups["group_0"]:
                rank.wait_for_event("hanging", WITHIN_S)
        asked_at = time.monotonic()
        groups["group_0"][0].signal(signal.SIGTERM)
        if where == "save":
            groups["group_0"][0].wait_for_event("saving")
            assert_lost_nothing(groups["group_1"], asked_at)
        for rank in groups["group_0"]:
            assert rank.end(WITHIN_S) == 0, rank.log()
        assert time.monotonic() - asked_at >= 6.0
        assert_lost_nothing(groups["group_1"], asked_at)


def test_a_rank_whose_process_group_gets_the_signal_keeps_the_worker_that_loads_its_data(tmp_path: Path) -> None:
    """As torchrun sends it. The worker is in a process group of its own, and does not keep the rank from its end."""
    with job_of(tmp_path, pause_s=0.1, has_worker=True) as (job, _):
        groups = start_groups(job, NAMES[:2], ranks=1)
        asked_at = time.monotonic()
        os.killpg(groups["group_0"][0].process.pid, signal.SIGTERM)
        left_at(groups["group_0"])
        assert_lost_nothing(groups["group_1"], asked_at)


def test_a_job_that_is_ended_with_its_lighthouse_saves_what_it_has_and_the_lighthouse_lets_it_leave_first(
    tmp_path: Path,
) -> None:
    """As by Slurm at the end of its time. Groups that leave after one step share the save."""
    storage = tmp_path / "storage"
    with job_of(tmp_path, storage=str(storage), pause_s=0.3) as (job, lighthouse):
        groups = start_groups(job)
        asked_at = time.monotonic()
        lighthouse.process.terminate()
        for rank in staying(groups):
            rank.signal(signal.SIGTERM)
        left = [left_at(ranks) for ranks in groups.values()]
        went_at = max(e["t"] for rank in staying(groups) for e in rank.events if e["event"] == "left")
        assert lighthouse.process.wait(WITHIN_S) == 0
        assert set(left) <= set(checkpoints_in(storage)), left
        num_saves = sum(1 for _ in storage.glob("step-*"))
        # Whoever has waited for the others for a second goes, and saves, alone.
        is_together = len(set(left)) == 1 and went_at < asked_at + PENDING_NOTICE_S
        assert num_saves == 1 or not is_together, "those that leave together save once"


@pytest.mark.parametrize("inner_steps", [8, 80], ids=["after its round", "between two inner steps"])
def test_an_outer_loop_leaves(tmp_path: Path, inner_steps: int) -> None:
    storage = tmp_path / "storage"
    with job_of(tmp_path, storage=str(storage), outer=inner_steps) as (job, _):
        groups = start_groups(job, NAMES[:2])
        asked_at = time.monotonic()
        groups["group_0"][1].signal(signal.SIGTERM)
        assert left_at(groups["group_0"]) in checkpoints_in(storage)
        assert_lost_nothing(groups["group_1"], asked_at, ahead=1)


def test_a_group_that_leaves_in_the_middle_of_a_save_of_all_writes_its_share_too(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    with job_of(tmp_path, storage=str(storage), save_every=2) as (job, _):
        groups = start_groups(job, NAMES[:2])
        asked_at = time.monotonic()
        groups["group_0"][0].signal(signal.SIGTERM)
        step = left_at(groups["group_0"])
        assert_lost_nothing(groups["group_1"], asked_at, ahead=4)
        wait_until(lambda: step - step % 2 in checkpoints_in(storage), "the save of both groups is whole")
        assert step in checkpoints_in(storage)
