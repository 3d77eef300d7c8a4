"""Kills and stops who takes part in a hold, at each of its moments, and watches what that costs those who train.

    PYTHONPATH=tests python tests/attacks/f44_killed_in_a_hold.py --kills 60 --seed 1

Three groups train, each a process. In each round a fourth one comes, and the quorum is held for it. While it receives the state,
loads it, has it and has not begun its step, or is in its first step, one process gets SIGKILL, or SIGSTOP for a while: the
newcomer, a source, or the lighthouse, which is started again. Then the round waits until all that live train together.

Prints a line for each round, with the place, a table, and `held` (0) or what was broken (1): two groups had different bits after
one step; one that lives ended; more steps were discarded than 0 for a newcomer that is in no step yet, and else 1; those who
train stood still for 20 s, besides the time that one was stopped.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.groups import Job, LighthouseProcess, Rank

WHO = ("newcomer", "source", "lighthouse")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
PLACES = {"fetching": 0.6, "loading": 0.3, "loaded": 0.3, "begins": 0.1}
"""What a newcomer reports as each moment of a hold begins, and the seconds that it lasts about."""
NUM_GROUPS = 3
LIMIT_S = 20.0
"""So long those who train may stand still at once, besides the time that one is stopped."""
SILENT_S = 3.0
"""So long the lighthouse waits for one that says nothing."""
STOPS_S = (0.2, 5.0)
COMES_BACK = 0.1
PATIENCE_S = 150.0
SETTINGS: dict[str, Any] = {
    "pause_s": 0.1,
    "frozen_mb": 3,
    "rate": 5e6,
    "serve_bytes_per_s": 2_000_000,
    "load_s": PLACES["loading"],
    "top_s": PLACES["loaded"],
    "digest_each_step": True,
    "min_replica_size": 1,
    "join_stall_limit_s": 3600.0,  # else the newcomers of all rounds together use it up
}


class Broken(Exception):
    """A promise does not hold."""


class Rounds:
    """The groups of a job, through rounds of coming, a signal and waiting."""

    def __init__(self, job: Job, lighthouse: LighthouseProcess, chance: random.Random) -> None:
        self._job, self._lighthouse, self._chance = job, lighthouse, chance
        self._digests: dict[int, tuple[str, str]] = {}
        self._num_seen: defaultdict[str, int] = defaultdict(int)
        self._num_started = 0
        self.groups = [self._start() for _ in range(NUM_GROUPS)]
        self._await_together(self.groups, 0.0)

    def _start(self) -> Rank:
        self._num_started += 1
        return self._job.start(f"g{self._num_started}")[0]

    def _await_together(self, groups: Sequence[Rank], since: float, *, more: int = 0) -> None:
        """Return when all of these have committed a step of all of them, and of so many more at most."""
        nums = range(len(groups), len(groups) + more + 1)
        for group in groups:
            group.wait_for(
                lambda e: e["event"] == "step" and e["committed"] and e["t"] > since and e["participants"] in nums,
                PATIENCE_S,
            )

    def play(self, who: str, number: signal.Signals, place: str) -> tuple[str, int, float, float]:
        """Return where the newcomer was, how many steps a survivor discarded at most, how long one stood still, and the stop."""
        newcomer, survivors = self._start(), list(self.groups)
        newcomer.wait_for_event(place, PATIENCE_S)
        began = max(group.steps()[-1]["t"] for group in survivors)
        time.sleep(self._chance.uniform(0.0, PLACES[place]))
        source = self._chance.choice(survivors)
        victim = {"newcomer": newcomer.process, "source": source.process, "lighthouse": self._lighthouse.process}[who]
        stopped_s, struck_at = 0.0, time.monotonic()
        if number is signal.SIGSTOP:
            stopped_s = self._chance.uniform(*STOPS_S)
            victim.send_signal(number)
            time.sleep(stopped_s)
            victim.send_signal(signal.SIGCONT)
        else:
            victim.kill()
            victim.wait()
            if who == "lighthouse":
                self._lighthouse.restart()
        gone = {"newcomer": newcomer, "source": source}.get(who) if number is signal.SIGKILL else None
        living = [group for group in (*survivors, newcomer) if group is not gone]
        # One that was not heard of in a hold stays outside for a while: that it comes in nevertheless is seen now and then.
        is_out = who == "newcomer" and number is signal.SIGSTOP and self._chance.random() > COMES_BACK
        here = [group for group in living if not (is_out and group is newcomer)]
        self._await_together(here, struck_at + stopped_s, more=len(living) - len(here))
        time.sleep(0.2)  # what its reader has yet to read
        said = [e["event"] for e in newcomer.events if e["t"] <= struck_at and (e["event"] in PLACES or _counts(e))]
        where = str(said[-1])
        watched = [group for group in survivors if group is not gone and (who, number) != ("source", signal.SIGSTOP)]
        watched = watched or [group for group in survivors if group is not source]
        for group in living:
            if (code := group.process.poll()) is not None:
                raise Broken(f"{group.name} ended with {code}\n{group.log()}")
        discarded = max(sum(step["discarded"] for step in group.steps(began)) for group in watched)
        gap_s = max(_longest_gap_s(group, began) for group in watched)
        self._compare(living)
        allowed = int(who != "newcomer" or where in ("begins", "step"))
        if discarded > allowed:
            raise Broken(f"{discarded} steps are discarded, {allowed} are allowed\n{watched[0].log()}")
        if gap_s > LIMIT_S + stopped_s:
            raise Broken(f"those who train stood still for {gap_s:.1f} s\n{watched[0].log()}")
        self._trim(living, [newcomer] if is_out else [])
        return where, discarded, gap_s, stopped_s

    def _trim(self, living: list[Rank], first: list[Rank]) -> None:
        """As many groups as before train on."""
        for group in first or self._chance.sample(living, len(living) - NUM_GROUPS):
            group.kill()
            living.remove(group)
        self.groups = living
        self._await_together(living, time.monotonic())

    def _compare(self, groups: Sequence[Rank]) -> None:
        for group in groups:
            events = group.events[self._num_seen[group.name] :]
            self._num_seen[group.name] += len(events)
            for step in events:
                if step["event"] != "step" or not (step["committed"] and step["contributed"]):
                    continue
                name, digest = self._digests.setdefault(step["step"], (group.name, step["digest"]))
                if digest != step["digest"]:
                    raise Broken(f"after step {step['step']} {group.name} has another state than {name}")


def _counts(event: dict[str, Any]) -> bool:
    return event["event"] == "step" and bool(event["committed"])


def _longest_gap_s(group: Rank, since: float) -> float:
    times = [since, *(step["t"] for step in group.steps(since))]
    return max(after - before for before, after in pairwise(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="of each kind and signal")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--who", nargs="*", default=list(WHO), choices=WHO)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    kinds = [(who, number) for who in options.who for number in SIGNALS]
    rows: defaultdict[tuple[str, str], list[tuple[str, int, float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        lighthouse = LighthouseProcess(min_replicas=1, heartbeat_timeout_ms=int(1000 * SILENT_S))
        job = Job(Path(folder), lighthouse.address, **SETTINGS)
        broken = ""
        try:
            rounds = Rounds(job, lighthouse, chance)
            for number in range(options.kills * len(kinds)):
                who, what = kinds[number % len(kinds)]
                place = [*PLACES][number // len(kinds) % len(PLACES)]
                began = time.monotonic()
                row = rounds.play(who, what, place)
                rows[who, what.name].append(row)
                where, discarded, gap_s, stopped_s = row
                print(
                    f"{number + 1} {who} {what.name} {where}: {discarded} discarded, stood still {gap_s:.2f} s,"
                    f" stopped {stopped_s:.2f} s ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )
        except (Broken, AssertionError) as error:
            broken = f"BROKEN: {error}\n{''.join(lighthouse.log)[-6000:]}"
        finally:
            job.close()
            lighthouse.kill()
    for (who, what_name), seen in rows.items():
        places = {place: sum(row[0] == place for row in seen) for place in (*PLACES, "step")}
        most, longest_s = max(row[1] for row in seen), max(row[2] - row[3] for row in seen)
        print(f"{who} {what_name}: {len(seen)}, {places}; {most} discarded, {longest_s:.2f} s beyond the stop at most")
    print(broken or "held")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
