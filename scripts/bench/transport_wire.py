"""Measures repeated recoveries beside raw sockets: the same two processes, the same memory, as many streams.

The source's values change before every transfer, so nothing can be skipped as unchanged; digests are on.
"""

from __future__ import annotations

from bench import sides
from bench.stats import median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import best_setting, judge_at_least, median_ratio, rate, spread
from bench.transport_peer import check_equal, transfer
from bench.transport_run import Run, pair
from bench.transport_states import SHAPES

BAR = 0.9


def measure(run: Run) -> Section:
    """Take turns with raw sockets, and judge the median of the ratios of neighbours."""
    shape = SHAPES["large"]
    num_bytes = shape[0] * shape[1]
    num_repeats = run.num_repeats(11, 5)
    our_times: list[float] = []
    raw_times: list[float] = []
    with pair(run, "ours", shape, sides.OURS) as (source, receiver):
        num_streams = receiver.num_streams
        port = source.ask("raw_listen", num_streams=num_streams)["port"]
        receiver.ask("raw_connect", port=port, num_streams=num_streams)
        for number in range(-1, num_repeats):
            step = 2 * (number + 2)
            source.ask("fill", seed=run.seed + step)
            took_s = transfer(source, receiver, step=step).total_s
            check_equal(source, [receiver])
            source.ask("fill", seed=run.seed + step + 1)
            raw_took_s = receiver.ask("raw_receive")["seconds"]
            check_equal(source, [receiver])
            run.say(f"{number}: ours {took_s:.3f} s, raw {raw_took_s:.3f} s")
            if number >= 0:
                our_times.append(took_s)
                raw_times.append(raw_took_s)
    times = {setting: _reference(run, shape, setting) for setting in run.settings()}
    best = best_setting(times)
    best_s = None if best is None else median(times[best])
    part = median_ratio(raw_times, our_times)
    our_s, raw_s = median(our_times), median(raw_times)
    rows = [
        Row(
            figure="  of the speed of raw sockets",
            ours=ratio(part),
            bar=f">= {BAR}x",
            verdict=judge_at_least(part, BAR),
        ),
        Row(figure=f"    a transfer (raw {seconds(raw_s)})", ours=seconds(our_s), reference=seconds(best_s)),
        Row(
            figure=f"    speed (raw {rate(num_bytes, raw_s)})",
            ours=rate(num_bytes, our_s),
            reference=rate(num_bytes, best_s),
        ),
    ]
    ratios = [b / a for a, b in zip(our_times, raw_times, strict=True)]
    notes = [
        f"{shape[0]} tensors of 64 MiB, two processes, {num_streams} streams; median of {num_repeats} pairs in turn after "
        f"one that is not counted, ratios {spread(ratios)}",
        "ours: send_checkpoint, fetch in place with digests, load_state_dict; raw: sendall of each tensor and recv_into "
        "into the same memory, connections kept open, TCP_NODELAY, one thread a stream; other values each time",
    ]
    if best is not None:
        notes.append(f"torchft: processes of its own, after these, num_chunks {best} of {sorted(times)}")
    raw = {"ours_s": our_times, "raw_s": raw_times, "torchft_s": times, "num_streams": num_streams}
    title = "Repeated recovery beside raw sockets, 1 GiB"
    return Section(name="repeated", title=title, rows=rows, notes=notes, raw=raw)


def _reference(run: Run, shape: tuple[int, int], setting: int) -> list[float]:
    times = []
    with pair(run, f"torchft-{setting}", shape, sides.REFERENCE, setting) as (source, receiver):
        for number in range(run.num_repeats(5, 2) + 1):
            source.ask("fill", seed=run.seed + number + 1)
            times.append(transfer(source, receiver, step=number + 1).total_s)
            check_equal(source, [receiver])
    run.say(f"torchft chunks={setting}: {[round(value, 3) for value in times]}")
    return times[1:]
