"""Groups of real processes that follow before they join: what they receive, and to which bits they come."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support.groups import LighthouseProcess, all_reach, running_job


@pytest.mark.processes
@pytest.mark.slow
def test_processes_that_follow_come_to_the_same_bits_and_receive_the_frozen_weights_once(tmp_path: Path) -> None:
    """Two learners, one after the other: the second waits for the first, and the others wait for neither."""
    frozen_bytes = 8 << 20
    with running_job(tmp_path, pause_s=0.02, frozen_mb=8, rate=4e6, digest_each_step=True) as job:
        groups = job.start_groups(2, until=5)
        learners = [job.start(f"group_{i}", follow=True)[0] for i in (2, 3)]
        for learner in learners:
            learner.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        discarded = [sum(s["discarded"] for s in group.steps()) for group in groups]
        reports = job.finish()
        assert discarded == [0, 0]
        assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports
        by_step: dict[int, set[str]] = {}
        for rank in (*groups, *learners):
            for step in rank.steps():
                if step["committed"] and step["contributed"]:
                    by_step.setdefault(step["step"], set()).add(step["digest"])
        assert all(len(digests) == 1 for digests in by_step.values()), by_step
        for learner in learners:
            fetched = [e["received_bytes"] for e in learner.events if e["event"] == "fetched"]
            assert max(fetched) >= frozen_bytes and sum(fetched) < 1.5 * frozen_bytes, fetched


@pytest.mark.processes
@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_killed_process_within_three_steps_and_costs_nothing_before(
    tmp_path: Path,
) -> None:
    """Of the three the first is that in which the group was killed. They take so long that a busy machine is not the cause."""
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(tmp_path, lighthouse=lighthouse, pause_s=0.1, min_replica_size=1, digest_each_step=True) as job:
        stays, leaves = (job.start(f"group_{i}")[0] for i in range(2))
        all_reach([stays, leaves], 2)
        began = time.monotonic()
        spare = job.start("spare", spare=True, follow=True)[0]
        give_up_at = time.monotonic() + 240
        while "this spare is ready" not in spare.log():
            assert time.monotonic() < give_up_at, spare.log()
            time.sleep(0.05)
        stays.wait_for_step(stays.steps()[-1]["step"] + 4)
        before = stays.steps(since=began)
        assert len({step["quorum"] for step in before}) == 1 and not any(step["discarded"] for step in before)
        assert spare.steps() == []
        job.pause("group_0", 5.0)
        leaves.signal(signal.SIGKILL)
        leaves.process.wait()
        killed_at = time.monotonic()
        first = spare.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["contributed"])
        alone = [s for s in stays.steps(since=killed_at) if s["committed"] and s["participants"] == 1]
        assert len(alone) <= 2, "that which was repeated, and the one that the spare was a joiner in"
        job.pause("group_0", 0.1)
        back = job.start("group_1")[0]
        back.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == 3)
        reports = job.finish(ahead=4)
        assert len({(report["step"], report["digest"]) for report in reports}) == 1, reports
        assert first["participants"] == 2 and sum(step["discarded"] for step in stays.steps()) <= 1
