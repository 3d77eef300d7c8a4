"""Durable checkpoints of real jobs: processes that save and restore, and are killed with SIGKILL at the worst moments."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.groups import Job, LighthouseProcess, Rank, all_reach, running_job
from support.thoroughness import by_default

from torchft_ckpt import checkpoints_in

pytestmark = pytest.mark.processes
TRAINER = "durable_trainer.py"
GROUPS = ("a", "b")


def start_all(job: Job, *, names: Sequence[str] = GROUPS, ranks: int = 1, **options: Any) -> list[Rank]:
    return [rank for name in names for rank in job.start(name, ranks=ranks, **options)]


def kill_all(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        assert rank.process.wait() == -9, f"{rank.name} was not killed\n{rank.log()}"


def restored(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    return [rank.wait_for_event("restored") for rank in ranks]


def await_saved(ranks: Sequence[Rank], step: int) -> list[dict[str, Any]]:
    events = [rank.wait_for(lambda e: e["event"] == "saved" and e["step"] == step) for rank in ranks]
    assert all(event["error"] is None for event in events), events
    return events


def digests_by_step(ranks: Sequence[Rank]) -> dict[int, str]:
    """Return the digest of each committed step, which is the same for all."""
    seen = {(event["step"], event["digest"]) for rank in ranks for event in rank.steps() if event["committed"]}
    digests = dict(seen)
    assert len(digests) == len(seen), f"one step, two states: {sorted(seen)}"
    return digests


def only(values: Sequence[Any]) -> Any:
    """Return what all of them are."""
    assert all(value == values[0] for value in values), values
    return values[0]


def finish(job: Job, ranks: Sequence[Rank], ahead: int = 12) -> dict[str, Any]:
    """End a job some steps on; return what its groups ended with."""
    for rank in ranks:
        rank.wait_for(lambda e: e["event"] == "step" and e["committed"])
    done = job.finish(ahead=ahead)
    assert len(done) == len(ranks)
    return {"step": only([end["step"] for end in done]), "digest": only([end["digest"] for end in done])}


WRITING = {"operation": "write", "file": ".distcp"}
BEFORE_ITS_MANIFEST = {"operation": "rename", "file": "part-"}
BEFORE_THE_METADATA = {"operation": "rename", "file": ".metadata"}


@pytest.mark.parametrize(
    ("hang_a", "hang_b", "goes_on_from"),
    [
        pytest.param(WRITING, WRITING, 4, id="both write their data"),
        pytest.param(None, BEFORE_ITS_MANIFEST, 4, id="one has written all but the name of its manifest"),
        pytest.param(BEFORE_THE_METADATA, BEFORE_THE_METADATA, 8, id="all but DCP's metadata is there"),
    ],
)
def test_a_job_killed_in_the_middle_of_a_save_goes_on_from_a_whole_checkpoint(
    tmp_path: Path, hang_a: dict[str, str] | None, hang_b: dict[str, str] | None, goes_on_from: int
) -> None:
    storage = tmp_path / "storage"
    common = {"trainer": TRAINER, "storage": str(storage), "save_at": [4, 8], "min_replica_size": 2, "pause_s": 0.02}
    with running_job(tmp_path / "job", **common) as job:
        ranks = [
            rank
            for name, hang in zip(GROUPS, (hang_a, hang_b), strict=True)
            for rank in job.start(name, **({"hang": {"step": 8, **hang}} if hang else {}))
        ]
        restored(ranks)
        await_saved(ranks, 4)
        hanging = [rank for rank, hang in zip(ranks, (hang_a, hang_b), strict=True) if hang]
        for rank in hanging[:1] if hang_a is BEFORE_THE_METADATA else hanging:
            rank.wait_for_event("hanging")
        if hang_a is None:
            wait_for_file(storage, "part-r0-g0-f0.json", of_step=8)
        kill_all(ranks)
        before = digests_by_step(ranks)
        assert checkpoints_in(storage) == [4]

        again = start_all(job)

        events = restored(again)
        assert [(e["source"], e["step"], e["manager_step"]) for e in events] == [("storage", *[goes_on_from] * 2)] * 2
        assert {event["digest"] for event in events} == {before[goes_on_from]}
        assert [event["own"] for event in events] == [
            {"position": goes_on_from, "rank": 0, "of": name} for name in GROUPS
        ]
        finish(job, again)
        assert goes_on_from in checkpoints_in(storage)  # also where nobody had lived to see it whole
        after = digests_by_step(again)
        assert min(after) == goes_on_from + 1
        assert all(after[step] == digest for step, digest in before.items() if step in after)


def test_wherever_a_job_is_killed_it_goes_on_from_a_step_that_it_had_saved(tmp_path: Path) -> None:
    seed = 20261121
    moments = random.Random(seed)
    print(f"seed {seed}")
    storage = tmp_path / "storage"
    known: dict[int, str] = {}
    step = 0
    with running_job(
        tmp_path / "job",
        trainer=TRAINER,
        storage=str(storage),
        save_every=3,
        min_replica_size=2,
        pause_s=0.01,
        waits_for_saves=False,
    ) as job:
        for _ in range(4):
            ranks = start_all(job)
            events = restored(ranks)
            if step:
                assert {(e["source"], e["step"]) for e in events} == {("storage", only([e["step"] for e in events]))}
                assert events[0]["step"] >= step
                assert {event["digest"] for event in events} == {known[events[0]["step"]]}
            ranks[0].wait_for(lambda e: e["event"] == "saved" and e["error"] is None)
            time.sleep(moments.uniform(0.0, 0.3))
            kill_all(ranks)
            noted = digests_by_step(ranks)
            assert all(noted[at] == known[at] for at in noted.keys() & known.keys())
            known |= noted
            step = checkpoints_in(storage)[0]


KILLED_WHILE = [("b", WRITING), ("a", BEFORE_THE_METADATA), ("a", WRITING), ("b", BEFORE_ITS_MANIFEST)]


@pytest.mark.parametrize("number", range(by_default(2, thorough=20)))
def test_a_group_of_two_ranks_that_is_killed_in_a_save_is_replaced_at_the_lighthouses_word(
    tmp_path: Path, number: int
) -> None:
    """Long before `fill_after`, which is two minutes."""
    storage = tmp_path / "storage"
    victim, hang = KILLED_WHILE[number % len(KILLED_WHILE)]
    options = {"storage": str(storage), "save_at": [6], "layout": "sharded", "pause_s": 0.02, "min_replica_size": 2}
    with running_job(tmp_path / "job", trainer=TRAINER, fill_after_s=120.0, **options) as job:
        groups = {
            name: job.start(name, ranks=2, **({"hang": {"step": 6, **hang}} if name == victim else {}))
            for name in GROUPS
        }
        restored([rank for ranks in groups.values() for rank in ranks])
        for rank in groups[victim][: 1 if hang is BEFORE_THE_METADATA else 2]:
            rank.wait_for_event("hanging")
        killed_at = time.monotonic()

        kill_all(groups[victim])

        (survivors,) = (ranks for name, ranks in groups.items() if name != victim)
        saved = await_saved(survivors, 6)
        assert all(event["is_closed"] for event in saved)
        assert sum(event["num_fills"] for event in saved) == (0 if hang is BEFORE_THE_METADATA else 2)
        assert max(event["t"] for event in saved) < killed_at + 40.0, [event["t"] - killed_at for event in saved]
        assert checkpoints_in(storage) == [6]


def test_a_group_that_hears_late_of_the_end_of_a_save_takes_part_in_the_next(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    steps = [4, 20, 60]
    common = {"trainer": TRAINER, "storage": str(storage), "save_at": steps, "pause_s": 0.05, "min_replica_size": 2}
    with running_job(tmp_path / "job", waits_for_saves=False, **common) as job:
        # When it has written its share of step 4, it looks for the others', and hears nothing for two seconds.
        late = {"step": 4, "operation": "list", "file": "part-r1-", "for_s": 2.0}
        ranks = [*job.start("a"), *job.start("b", hang=late)]
        restored(ranks)

        outcomes = [[rank.wait_for_event("saved") for _ in steps] for rank in ranks]

        assert [{event["step"]: event["error"] for event in of_rank} for of_rank in outcomes] == [
            dict.fromkeys(steps)
        ] * 2
        assert sum(event["num_fills"] for of_rank in outcomes for event in of_rank) == 0
        assert checkpoints_in(storage) == steps[::-1]


def test_a_sharded_job_goes_on_in_the_same_layout_in_another_and_unsharded(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    common = {"trainer": TRAINER, "storage": str(storage)}
    with running_job(tmp_path / "job", layout="sharded", min_replica_size=2, **common) as job:
        ranks = start_all(job, ranks=2, save_at=[5], pause_s=0.02, restores_early=True)
        for rank in ranks:  # the state of an optimizer that the Manager does not know would come back unsharded
            assert "Optimizer(manager, ...)" in rank.wait_for_event("refused")["message"]
        restored(ranks)
        await_saved(ranks, 5)
        ranks[0].wait_for_step(7)
        kill_all(ranks)
        before = digests_by_step(ranks)

        again = start_all(job, ranks=2)
        events = restored(again)
        assert {(e["source"], e["step"], e["manager_step"], e["batches_committed"]) for e in events} == {
            ("storage", 5, 5, 10)
        }
        assert {event["digest"] for event in events} == {before[5]}
        assert [(event["own"]["of"], event["own"]["rank"]) for event in events] == [
            ("a", 0),
            ("a", 1),
            ("b", 0),
            ("b", 1),
        ]
        assert all(event["dtensors"] for event in events)
        all_reach(again, 7)
        after = digests_by_step(again)
        assert (after[6], after[7]) == (before[6], before[7])
    with (
        running_job(
            tmp_path / "four", lighthouse=LighthouseProcess(min_replicas=1), layout="sharded", **common
        ) as four,
        running_job(tmp_path / "one", lighthouse=LighthouseProcess(min_replicas=1), **common) as one,
    ):
        as_four, as_one = four.start("a", ranks=4), one.start("a")
        for ranks in (as_four, as_one):
            events = restored(ranks)
            assert {(e["source"], e["step"], e["manager_step"], e["digest"]) for e in events} == {
                ("storage", 5, 5, before[5])
            }
            assert all(bool(event["dtensors"]) == (len(ranks) == 4) for event in events)
            all_reach(ranks, 6)


def test_a_flipped_bit_sends_all_groups_to_the_checkpoint_before_and_one_in_each_keeps_them_from_beginning_anew(
    tmp_path: Path,
) -> None:
    """The log says why."""
    storage = tmp_path / "storage"
    common = {"trainer": TRAINER, "storage": str(storage), "min_replica_size": 2, "save_at": [4, 8]}
    with running_job(tmp_path / "job", pause_s=0.02, **common) as job:
        ranks = start_all(job)
        restored(ranks)
        await_saved(ranks, 8)
        kill_all(ranks)
        before = digests_by_step(ranks)
        newest = max(storage.iterdir())
        damaged = flip_a_bit(newest, "part-r1-g0-f0.json")

        again = start_all(job)

        events = restored(again)
        assert [(e["source"], e["step"], e["manager_step"]) for e in events] == [("storage", 4, 4)] * 2
        assert {event["digest"] for event in events} == {before[4]}
        for rank in again:
            assert any(newest.name in line and "is skipped" in line and damaged in line for line in log_of(rank)), (
                rank.log()
            )
        await_saved(again, 8)  # under another name
        finish(job, again)
        assert digests_by_step(again)[8] == before[8]
        assert checkpoints_in(storage) == [8, 8, 4]

        damaged_in = {path.name: flip_a_bit(path, "part-r0-g0-f0.json") for path in storage.iterdir() if path != newest}
        last = start_all(job)

        # Half of the state may be in their memory by now: nothing to begin a job with.
        for rank in last:
            event = rank.wait_for(lambda e: e["event"] in ("refused", "restored"))
            assert (event["event"], event.get("error")) == ("refused", "CheckpointNotFoundError"), event
            assert all(name in event["message"] and file in event["message"] for name, file in damaged_in.items())


def test_a_group_that_lost_its_disk_is_restored_from_the_disks_of_the_others(tmp_path: Path) -> None:
    disks = {name: tmp_path / f"disk of {name}" for name in GROUPS}
    common = {"trainer": TRAINER, "storage": str(tmp_path / "storage"), "min_replica_size": 2}
    with running_job(tmp_path / "job", pause_s=0.02, save_at=[5], tier="local", **common) as job:

        def start() -> list[Rank]:
            return [rank for name in GROUPS for rank in job.start(name, local=str(disks[name]))]

        ranks = start()
        restored(ranks)
        await_saved(ranks, 5)
        ranks[0].wait_for_step(7)
        kill_all(ranks)
        before = digests_by_step(ranks)

        shutil.rmtree(disks["b"])
        ranks = start()
        events = restored(ranks)
        assert [(e["source"], e["step"], e["digest"]) for e in events] == [("local disk", 5, before[5])] * 2
        assert events[0]["bytes_from_storage"] > 0
        assert events[1]["bytes_from_storage"] == 0 < events[1]["bytes_from_peers"]
        ranks[0].wait_for_step(7)
        kill_all(ranks)
        assert digests_by_step(ranks)[6] == before[6]

        for disk in disks.values():
            shutil.rmtree(disk, ignore_errors=True)
        for rank in start():  # the lighthouse has heard of it: without the operator's word nobody begins anew
            event = rank.wait_for(lambda e: e["event"] in ("refused", "restored"))
            assert (event["event"], event.get("error")) == ("refused", "CheckpointNotFoundError"), event
            assert "can read step-000000000005" in event["message"]


def flip_a_bit(checkpoint: Path, manifest: str) -> str:
    """Flip one in the middle of a part's largest piece; return the name of the file."""
    part = json.loads((checkpoint / manifest).read_text().split("\n", 1)[1])
    piece = max(part["pieces"], key=lambda piece: piece["length"])
    path = checkpoint / part["files"][piece["file"]]["name"]
    data = bytearray(path.read_bytes())
    data[piece["data_offset"] + 5] ^= 0b100
    path.write_bytes(data)
    return path.name


def wait_for_file(storage: Path, name: str, *, of_step: int) -> None:
    until = time.monotonic() + 120
    while not list(storage.glob(f"step-{of_step:012d}.*/{name}")):
        assert time.monotonic() < until, f"no {name} of step {of_step}"
        time.sleep(0.01)


def log_of(rank: Rank) -> list[str]:
    return rank.log().splitlines()
