"""Measures the first recovery of a fresh process: 1 GiB into a live model, beside the reference's best setting.

Both processes are new each time, on both sides: nothing is warm but the model's own memory.
"""

from __future__ import annotations

from bench import sides
from bench.stats import median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import best_setting, judge_at_least, median_ratio, rate, spread
from bench.transport_peer import Transfer, check_equal, raw_transfer, transfer
from bench.transport_run import Run, pair
from bench.transport_states import SHAPES

BAR = 3.0
BAR_WITHOUT_PLACE = 1.5


def _once(
    run: Run, shape: tuple[int, int], side: str, num_chunks: int, number: int, *, in_place: bool = True
) -> Transfer:
    with pair(run, f"{side}-{num_chunks}-{number}", shape, side, num_chunks) as (source, receiver):
        source.ask("fill", seed=run.seed + number + 1)
        took = transfer(source, receiver, step=number + 1, in_place=in_place)
        check_equal(source, [receiver])
    run.say(f"{side} chunks={num_chunks}: {took}")
    return took


def _raw_once(run: Run, shape: tuple[int, int], number: int) -> float:
    with pair(run, f"raw-{number}", shape, sides.OURS) as (source, receiver):
        source.ask("fill", seed=run.seed + number + 1)
        took_s = raw_transfer(source, receiver)
        check_equal(source, [receiver])
    run.say(f"raw: {took_s:.3f} s")
    return took_s


def measure(run: Run) -> Section:
    """Measure ours and each setting of the reference in turn, and judge the median of the ratios."""
    shape = SHAPES["large"]
    num_bytes = shape[0] * shape[1]
    ours: list[Transfer] = []
    raw_times: list[float] = []
    reference: dict[int, list[Transfer]] = {setting: [] for setting in run.settings()}
    for number in range(run.num_repeats(5, 1)):
        ours.append(_once(run, shape, sides.OURS, 0, number))
        raw_times.append(_raw_once(run, shape, number))
        for setting, transfers in reference.items():
            transfers.append(_once(run, shape, sides.REFERENCE, setting, number))
    our_times = [took.total_s for took in ours]
    times = {setting: [took.total_s for took in transfers] for setting, transfers in reference.items()}
    best = best_setting(times)
    best_times = [] if best is None else times[best]
    gain = median_ratio(best_times, our_times) if best_times else None
    our_s, best_s = median(our_times), median(best_times)
    rows = [
        Row(
            figure="  times torchft's best",
            ours=ratio(gain),
            bar=f">= {BAR:.0f}x",
            verdict=judge_at_least(gain, BAR),
        ),
        Row(
            figure="    the most there is: raw sockets, times torchft's best",
            ours=ratio(median_ratio(best_times, raw_times) if best_times else None),
        ),
        Row(figure="    serve, receive and load", ours=seconds(our_s), reference=seconds(best_s)),
        Row(figure="    of it serve", ours=_part(ours, "send_s"), reference=_part(reference.get(best or 0), "send_s")),
        Row(figure="    of it load", ours=_part(ours, "load_s"), reference=_part(reference.get(best or 0), "load_s")),
        Row(figure="    speed", ours=rate(num_bytes, our_s), reference=rate(num_bytes, best_s)),
    ]
    notes = [
        f"{shape[0]} float32 tensors of 64 MiB over loopback, new processes on both ends each time, median of "
        f"{len(ours)} side by side; the state was checked bit by bit",
        "time from send_checkpoint to the end of load_state_dict, without process start; ours receives in place",
        "raw: sendall and recv_into over two streams, in new processes too, connections open before, no digests, nothing loaded",
    ]
    if best is not None:
        notes.append(_settings_tried(times, best, our_times))
    raw = {"ours_s": our_times, "torchft_s": times, "raw_s": raw_times}
    return Section(name="first", title="First recovery of a fresh process, 1 GiB", rows=rows, notes=notes, raw=raw)


def _settings_tried(times: dict[int, list[float]], best: int, ours: list[float]) -> str:
    gains = [b / a for a, b in zip(ours, times[best], strict=True)]
    tried = ", ".join(f"{setting}: {seconds(median(values))}" for setting, values in times.items())
    return f"torchft's num_chunks {tried}; beside the best, {best}, ratios {spread(gains)}"


def measure_without_place(run: Run) -> Section:
    """Measure the default path, where no memory is given: ours, and each setting of the reference in turn."""
    shape = SHAPES["large"]
    num_bytes = shape[0] * shape[1]
    ours: list[float] = []
    reference: dict[int, list[float]] = {setting: [] for setting in run.settings()}
    for number in range(run.num_repeats(5, 1)):
        ours.append(_once(run, shape, sides.OURS, 0, number, in_place=False).receive_s)
        for setting, times in reference.items():
            times.append(_once(run, shape, sides.REFERENCE, setting, number).receive_s)
    best = best_setting(reference)
    best_times = [] if best is None else reference[best]
    gain = median_ratio(best_times, ours) if best_times else None
    our_s, best_s = median(ours), median(best_times)
    rows = [
        Row(
            figure="  times torchft's best",
            ours=ratio(gain),
            bar=f">= {BAR_WITHOUT_PLACE:.1f}x",
            verdict=judge_at_least(gain, BAR_WITHOUT_PLACE),
        ),
        Row(figure="    recv_checkpoint", ours=seconds(our_s), reference=seconds(best_s)),
        Row(figure="    speed", ours=rate(num_bytes, our_s), reference=rate(num_bytes, best_s)),
    ]
    notes = [
        f"{shape[0]} float32 tensors of 64 MiB over loopback, new processes on both ends each time, median of "
        f"{len(ours)} side by side; the state was checked bit by bit",
        "time of recv_checkpoint alone, into memory that the process has not used before, on both sides",
    ]
    if best is not None:
        notes.append(_settings_tried(reference, best, ours))
    raw = {"ours_s": ours, "torchft_s": reference}
    title = "First recovery of a fresh process without a place given, 1 GiB"
    return Section(name="first_without_place", title=title, rows=rows, notes=notes, raw=raw)


def _part(transfers: list[Transfer] | None, name: str) -> str:
    return seconds(median([getattr(took, name) for took in transfers or []]))
