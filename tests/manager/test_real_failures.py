"""Promise 1 with real processes, real sockets and real signals: what one group suffers costs the others one step at most."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.groups import LighthouseProcess, all_reach, discards_in_a_row, longest_gap_s, running_job

pytestmark = [pytest.mark.processes, pytest.mark.slow]
PAUSE_S = 0.02
"""Stands for a forward pass: groups that go on without one use all cores while something else is waited for."""
HEARTBEAT_S = 600
FAR_BELOW_S = 120.0
"""For a death that must be known from the connection: below HEARTBEAT_S, and below the time that a forked child lives."""


def hasty() -> LighthouseProcess:
    """Return a lighthouse that is to find out soon who is stopped."""
    return LighthouseProcess(heartbeat_timeout_ms=5000)


def assert_equal_ends(reports: list[dict]) -> None:
    assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports


def test_survivors_of_kills_discard_one_step_each_and_all_end_equal(tmp_path: Path) -> None:
    with running_job(tmp_path, pause_s=PAUSE_S) as job:
        groups = job.start_groups(3, until=5)
        discards = []
        for victim in (2, 0):
            survivors = [group for i, group in enumerate(groups) if i != victim]
            killed_at = time.monotonic()
            groups[victim].kill()
            step = max(group.steps()[-1]["step"] for group in survivors)
            for group in survivors:
                group.wait_for_step(step + 3)
                discards.append(sum(not s["committed"] for s in group.steps(since=killed_at)))
            groups[victim] = job.start(f"group_{victim}")[0]
            groups[victim].wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish()
    assert max(discards) <= 1, discards
    assert len(reports) == 3
    assert_equal_ends(reports)


def test_a_stopped_group_is_dropped_and_heals_when_it_wakes(tmp_path: Path) -> None:
    """It averages a loss between two steps, too. No collective ends by its timeout here: whoever waits in one is told."""
    with running_job(tmp_path, lighthouse=hasty(), pause_s=PAUSE_S, logs_loss=True, timeout_s=3600) as job:
        groups = job.start_groups(3, until=5)
        stopped_at = time.monotonic()
        groups[1].signal(signal.SIGSTOP)
        step = groups[0].steps()[-1]["step"]
        for survivor in (groups[0], groups[2]):
            survivor.wait_for_step(step + 10)
            assert discards_in_a_row(survivor.steps(since=stopped_at)) <= 1
            assert survivor.steps()[-1]["participants"] == 2
        healed_before = groups[1].steps()[-1]["healed"]
        groups[1].signal(signal.SIGCONT)
        groups[1].wait_for(lambda e: e["event"] == "step" and e["committed"] and e["healed"] > healed_before)
        logged = [step["logged"] for group in groups for step in group.steps() if step["committed"]]
        assert set(logged) <= {1.0, -1.0}, "the average over those who contribute, or none"
        assert logged.count(1.0) > len(logged) / 2
        assert_equal_ends(job.finish())


def test_a_restarted_lighthouse_costs_nobody_their_life_and_quorum_ids_rise(tmp_path: Path) -> None:
    lighthouse = LighthouseProcess()
    with running_job(tmp_path, lighthouse=lighthouse, pause_s=0.05) as job:
        groups = job.start_groups(3, until=5)
        lighthouse.kill()
        before = max(group.steps()[-1]["quorum"] for group in groups)
        step = max(group.steps()[-1]["step"] for group in groups)
        lighthouse.restart()
        for group in groups:
            after = group.wait_for_step(step + 5)
            assert after["quorum"] > before
            assert after["participants"] == 3
        assert_equal_ends(job.finish())


def test_survivors_wait_for_a_slow_newcomer_no_longer_than_the_limit(tmp_path: Path) -> None:
    transfer_s, limit_s = 60, 3.0
    with running_job(tmp_path, pause_s=5 * PAUSE_S, join_stall_limit_s=limit_s) as job:
        groups = job.start_groups(2, until=5)
        slow = job.control("group_2")
        slow.mkdir()
        (slow / "slow").write_text(str(transfer_s))
        joiner = job.start("group_2")[0]
        fetch = joiner.wait_for_event("fetching")
        step = groups[0].steps()[-1]["step"]
        for group in groups:
            group.wait_for_step(step + 5)
            steps = group.steps(since=fetch["t"])
            assert all(s["committed"] for s in steps)
            assert longest_gap_s(steps) < transfer_s / 2, "its transfer was waited for"
        (slow / "slow").unlink()
        joiner.kill()  # or it would sleep on
        joiner = job.start("group_2")[0]
        # The first one has used up the limit: it takes a while until the others may wait for so long as this one needs.
        joiner.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"], timeout_s=180)
        assert_equal_ends(job.finish())


def test_a_joiner_whose_fetches_fail_costs_the_others_nothing_and_one_step_if_it_dies_while_it_fetches(
    tmp_path: Path,
) -> None:
    with running_job(tmp_path, pause_s=PAUSE_S) as job:
        groups = job.start_groups(2, until=5)
        control = job.control("group_2")
        control.mkdir()
        (control / "fail").touch()
        joiner = job.start("group_2")[0]
        for _ in range(3):
            tried = joiner.wait_for_event("fetching")
        for group in groups:
            group.wait_for_step(tried["step"] + 3)
            assert all(s["committed"] for s in group.steps(since=tried["t"]))
        joiner.kill()
        (control / "fail").unlink()
        (control / "slow").write_text("60")
        joiner = job.start("group_2")[0]
        joiner.wait_for_event("fetching")
        killed_at = time.monotonic()
        joiner.kill()
        step = groups[0].steps()[-1]["step"]
        for group in groups:
            group.wait_for_step(step + 5)
            assert sum(not s["committed"] for s in group.steps(since=killed_at)) <= 1
        (control / "slow").unlink()
        job.start("group_2")[0].wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        assert_equal_ends(job.finish())


def test_a_replica_that_abandons_steps_while_it_heals_is_still_healing_afterwards(tmp_path: Path) -> None:
    with running_job(tmp_path, pause_s=PAUSE_S) as job:
        job.start_groups(2, until=5)
        joiner = job.start("group_2", abandon=2)[0]
        first = joiner.wait_for_event("step")
        assert sum(e["event"] == "abandoned" for e in joiner.events) == 2
        assert not first["contributed"]
        assert_equal_ends(job.finish())


def test_all_ranks_of_a_group_leave_and_come_back_together(tmp_path: Path) -> None:
    with running_job(tmp_path, pause_s=PAUSE_S) as job:
        first = job.start("group_0", ranks=2)
        second = job.start("group_1", ranks=2)
        third = job.start("group_2", ranks=2)
        all_reach([*first, *second, *third], 5)
        killed_at = time.monotonic()
        second[1].kill()
        assert second[0].end() != 0, "rank 0 ends with an error, so that its launcher restarts the group"
        assert "group rank 1 is gone" in second[0].log()
        step = first[0].steps()[-1]["step"]
        for rank in (*first, *third):
            rank.wait_for_step(step + 5)
            assert sum(not s["committed"] for s in rank.steps(since=killed_at)) <= 1
        again = job.start("group_1", ranks=2)
        for rank in again:
            rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        reports = job.finish()
        names = [rank.name for rank in job.ranks if rank.process.returncode == 0]
    assert len({report["step"] for report in reports}) == 1
    for group_rank in "01":
        digests = {r["digest"] for name, r in zip(names, reports, strict=True) if name.endswith(f"/{group_rank}")}
        assert len(digests) == 1, f"rank {group_rank} of the groups differ"


def test_a_killed_group_whose_forked_children_live_on_is_known_dead_at_once(tmp_path: Path) -> None:
    lighthouse = LighthouseProcess(heartbeat_timeout_ms=HEARTBEAT_S * 1000)
    with running_job(tmp_path, pause_s=PAUSE_S, lighthouse=lighthouse) as job:
        groups = [job.start(f"group_{i}")[0] for i in range(2)]
        groups.append(job.start("group_2", forks=True)[0])
        child = groups[2].wait_for_event("forked")["child"]
        all_reach(groups, 5)
        groups[2].kill()
        step = groups[0].steps()[-1]["step"]
        all_reach(groups[:2], step + 5, timeout_s=FAR_BELOW_S)
        os.kill(child, signal.SIGKILL)
        assert_equal_ends(job.finish())


def test_a_group_of_two_ranks_that_was_stopped_heals_when_it_wakes(tmp_path: Path) -> None:
    with running_job(tmp_path, lighthouse=hasty(), pause_s=PAUSE_S, timeout_s=3600) as job:
        groups = [job.start(f"group_{i}", ranks=2) for i in range(3)]
        all_reach((rank for group in groups for rank in group), 5)
        stopped_at = time.monotonic()
        groups[1][1].signal(signal.SIGSTOP)  # one of its ranks is enough
        step = groups[0][0].steps()[-1]["step"]
        for rank in (*groups[0], *groups[2]):
            rank.wait_for_step(step + 10)
            assert discards_in_a_row(rank.steps(since=stopped_at)) <= 1
            assert rank.steps()[-1]["participants"] == 2
        groups[1][1].signal(signal.SIGCONT)
        healed = [max(s["healed"] for s in rank.steps()) for rank in groups[1]]
        for rank, before in zip(groups[1], healed, strict=True):
            rank.wait_for(lambda e, b=before: e["event"] == "step" and e["committed"] and e["healed"] > b)
        assert len({report["step"] for report in job.finish()}) == 1
