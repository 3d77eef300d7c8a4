"""Groups of FSDP2 ranks lose a group or a rank, go on, and get it back, with the bits of a run in which nothing happened."""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.groups import Job, LighthouseProcess, Rank, discards_in_a_row, running_job
from support.waiting import wait_until

TRAINER = "sharded_trainer.py"
SEED = 1
OTHER_SEED = 77

Reference = Callable[[int], dict[int, str]]

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@contextmanager
def sharded_job(directory: Path, **options: Any) -> Iterator[Job]:
    """A job in which one group alone may go on."""
    lighthouse = LighthouseProcess(min_replicas=1)
    with running_job(directory, lighthouse=lighthouse, trainer=TRAINER, seed=SEED, **options) as job:
        yield job


def digests(ranks: Sequence[Rank]) -> dict[int, set[str]]:
    """The digests that ranks had after each step that they committed."""
    found: dict[int, set[str]] = {}
    for event in itertools.chain.from_iterable(rank.steps() for rank in ranks):
        if event["committed"]:
            found.setdefault(event["step"], set()).add(event["digest"])
    return found


def kill(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Digests after each step, up to one, of a single group of two ranks to which nothing happens."""
    known: dict[int, str] = {}

    def run_to(step: int) -> dict[int, str]:
        if step not in known:
            with sharded_job(tmp_path_factory.mktemp("undisturbed")) as job:
                job.stop_at(step)
                ranks = job.start("alone", ranks=2)
                assert [rank.end() for rank in ranks] == [0, 0], ranks[0].log()
                known.update({step: digest for step, (digest,) in digests(ranks).items()})
        return known

    return run_to


def start_two(job: Job) -> tuple[list[Rank], list[Rank]]:
    """Start two groups, wait until they train together; return their ranks."""
    groups = job.start("stays", ranks=2), job.start("leaves", ranks=2)
    for rank in itertools.chain(*groups):
        rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == 2)
    return groups


def come_back(job: Job, stays: Sequence[Rank], since: float = 0.0) -> list[Rank]:
    """Start the group again, with other weights, once the other has gone on without it since then, until they train together."""
    stays[0].wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == 1 and e["t"] >= since)
    ranks = job.start("leaves", ranks=2, seed=OTHER_SEED)
    for rank in ranks:
        rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == 2)
    return ranks


@dataclass
class Run:
    """What became of a group that stayed, one that left, and those that came in its place.

    `killed_at` is when a group was killed as a whole, `lost_rank_at` when the one after it lost a rank; both in seconds.
    """

    stays: list[Rank]
    leaves: list[Rank]
    back: list[Rank]
    killed_at: float
    done: list[dict[str, Any]]
    again: Sequence[Rank] = ()
    lost_rank_at: float = math.inf

    @property
    def all_digests(self) -> dict[int, set[str]]:
        return digests([*self.stays, *self.leaves, *self.back, *self.again])

    def discarded(self, rank: Rank) -> tuple[int, int]:
        """Steps that a rank discarded after the first fault, and after the second."""
        steps = [step for step in rank.steps(since=self.killed_at) if step["discarded"]]
        num_later = sum(step["t"] >= self.lost_rank_at for step in steps)
        return len(steps) - num_later, num_later

    def moments(self, rank: Rank) -> dict[str, list[str]]:
        """The optimizer's moments as its `load_state_dict` got them."""
        (loading,) = [event for event in rank.events if event["event"] == "loading"]
        assert loading["had_state"] == 0
        return {name: what for name, what in loading["optimizer"].items() if "exp_avg" in name}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with sharded_job(tmp_path_factory.mktemp("killed"), pause_s=0.1) as job:
        stays, leaves = start_two(job)
        killed_at = time.monotonic()
        kill(leaves)
        back = come_back(job, stays)
        lost_rank_at = time.monotonic()
        kill(back[1:])
        assert back[0].end() != 0, "it leaves as a whole"
        again = come_back(job, stays, lost_rank_at)
        done = job.finish(ahead=8)
    return Run(stays, leaves, back, killed_at, done, again, lost_rank_at)


def test_groups_that_were_killed_or_lost_a_rank_come_back_and_all_steps_have_the_bits_of_an_undisturbed_run(
    killed: Run, undisturbed: Reference
) -> None:
    steps = killed.all_digests
    expected = undisturbed(max(steps))
    assert {step: found for step, found in steps.items() if found != {expected[step]}} == {}
    assert [event["digest"] for event in killed.done] == [expected[max(steps)]] * 4
    assert [max(event["healed"] for event in rank.steps()) for rank in (*killed.back, *killed.again)] == [1] * 4


def test_the_others_discard_one_step_at_most_for_a_lost_group_and_its_return(killed: Run) -> None:
    assert [max(killed.discarded(rank)) <= 1 for rank in killed.stays] == [True, True]


def test_optimizer_state_that_the_joiner_does_not_have_yet_arrives_as_shards_on_its_own_mesh(killed: Run) -> None:
    for rank in (*killed.back, *killed.again):
        moments = killed.moments(rank)
        assert len(moments) == 2 * 20  # of 3 blocks of 6 parameters and a head of 2
        assert {(kind, placements, mesh) for kind, placements, _, mesh in moments.values()} == {
            ("DTensor", "(Shard(dim=0),)", "own mesh")
        }


def test_a_group_of_four_joins_with_tensor_parallelism_and_is_killed(tmp_path: Path) -> None:
    """FSDP2 over TP, so shards are of `_StridedShard`; each rank takes those of the rank in its place."""
    with sharded_job(tmp_path, pause_s=0.3) as job:
        stays = job.start("stays", ranks=4)
        stays[0].wait_for_step(2)
        joins = job.start("joins", ranks=4, seed=OTHER_SEED)
        for rank in joins:
            rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == 2)
        killed_at = time.monotonic()
        kill(joins)
        done = job.finish(ahead=8)
    run = Run(stays, [], joins, killed_at, done)

    assert {step: found for step, found in run.all_digests.items() if len(found) != 1} == {}
    assert [event["digest"] for event in done] == [done[0]["digest"]] * 4
    assert [sum(run.discarded(rank)) <= 1 for rank in stays] == [True] * 4
    moments = [what for rank in joins for what in run.moments(rank).values()]
    assert {(kind, mesh) for kind, *_, mesh in moments} == {("DTensor", "own mesh")}
    assert any("_StridedShard" in placements for _, placements, _, _ in moments)


def test_a_group_that_comes_back_to_layers_that_were_unfrozen_meanwhile_learns_the_step_and_joins(
    tmp_path: Path,
) -> None:
    """Its first forward pass is that of step 0, in which the first block is frozen; its state has no moments of that block."""
    with sharded_job(tmp_path, pause_s=0.1, unfreezes_at=4) as job:
        stays, leaves = start_two(job)
        stays[0].wait_for_step(6)
        kill(leaves)
        back = come_back(job, stays)
        job.finish(ahead=4)

    assert [found for found in digests([*stays, *leaves, *back]).values() if len(found) != 1] == []
    assert [discards_in_a_row(rank.steps()) <= 1 for rank in stays] == [True, True]
    assert max(event["healed"] for event in back[0].steps()) == 2


def test_a_spare_of_two_ranks_takes_the_place_of_a_killed_group(tmp_path: Path) -> None:
    with sharded_job(tmp_path, pause_s=0.3) as job:
        stays, leaves = start_two(job)
        spare = job.start("spare", ranks=2, seed=OTHER_SEED, spare=True)
        for rank in spare:
            wait_until(lambda rank=rank: "this spare is ready" in rank.log(), "the spare is close", 240)  # type: ignore[misc]
        num_before = len(stays[0].steps())
        wait_until(lambda: len(stays[0].steps()) > num_before + 1, "there is a step that it has not seen", 240)
        assert [rank.steps() for rank in spare] == [[], []]
        kill(leaves)
        for rank in spare:
            rank.wait_for(lambda e: e["event"] == "step" and e["committed"] and e["participants"] == 2)
        done = job.finish(ahead=4)

    assert [found for found in digests([*stays, *leaves, *spare]).values() if len(found) != 1] == []
    assert [event["digest"] for event in done] == [done[0]["digest"]] * 4
    assert [discards_in_a_row(rank.steps()) <= 1 for rank in stays] == [True, True]
