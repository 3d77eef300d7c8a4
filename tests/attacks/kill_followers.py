"""Kills groups while two others follow the job outside of its quorum, at random moments, and watches what that costs.

    PYTHONPATH=tests python tests/attacks/kill_followers.py --kills 40 --seed 1

Three groups train, each a process. Transfers are slow, so that groups that come follow (`Manager(follow=True)`). In each round
two groups come. At a random moment until some time after they could have joined, one process gets SIGKILL: a learner, a
source, or the lighthouse, which is started again. Then the round waits until all groups contribute, and kills two, so that
two can come in the next round.

Prints a line for each kill, and `held` (0) or what was broken (1): the others discarded more than 0, 1 and 1 steps; two groups
had different bits after one step; a group did not come to contribute.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.groups import Job, LighthouseProcess, Rank

KINDS = {"learner": 0, "source": 1, "lighthouse": 1}
"""What is killed, and how many steps each of the others may discard."""
PATIENCE_S = 150.0
LONGEST_WAIT_S = 8.0


class Broken(Exception):
    """A promise does not hold."""


class Round:
    """The groups of a job, through rounds of coming, kills and waiting."""

    def __init__(self, job: Job, lighthouse: LighthouseProcess, chance: random.Random) -> None:
        self._job = job
        self._lighthouse = lighthouse
        self._chance = chance
        self._digests: dict[int, dict[str, str]] = {}
        self._num_started = 0
        self.groups = [self._start(follow=False) for _ in range(3)]
        for group in self.groups:
            group.wait_for_step(5, PATIENCE_S)

    def _start(self, *, follow: bool) -> Rank:
        self._num_started += 1
        return self._job.start(f"g{self._num_started}", follow=follow)[0]

    def play(self, kind: str) -> str:
        """Have two groups come, kill one process, and wait until all contribute; return what was seen."""
        survivors, learners = list(self.groups), [self._start(follow=True) for _ in range(2)]
        for learner in learners:
            learner.wait_for_event("fetching", PATIENCE_S)
        wait_s = self._chance.uniform(0.0, LONGEST_WAIT_S)
        time.sleep(wait_s)
        has_joined = [any(s["contributed"] and s["committed"] for s in learner.steps()) for learner in learners]
        quorum = max(group.steps()[-1]["quorum"] for group in survivors)
        killed_at = time.monotonic()
        if kind == "learner":
            victim = self._chance.choice(learners)
            victim.kill()
            learners = [learner for learner in learners if learner is not victim] + [self._start(follow=True)]
        elif kind == "source":
            victim = self._chance.choice(survivors)
            victim.kill()
            survivors = [group for group in survivors if group is not victim]
        else:
            self._lighthouse.kill()
            self._lighthouse.restart()
        for learner in learners:
            learner.wait_for(
                lambda e: e["event"] == "step" and e["committed"] and e["contributed"] and e["t"] > killed_at,
                PATIENCE_S,
            )
        allowed = KINDS[kind] + any(has_joined)  # a learner that had joined is in the others' collectives
        for group in survivors:
            discarded = [step for step in group.steps(since=killed_at) if step["discarded"]]
            # One that was killed in the step that it joined in was in that step's collectives.
            num = len(discarded) - (kind == "learner" and any(step["quorum"] > quorum for step in discarded))
            if num > allowed:
                raise Broken(f"{group.name} discarded {num} steps, {allowed} are allowed\n{group.log()}")
        self.groups = survivors + learners
        self._compare()
        fetched = [sum(e["received_bytes"] for e in one.events if e["event"] == "fetched") for one in learners]
        for group in self._chance.sample(self.groups, len(self.groups) - 3):
            group.kill()
            self.groups.remove(group)
        step = max(group.steps()[-1]["step"] for group in self.groups)
        for group in self.groups:
            group.wait_for_step(step + 3, PATIENCE_S)
        return f"{kind} killed after {wait_s:.2f} s, joined {sum(has_joined)}; received {fetched}"

    def _compare(self) -> None:
        for group in self.groups:
            for step in group.steps():
                if step["committed"] and step["contributed"]:
                    self._digests.setdefault(step["step"], {})[group.name] = step["digest"]
        for number, found in self._digests.items():
            if len(set(found.values())) > 1:
                raise Broken(f"after step {number} the groups have {found}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    settings: dict[str, Any] = {
        "pause_s": 0.3,
        "frozen_mb": 6,
        "rate": 2e6,
        "serve_bytes_per_s": 1_000_000,
        "digest_each_step": True,
        "min_replica_size": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        lighthouse = LighthouseProcess(min_replicas=1)
        job = Job(Path(folder), lighthouse.address, **settings)
        try:
            rounds = Round(job, lighthouse, chance)
            for number in range(options.kills):
                kind = options.kinds[number % len(options.kinds)]
                began = time.monotonic()
                said = rounds.play(kind)
                print(f"{number + 1} {said} ({time.monotonic() - began:.0f} s)", flush=True)
        except (Broken, AssertionError) as broken:
            print(f"BROKEN: {broken}")
            return 1
        finally:
            job.close()
            lighthouse.kill()
    print("held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
