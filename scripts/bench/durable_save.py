"""Measures what a save leaves on disk, who wrote it, and how long it takes until it is closed, beside DCP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.durable_group import Ranks, clean, directory, place_of, ranks, sizes_of
from bench.durable_model import FSDP, HSDP, WHOLE
from bench.durable_worker import ALONE, DCP, DCP_ASYNC, DCP_ASYNC_LOCAL, DCP_LOCAL, GROUPS, OURS
from bench.run import Run
from bench.stats import Verdict, judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import MIB, spread

SIZE_BAR = 1.01
LOADED_BAR = 1.1
WALL_BAR = 1.0
NUM_RANKS = 4
_WRITER = re.compile(r"\A(?:(?:__|part-)r(?P<replica>\d+)[_-]g(?P<rank>\d+)[_-]|__(?P<dcp>\d+)[_.])")


def written_by(sizes: Mapping[str, int], ranks_of_group: int) -> dict[int, int]:
    """Return the bytes that each rank wrote, from the names of files. What bears no rank was written by the first."""
    loads: dict[int, int] = {}
    for name, size in sizes.items():
        found = _WRITER.match(name)
        rank = 0
        if found is not None:
            dcp = found["dcp"]
            rank = int(dcp) if dcp else int(found["replica"]) * ranks_of_group + int(found["rank"])
        loads[rank] = loads.get(rank, 0) + size
    return loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one save left on disk."""

    unique_bytes: int
    file_bytes: int
    by_rank: dict[int, int]

    @property
    def over_unique(self) -> float:
        """Bytes of all files over those of the state."""
        return self.file_bytes / self.unique_bytes

    @property
    def most_loaded(self) -> float:
        """Bytes of the rank that wrote the most, over the mean."""
        return max(self.by_rank.values()) / (sum(self.by_rank.values()) / NUM_RANKS)


def _store(job: Ranks, how: str, root: Path, step: int, ranks_of_group: int = NUM_RANKS) -> Stored:
    clean(root)
    job.all("fill", version=step)
    job.save(how, place_of(how, root, step), step)
    sizes = sizes_of(root)
    return Stored(
        unique_bytes=job.unique_bytes, file_bytes=sum(sizes.values()), by_rank=written_by(sizes, ranks_of_group)
    )


def _rows(figure: str, stored: dict[str, Stored], value_of: Callable[[Stored], float], bar: float) -> list[Row]:
    theirs = f"{value_of(stored[DCP]):.3f}x; rank-local {value_of(stored[DCP_LOCAL]):.3f}x"
    return [
        Row(
            figure=f"  {figure}, {name}",
            ours=f"{value_of(stored[how]):.4f}x",
            reference=reference,
            bar=f"<= {bar}x",
            verdict=judge_at_most(value_of(stored[how]), bar),
        )
        for how, name, reference in ((OURS, "one world of 4", theirs), (GROUPS, "two groups of 2", ""))
    ]


def measure_size(run: Run) -> Section:
    """Save each way once; what is on disk is loaded and checked, ours by DCP too."""
    stored: dict[str, Stored] = {}
    with directory() as root:
        ours = root / "ours"
        ours.mkdir()
        with ranks(run, NUM_RANKS, "hsdp") as job:
            job.hold(HSDP, quick=run.quick)
            held = sum(job.held_bytes)
            job.all("open", location=str(ours))
            stored[DCP] = _store(job, DCP, root, 1)
            job.load(DCP, place_of(DCP, root, 1), 1)
            stored[DCP_LOCAL] = _store(job, DCP_LOCAL, root, 2)
            job.load(DCP, place_of(DCP, root, 2), 2)
            stored[OURS] = _store(job, OURS, root, 3)
            for how, place in ((OURS, ours), (ALONE, ours), (DCP, next(ours.iterdir()))):
                job.load(how, place, 3)
        with ranks(run, NUM_RANKS // 2, "groups", num_groups=2) as job:
            job.hold(FSDP, quick=run.quick)
            stored[GROUPS] = _store(job, GROUPS, root, 4, NUM_RANKS // 2)
            job.load(ALONE, ours, 4)
            job.hold(WHOLE, quick=run.quick)
            job.load(ALONE, ours, 4)
    for how, one in stored.items():
        run.say(f"{how}: {one}, {one.over_unique:.4f}, {one.most_loaded:.4f}")
    rows = [
        *_rows("bytes on disk over unique bytes", stored, lambda one: one.over_unique, SIZE_BAR),
        *_rows("bytes written by the most loaded rank over mean", stored, lambda one: one.most_loaded, LOADED_BAR),
    ]
    notes = [
        f"HSDP 2 x 2, {stored[OURS].unique_bytes / 1e6:.0f} MB of unique state ({held / 1e6:.0f} MB held by the 4 ranks): "
        "parameters and Adam's moments in float32, sharded over 2 and replicated over 2; norms and a bfloat16 table plain, on "
        "all; all files count: data, digests, manifests, metadata",
        "every element has bits of its own, and every save was loaded and all bits checked: ours by Checkpointer.load, by each "
        "rank alone, by plain dcp.load, and from two groups by each rank whole",
        "DCP rank-local: use_collectives=False",
    ]
    return Section(
        name="size",
        title="What a save leaves on disk",
        rows=rows,
        notes=notes,
        raw={how: asdict(one) for how, one in stored.items()},
    )


def measure_wall(run: Run) -> Section:
    """Save in turn with ours and each of DCP's ways, into clean directories, and wait until the last rank knows it closed."""
    ways = (OURS, DCP, DCP_ASYNC, DCP_LOCAL, DCP_ASYNC_LOCAL)
    times: dict[str, list[float]] = {how: [] for how in ways}
    num_repeats = run.num_repeats(7, 3)
    step = 0
    with directory() as root, ranks(run, NUM_RANKS, "hsdp") as job:
        (root / "ours").mkdir()
        job.hold(HSDP, quick=run.quick)
        job.all("open", location=str(root / "ours"))
        for number in range(-1, num_repeats):
            # Ours and DCP's plain save follow each other, either of them first in turn.
            for how in ways if number % 2 else (DCP, OURS, *ways[2:]):
                step += 1
                clean(root)
                took_s = job.save(how, place_of(how, root, step), step)
                run.say(f"{how}: {took_s:.3f} s")
                if number >= 0:
                    times[how].append(took_s)
        clean(root)
        job.all("fill", version=step + 1)
        job.save(OURS, root / "ours", step + 1)
        job.load(OURS, root / "ours", step + 1)
    ratios = pair_ratios(times[OURS], times[DCP])
    middle = median(ratios)
    rows = [
        Row(
            figure="  time until closed, over dcp.save with collectives",
            ours=ratio(middle),
            bar=f"<= {WALL_BAR}x",
            verdict=judge_at_most(middle, WALL_BAR),
        ),
        Row(figure="    ours; dcp.save", ours=seconds(median(times[OURS])), reference=seconds(median(times[DCP]))),
        *(
            Row(figure=f"    {name}", ours="", reference=seconds(median(times[how])), verdict=Verdict.NO_BAR)
            for how, name in (
                (DCP_ASYNC, "dcp.async_save"),
                (DCP_LOCAL, "dcp.save, use_collectives=False"),
                (DCP_ASYNC_LOCAL, "dcp.async_save, use_collectives=False"),
            )
        ),
    ]
    notes = [
        f"{job.unique_bytes / 1e6:.0f} MB of unique state, 4 processes on one disk, fsync on in both, a clean directory each "
        "time; from the common start until the last rank knows that it is closed; nobody trains meanwhile",
        f"median of {num_repeats} alternating pairs, ratios {spread(ratios)}; "
        f"ours {job.unique_bytes / MIB / (median(times[OURS]) or 1):.0f} MiB/s",
    ]
    return Section(name="wall", title="How long a save takes", rows=rows, notes=notes, raw=times)
