"""Groups are killed at each place of a step, and what the job ends with has the bits of a plain loop in which nobody dies."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.exact_models import CLIP, GLOBAL_BATCH_SIZE, MICROBATCH_SIZE, SEED, Noisy, digest, loss_of, make
from support.groups import Job, LighthouseProcess, Rank
from support.thoroughness import by_default

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import plain_steps

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PLACES = [
    "microbatch 0",
    "exchange",
    "gather",
    "voted",
    "microbatch 1",
    "microbatch 3",
    "sum",
    "summed",
    "vote",
    "decided",
]
GROUPS = ("g0", "g1", "g2")


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    server = LighthouseProcess(min_replicas=2)
    yield server
    server.kill()


def plainly(model_name: str, steps: int, global_batch_size: int = GLOBAL_BATCH_SIZE) -> tuple[str, list[str]]:
    """Return the digest and the mean losses of a plain loop in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, optimizer, schedule = make(model_name)
        with torch.random.fork_rng():
            losses = plain_steps.train(
                model,
                loss_of,
                Noisy(),
                optimizer,
                schedule,
                steps=steps,
                global_batch_size=global_batch_size,
                microbatch_size=MICROBATCH_SIZE,
                seed=SEED,
                clip=CLIP,
            )
        return digest(model, optimizer), [loss.hex() for loss in losses]
    finally:
        torch.set_num_threads(threads)


def order(job: Job, name: str, place: str) -> None:
    """Have a group die at a place of its next step."""
    (job.directory / "order").write_text(place)
    (job.directory / "order").rename(job.control(name) / "die")


def is_whole(event: dict[str, object]) -> bool:
    return event["event"] == "step" and event["committed"] is True and event["participants"] == len(GROUPS)


def ends_as_the_plain_loop(job: Job, model_name: str, global_batch_size: int = GLOBAL_BATCH_SIZE) -> int:
    """End the job, and compare; return how many steps it made."""
    ends = job.finish(4)
    steps = {end["step"] for end in ends}
    assert len(steps) == 1 and not any(end["differ"] for end in ends)
    wanted, losses = plainly(model_name, steps.pop(), global_batch_size)
    share = -(-global_batch_size // MICROBATCH_SIZE // max(1, job.options["num_groups"] - 1))
    audits = 2 if job.options.get("checks_every") else 0  # a discarded attempt has one, and the next one has
    for rank in job.ranks:
        before = None
        for event in rank.steps():
            if event["committed"]:
                assert event["loss"] == losses[event["step"] - 1], (rank.name, event)
                # In a step in which a group died the others have computed its microbatches too, and their own once.
                assert before is None or event["computed"] - before <= share + audits, (rank.name, event)
                before = event["computed"]
    assert {end["digest"] for end in ends} == {wanted}
    return len(losses)


@pytest.mark.parametrize(("model_name", "workers"), [("mlp", 2), ("gpt", 0)])
def test_a_job_of_kills_ends_with_the_bits_of_a_plain_loop(
    tmp_path: Path, lighthouse: LighthouseProcess, model_name: str, workers: int
) -> None:
    rng = random.Random(model_name)
    places = PLACES[: by_default(4, thorough=len(PLACES))] if model_name == "mlp" else ["audit", *PLACES[3:4]]
    places += [f"after {rng.uniform(0.0, 0.03):.4f}" for _ in range(by_default(1, thorough=16))]
    job = Job(
        tmp_path,
        lighthouse.address,
        "exact_trainer.py",
        model=model_name,
        workers=workers,
        num_groups=3,
        min_replica_size=2,
        checks_every=1 if model_name == "gpt" else 0,
    )
    try:
        alive: dict[str, Rank] = {}
        for name in GROUPS:
            alive[name] = job.start(name)[0]
        for rank in alive.values():
            rank.wait_for(is_whole)
        for place, name in zip(places, itertools.cycle(GROUPS), strict=False):
            order(job, name, place)
            assert alive[name].process.wait(240) != 0, place
            alive[name] = job.start(name, other_weights=True)[0]
            alive[name].wait_for(is_whole)
        assert ends_as_the_plain_loop(job, model_name) > len(places)
    finally:
        job.close()


@pytest.mark.parametrize(("num_groups", "global_batch_size"), [(3, 28), (3, 8), (1, 48), (2, 12)])
def test_any_number_of_groups_and_of_microbatches_gives_the_same_bits(
    tmp_path: Path, num_groups: int, global_batch_size: int
) -> None:
    lighthouse = LighthouseProcess(min_replicas=num_groups)
    sizes = {"global_batch_size": global_batch_size, "num_groups": num_groups, "min_replica_size": num_groups}
    job = Job(tmp_path, lighthouse.address, "exact_trainer.py", model="mlp", **sizes)
    try:
        ranks = [job.start(name)[0] for name in GROUPS[:num_groups]]
        for rank in ranks:
            rank.wait_for_step(2)
        ends_as_the_plain_loop(job, "mlp", global_batch_size)
    finally:
        job.close()
        lighthouse.kill()


def test_fewer_groups_go_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    lighthouse = LighthouseProcess(min_replicas=2)
    where = {"checkpoints": str(tmp_path / "checkpoints"), "model": "mlp", "num_groups": 2, "min_replica_size": 2}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = Job(tmp_path / "first", lighthouse.address, "exact_trainer.py", **where)
    second = Job(tmp_path / "second", lighthouse.address, "exact_trainer.py", **where, job="second")
    try:
        ranks = [first.start(name)[0] for name in GROUPS]
        for rank in ranks:
            rank.wait_for_step(9)
        for rank in ranks:
            rank.kill()
        again = [second.start(name, other_weights=True)[0] for name in GROUPS[:2]]
        assert all(rank.wait_for_event("restored")["step"] > 0 for rank in again)
        for rank in again:
            rank.wait_for_step(1)
        ends_as_the_plain_loop(second, "mlp")
    finally:
        first.close()
        second.close()
        lighthouse.kill()


def test_an_error_in_one_rank_of_a_group_costs_no_step_and_leaves_no_trace(tmp_path: Path) -> None:
    lighthouse = LighthouseProcess(min_replicas=2)
    job = Job(tmp_path, lighthouse.address, "exact_trainer.py", model="gpt", num_groups=2, min_replica_size=2)
    try:
        ranks = [rank for name in GROUPS[:2] for rank in job.start(name, ranks=2)]
        ranks[3].wait_for_step(2)
        order(job, "g1", "raises")
        for rank in ranks:
            rank.wait_for_step(5)
        ends_as_the_plain_loop(job, "gpt")
        assert len([event for rank in ranks for event in rank.events if event["event"] == "raised"]) == 1
        assert all(event["committed"] for rank in ranks for event in rank.steps())
    finally:
        job.close()
        lighthouse.kill()


def test_a_worker_that_dies_ends_its_group_by_name(tmp_path: Path) -> None:
    lighthouse = LighthouseProcess(min_replicas=1)
    job = Job(tmp_path, lighthouse.address, "exact_trainer.py", model="mlp", workers=1, num_groups=1, worker_dies=True)
    try:
        (rank,) = job.start("g0")
        assert rank.process.wait(240) != 0
        assert "DataLoader worker" in rank.log()
    finally:
        job.close()
        lighthouse.kill()
