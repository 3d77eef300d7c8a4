"""Measures a state of very many small tensors, where what is done for each tensor counts and the bytes do not."""

from __future__ import annotations

from contextlib import ExitStack

from bench import sides
from bench.stats import median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import best_setting, judge_at_least, median_ratio, spread
from bench.transport_peer import Transfer, check_equal, raw_transfer, transfer
from bench.transport_run import Run, pair
from bench.transport_states import SHAPES

BAR = 10.0
AIM = 20.0


def _raw(run: Run, num_bytes: int, num_repeats: int) -> list[float]:
    """Let raw sockets carry as many bytes in two pieces."""
    times = []
    with pair(run, "raw", (2, num_bytes // 2), sides.OURS) as (source, receiver):
        for number in range(num_repeats + 1):
            source.ask("fill", seed=run.seed + number + 1)
            times.append(raw_transfer(source, receiver))
            check_equal(source, [receiver])
    run.say(f"raw: {[round(value, 4) for value in times]}")
    return times[1:]


def measure(run: Run) -> Section:
    """Let ours and every setting of the reference take turns, and judge the median of the ratios of neighbours."""
    shape = SHAPES["small"]
    num_repeats = run.num_repeats(9, 3)
    keys = [(sides.OURS, 0), *((sides.REFERENCE, setting) for setting in run.settings())]
    transfers: dict[tuple[str, int], list[Transfer]] = {key: [] for key in keys}
    with ExitStack() as stack:
        pairs = {key: stack.enter_context(pair(run, f"{key[0]}-{key[1]}", shape, *key)) for key in keys}
        for number in range(num_repeats + 1):
            for key, (source, receiver) in pairs.items():
                source.ask("fill", seed=run.seed + number + 1)
                transfers[key].append(transfer(source, receiver, step=number + 1))
                check_equal(source, [receiver])
                run.say(f"{key}: {transfers[key][-1]}")
    raw_times = _raw(run, shape[0] * shape[1], num_repeats)
    ours = transfers[sides.OURS, 0][1:]
    our_times = [took.total_s for took in ours]
    times = {key[1]: [took.total_s for took in transfers[key][1:]] for key in keys if key[0] == sides.REFERENCE}
    best = best_setting(times)
    best_times = [] if best is None else times[best]
    theirs = [] if best is None else transfers[sides.REFERENCE, best]
    gain = median_ratio(best_times, our_times) if best_times else None
    load_s, raw_s = median([took.load_s for took in ours]), median(raw_times)
    rows = [
        Row(
            figure=f"  times torchft's best (aim: {AIM:.0f}x)",
            ours=ratio(gain),
            bar=f">= {BAR:.0f}x",
            verdict=judge_at_least(gain, BAR),
        ),
        Row(
            figure="    the most there is: raw sockets and load_state_dict alone",
            ours=ratio(_over(median(best_times), load_s, raw_s)),
        ),
        Row(
            figure="    serve, receive and load",
            ours=seconds(median(our_times)),
            reference=seconds(median(best_times)),
        ),
    ]
    for name, what in (("send_s", "serve"), ("receive_s", "receive"), ("load_s", "load")):
        rows.append(
            Row(
                figure=f"    of it {what}",
                ours=seconds(median([getattr(took, name) for took in ours])),
                reference=seconds(median([getattr(took, name) for took in theirs[1:]])),
            )
        )
    rows.append(
        Row(
            figure="    the first in new processes",
            ours=seconds(transfers[sides.OURS, 0][0].total_s),
            reference=seconds(theirs[0].total_s if theirs else None),
        )
    )
    gains = [b / a for a, b in zip(our_times, best_times, strict=True)] if best_times else []
    notes = [
        f"{shape[0]} tensors of 10 KiB, other values each time; two processes a side, median of {num_repeats} in turn "
        f"after one that is not counted, ratios {spread(gains)}",
        f"torchft's best num_chunks: {best} of {sorted(times)}; ours receives in place",
        f"raw: sendall and recv_into of as many bytes in two pieces, over two streams, {seconds(raw_s)}",
    ]
    raw = {"ours_s": our_times, "torchft_s": times, "raw_s": raw_times}
    return Section(name="small", title="6,400 tensors of 10 KiB", rows=rows, notes=notes, raw=raw)


def _over(best_s: float | None, load_s: float | None, raw_s: float | None) -> float | None:
    return None if best_s is None or load_s is None or raw_s is None else best_s / (load_s + raw_s)
