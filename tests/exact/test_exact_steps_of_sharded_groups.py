"""Groups that shard their model by FSDP2: deaths leave no trace in the bits of any shard."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.groups import Job, LighthouseProcess
from support.thoroughness import by_default

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(directory: Path, num_groups: int, num_kills: int, num_steps: int) -> dict[int, str]:
    """Return what each rank number ends with, the same in all groups: the digest of its shards. Kills alternate."""
    directory.mkdir()
    lighthouse = LighthouseProcess(min_replicas=num_groups)
    options = {"num_steps": num_steps, "min_replica_size": num_groups}
    job = Job(directory, lighthouse.address, "exact_sharded_trainer.py", **options)
    dies = [2 + 2 * kill for kill in range(num_kills)]
    try:
        groups = {}
        for number in range(num_groups):
            step = dies[number] if number < len(dies) else None
            groups[number] = job.start(f"g{number}", ranks=2, weights=number, dies=step)
        for kill in range(num_kills):
            victim = kill % 2
            assert groups[victim][0].process.wait(120) != 0
            groups[victim][1].kill()
            step = dies[kill + 2] if kill + 2 < len(dies) else None
            groups[victim] = job.start(f"g{victim}", ranks=2, weights=7, dies=step)
        found: dict[int, set[str]] = {0: set(), 1: set()}
        for ranks in groups.values():
            for number, rank in enumerate(ranks):
                assert rank.end(120) == 0, rank.log()
                assert rank.done()["step"] == num_steps
                found[number].add(rank.done()["digest"])
                assert rank.done()["differ"] == [], "each second step is audited"
        return {number: ", ".join(sorted(digests)) for number, digests in found.items()}
    finally:
        job.close()
        lighthouse.kill()


def test_two_groups_of_two_ranks_with_kills_end_with_the_shards_of_one_group_without(tmp_path: Path) -> None:
    num_kills, num_steps = by_default((1, 5), thorough=(4, 12))
    killed = run(tmp_path / "killed", 2, num_kills, num_steps)
    assert killed == run(tmp_path / "alone", 1, 0, num_steps)
    assert killed[0] != killed[1] and "," not in killed[0]
