"""Measures a cold start of four groups that all want the whole state: what storage gives, who reads it, how long it takes."""

from __future__ import annotations

import contextlib
from typing import Any

from bench.durable_counting import drop_cached
from bench.durable_group import directory, ranks
from bench.durable_model import HSDP, WHOLE
from bench.durable_save import NUM_RANKS
from bench.durable_worker import ALONE, DCP, OURS
from bench.run import Run
from bench.stats import judge_at_most, median
from bench.table import Row, Section, seconds
from torchft_ckpt import LighthouseServer

BAR = 1.02


def measure(run: Run) -> Section:
    """Save HSDP 2 x 2 with both, and load all of it in four processes: as groups that start together, alone, and with DCP."""
    times: dict[str, list[float]] = {ALONE: [], OURS: [], DCP: []}
    read: dict[str, list[int]] = {}
    peers: list[int] = []
    num_repeats = run.num_repeats(5, 2)
    with directory() as root:
        ours, alone, theirs = root / "ours", root / "alone", root / "dcp"
        for path in (ours, alone):
            path.mkdir()
        with ranks(run, NUM_RANKS, "hsdp") as job:
            job.hold(HSDP, quick=run.quick, version=7)
            for path in (ours, alone):
                job.all("open", location=str(path))
                job.save(OURS, path, 7, of_manager=path == ours)
            job.save(DCP, theirs, 7)
        server = LighthouseServer("127.0.0.1:0", min_replicas=NUM_RANKS)
        with ranks(run, NUM_RANKS, "groups") as job, contextlib.ExitStack() as at_end:
            at_end.callback(server.shutdown)
            job.hold(WHOLE, quick=run.quick)
            for number in range(-1, num_repeats):
                for how in times:
                    drop_cached(root)
                    if how == OURS:
                        took_s, answers = job.restore(ours, 7, lighthouse=server.address(), job=f"cold-{number}")
                    else:
                        took_s, answers = job.load(how, theirs if how == DCP else alone, 7)
                    read[how] = [answer["read_bytes"] for answer in answers]
                    if how == OURS:
                        peers = [answer["peer_bytes"] for answer in answers]
                    run.say(f"{how}: {took_s:.3f} s, {read[how]}")
                    if number >= 0:
                        times[how].append(took_s)
    unique = job.unique_bytes
    part = sum(read[OURS]) / unique
    rows = [
        Row(
            figure="  bytes from storage over unique bytes",
            ours=f"{part:.4f}x",
            reference=f"{sum(read[DCP]) / unique:.4f}x",
            bar=f"<= {BAR}x",
            verdict=judge_at_most(part, BAR),
        ),
        Row(
            figure="    time until the last has all",
            ours=seconds(median(times[OURS])),
            reference=seconds(median(times[DCP])),
        ),
        Row(
            figure="    time where every process reads all by itself with ours",
            ours=seconds(median(times[ALONE])),
        ),
    ]
    notes = [
        f"{unique / 1e6:.0f} MB of unique state, saved on HSDP 2 x 2, wanted whole by 4 processes, each a group of one "
        "rank; what the operating system returned of all files counts, manifests and digests too; the "
        "system's cache was dropped before, all bits checked",
        f"median of {num_repeats}; on one machine with one disk reading once saves nothing but bytes: the rest travels "
        f"over loopback ({sum(peers) / 1e6:.0f} MB), which costs the same cores",
    ]
    raw: dict[str, Any] = {"times_s": times, "read_bytes": read, "peer_bytes": peers, "unique_bytes": unique}
    return Section(name="cold", title="Cold start of 4 groups", rows=rows, notes=notes, raw=raw)
