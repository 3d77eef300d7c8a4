"""Measures how many bytes are read for those needed, where a checkpoint of two ranks is loaded on four."""

from __future__ import annotations

from typing import Any

from bench.durable_group import directory, ranks
from bench.durable_model import FSDP
from bench.durable_worker import ALONE, DCP, OURS
from bench.run import Run
from bench.stats import judge_at_most
from bench.table import Row, Section

BAR = 1.05


def measure(run: Run) -> Section:
    """Save FSDP over 2 with both, load each with its own on FSDP over 4; matrices along dimension 0, then 1."""
    raw: dict[str, dict[str, Any]] = {}
    rows = []
    with directory() as root:
        with ranks(run, 2, "two") as job:
            for dim in (0, 1):
                ours = root / f"ours-{dim}"
                ours.mkdir()
                job.hold(FSDP, dim=dim, quick=run.quick, version=dim + 1)
                job.all("open", location=str(ours))
                job.save(OURS, ours, 1)
                job.save(DCP, root / f"dcp-{dim}", 1)
        with ranks(run, 4, "four") as job:
            for dim in (0, 1):
                job.hold(FSDP, dim=dim, quick=run.quick)
                needed = sum(job.held_bytes)
                read: dict[str, int] = {}
                for how, place in (
                    (ALONE, root / f"ours-{dim}"),
                    (OURS, root / f"ours-{dim}"),
                    (DCP, root / f"dcp-{dim}"),
                ):
                    _, answers = job.load(how, place, dim + 1)
                    read[how] = sum(answer["read_bytes"] for answer in answers)
                    run.say(f"dimension {dim}, {how}: {read[how] / needed:.4f}")
                raw[f"dimension {dim}"] = {"needed": needed, "unique": job.unique_bytes, **read}
                part = read[ALONE] / needed
                rows.append(
                    Row(
                        figure=f"  2 to 4, dimension {dim}, each rank by itself",
                        ours=f"{part:.4f}x",
                        reference=f"{read[DCP] / needed:.4f}x",
                        bar=f"<= {BAR}x",
                        verdict=judge_at_most(part, BAR),
                    )
                )
                rows.append(
                    Row(
                        figure="    all together (Checkpointer.load), over unique bytes",
                        ours=f"{read[OURS] / job.unique_bytes:.4f}x",
                        reference=f"{read[DCP] / job.unique_bytes:.4f}x",
                    )
                )
    notes = [
        f"{job.unique_bytes / 1e6:.0f} MB of unique state, each library's own checkpoint; needed: what the 4 ranks "
        "hold, added up; read: what the operating system returned of all files, manifests, digests and metadata too; "
        "all bits checked",
    ]
    return Section(name="reshard", title="Bytes read over bytes needed, re-sharding", rows=rows, notes=notes, raw=raw)
