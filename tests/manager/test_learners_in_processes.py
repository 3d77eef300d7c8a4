"""Groups of real processes that follow before they join: what they receive, and to which bits they come."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.groups import running_job


@pytest.mark.processes
@pytest.mark.slow
def test_processes_that_follow_come_to_the_same_bits_and_receive_the_frozen_weights_once(tmp_path: Path) -> None:
    """Two learners, one after the other: the second waits for the first, and the others wait for neither."""
    frozen_bytes = 8 << 20
    with running_job(tmp_path, pause_s=0.02, frozen_mb=8, rate=4e6, digest_each_step=True) as job:
        groups = [job.start(f"group_{i}")[0] for i in range(2)]
        for group in groups:
            group.wait_for_step(5)
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
