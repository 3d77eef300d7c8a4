"""Outer loops with real processes, sockets and signals: what one group suffers costs the others nothing, or one round."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.groups import Job, LighthouseProcess, Rank, all_reach, running_job

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def outer_job(directory: Path, **options: Any) -> AbstractContextManager[Job]:
    return running_job(directory, trainer="outer_trainer.py", **options)


def start_three(job: Job, victim: int | None = None, **of_victim: Any) -> list[Rank]:
    return [job.start(f"group_{i}", **(of_victim if i == victim else {}))[0] for i in range(3)]


def assert_equal_ends(reports: list[dict[str, Any]], num_groups: int = 3) -> None:
    assert len(reports) == num_groups
    assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports


def assert_equal_rounds(groups: list[Rank]) -> None:
    """All groups that committed a round hold the same bits after it."""
    by_step: dict[int, set[str]] = {}
    for group in groups:
        for event in group.steps():
            if event["committed"]:
                by_step.setdefault(event["step"], set()).add(event["digest"])
    different = [step for step, digests in by_step.items() if len(digests) > 1]
    assert not different, f"replicas differ after rounds {different}"


@pytest.mark.parametrize("kind", ["diloco", "local_sgd"])
def test_survivors_of_kills_at_any_point_lose_no_inner_work_and_all_end_equal(tmp_path: Path, kind: str) -> None:
    with outer_job(tmp_path, kind=kind) as job:
        survivors = [job.start(f"group_{i}")[0] for i in (0, 2)]
        everybody = list(survivors)
        for at in ("inner", "prepare", "allreduce", "vote"):
            victim = job.start("group_1", die={"groups": 3, "at": at})[0]
            everybody.append(victim)
            assert victim.end() == -signal.SIGKILL
            step = max(survivor.steps()[-1]["step"] for survivor in survivors)
            all_reach(survivors, step + 3)
        everybody.append(job.start("group_1")[0])
        everybody[-1].wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish(ahead=6)
    assert_equal_ends(reports)
    assert_equal_rounds(everybody)
    for survivor in survivors:
        assert sum(step["restores"] for step in survivor.steps()) == 0
        assert sum(step["discarded"] for step in survivor.steps()) <= 4


@pytest.mark.parametrize("asks", [True, False], ids=["asks the loop", "sees current_step move"])
def test_an_average_that_a_script_moves_with_the_rounds_is_equal_after_kills_however_it_sees_them(
    tmp_path: Path, asks: bool
) -> None:
    with outer_job(tmp_path, average="asks" if asks else "moved") as job:
        groups = start_three(job, victim=1, die={"groups": 3, "at": "inner"})
        assert groups[1].end() == -signal.SIGKILL
        again = job.start("group_1", die={"groups": 3, "at": "vote"})[0]
        assert again.end() == -signal.SIGKILL
        last = job.start("group_1")[0]
        last.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish(ahead=4)
    assert_equal_ends(reports)
    assert_equal_rounds([*groups, again, last])
    assert last.wait_for_event("done")["corrected"] == (0 if asks else 1)
    assert not asks or sum(report["corrected"] for report in reports) == 0


def test_what_a_script_moves_with_the_rounds_is_compared_as_before_when_the_lighthouse_was_started_again(
    tmp_path: Path,
) -> None:
    lighthouse = LighthouseProcess()
    with outer_job(tmp_path, average="moved", lighthouse=lighthouse) as job:
        groups = job.start_groups(3, until=3)
        lighthouse.kill()
        lighthouse.restart()
        step = max(group.steps()[-1]["step"] for group in groups)
        all_reach(groups, step + 2)
        groups[1].kill()
        again = job.start("group_1")[0]
        again.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish(ahead=4)
    assert_equal_ends(reports)
    assert_equal_rounds([*groups, again])
    assert again.wait_for_event("done")["corrected"] == 1
    # One that started late lacks the round that it came in with, too.
    num_late = sum(group.steps()[0]["step"] > 1 for group in (groups[0], groups[2]))
    assert sum(report["corrected"] for report in reports) == 1 + num_late


def test_a_discarded_round_takes_its_fragment_back_in_all_survivors_alike(tmp_path: Path) -> None:
    with outer_job(tmp_path, round_retries=0) as job:
        groups = start_three(job, victim=1, die={"groups": 3, "at": "allreduce"})
        assert groups[1].end() == -signal.SIGKILL
        survivors = [groups[0], groups[2]]
        step = max(survivor.steps()[-1]["step"] for survivor in survivors)
        all_reach(survivors, step + 3)
        reports = job.finish(ahead=4)
    assert_equal_ends(reports, num_groups=2)
    assert_equal_rounds(groups)
    for survivor in survivors:
        assert sum(step["restores"] for step in survivor.steps()) == 1


def test_a_joiner_adds_nothing_to_the_round_that_it_joins_in_and_is_equal_after_it_though_rounds_are_quantised(
    tmp_path: Path,
) -> None:
    with outer_job(tmp_path, quantize="int8") as job:
        groups = job.start_groups(2, until=4)
        joiner = job.start("group_2")[0]
        entered = joiner.wait_for_event("entered")
        first = joiner.wait_for(lambda e: e["event"] == "step" and e["committed"])
        reports = job.finish(ahead=4)
    assert_equal_ends(reports)
    assert_equal_rounds([*groups, joiner])
    assert first["step"] == entered["step"] + 1
    assert first["contributed"]
    participants = {event["step"]: event["participants"] for event in groups[0].steps()}
    assert participants[entered["step"]] == 2, "it was counted in a round that it did not train in"
    assert participants[first["step"]] == 3
    assert sum(event["discarded"] for group in groups for event in group.steps()) == 0


def test_a_transfer_that_takes_many_rounds_holds_up_nobody_and_ends_in_the_job(tmp_path: Path) -> None:
    with outer_job(tmp_path, pause_s=0.03) as job:
        groups = job.start_groups(2, until=4)
        control = job.control("group_2")
        control.mkdir()
        (control / "slow").write_text("4.0")
        joiner = job.start("group_2")[0]
        begun = joiner.wait_for_event("fetching")["t"]
        time.sleep(4.0)  # so long it cannot have the state; how many rounds the others make is what is measured
        (control / "slow").unlink()
        joiner.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish(ahead=4)
    assert_equal_ends(reports)
    for group in groups:
        rounds = [event for event in group.steps(since=begun) if event["t"] < begun + 4.0]
        assert len(rounds) >= 4, "of some 30 it made hardly any: it waited"
        assert sum(event["discarded"] for event in group.steps()) == 0


def test_a_group_that_is_merely_slow_is_waited_for(tmp_path: Path) -> None:
    with outer_job(tmp_path) as job:
        groups = [job.start(f"group_{i}", pause_s=0.2 if i == 2 else 0.002)[0] for i in range(3)]
        groups[2].wait_for(lambda e: e["event"] == "step" and e["contributed"] and e["participants"] == 3)
        since = time.monotonic()
        groups[2].wait_for_step(groups[2].steps()[-1]["step"] + 2)
        reports = job.finish(ahead=2)
    assert_equal_ends(reports)
    assert {event["participants"] for group in groups for event in group.steps(since)} == {3}


def test_a_group_stopped_between_two_rounds_is_missed_by_nobody_and_comes_back(tmp_path: Path) -> None:
    with outer_job(tmp_path, lighthouse=LighthouseProcess(heartbeat_timeout_ms=5000), pause_s=0.03) as job:
        groups = job.start_groups(3, until=3)
        groups[1].signal(signal.SIGSTOP)
        step = groups[0].steps()[-1]["step"]
        all_reach([groups[0], groups[2]], step + 6)
        groups[1].signal(signal.SIGCONT)
        step = groups[0].steps()[-1]["step"]
        groups[1].wait_for(
            lambda e: e["event"] == "step" and e["committed"] and e["contributed"] and e["step"] > step + 1
        )
        reports = job.finish(ahead=6)
    assert_equal_ends(reports)
    assert_equal_rounds(groups)
    for survivor in (groups[0], groups[2]):
        assert sum(event["restores"] for event in survivor.steps()) == 0


def test_all_ranks_of_a_group_come_in_with_one_state(tmp_path: Path) -> None:
    with outer_job(tmp_path) as job:
        first = [job.start(f"group_{i}", ranks=2) for i in range(2)]
        for ranks in first:
            all_reach(ranks, 3)
        first[1][1].kill()
        first[1][0].end()
        step = first[0][0].steps()[-1]["step"]
        again = job.start("group_1", ranks=2)
        for rank in again:
            rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        first[0][0].wait_for_step(step + 1)
        reports = job.finish(ahead=6)
    by_rank = [{(r["step"], r["digest"]) for r in reports[rank::2]} for rank in range(2)]
    assert [len(found) for found in by_rank] == [1, 1]
    assert_equal_rounds([first[0][0], again[0]])
    assert_equal_rounds([first[0][1], again[1]])


def test_a_rank_whose_first_fetch_fails_is_waited_for_by_its_group_before_that_begins(tmp_path: Path) -> None:
    with outer_job(tmp_path) as job:
        groups = [job.start("group_0", ranks=2), job.start("group_1", ranks=2, first_fetch_fails_at_rank=1)]
        for ranks in groups:
            all_reach(ranks, 3)
        reports = job.finish(ahead=4)
    by_rank = [{(report["step"], report["digest"]) for report in reports[rank::2]} for rank in range(2)]
    assert [len(found) for found in by_rank] == [1, 1]
    assert sum(event["restores"] for ranks in groups for rank in ranks for event in rank.steps()) == 0
