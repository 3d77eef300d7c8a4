"""Measures how long eight joiners take together from one source on a limited link, beside one joiner alone.

The joiners' links are limited too. They begin at one moment and live until all are done: they may serve each other.
"""

from __future__ import annotations

from contextlib import nullcontext

from bench import sides
from bench.stats import judge_at_most, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import MIB, median_ratio, spread
from bench.transport_links import LINK_RATE, LinksUnavailableError
from bench.transport_links_peers import Busy, linked_peers, receive_together, shape_of, skipped
from bench.transport_peer import check_equal
from bench.transport_run import Run

BAR = 1.5
NAME = "swarm"
TITLE = f"One source on a {LINK_RATE} link, eight joiners on such links"
_NUM_JOINERS = 8
_REFERENCE_BYTES = 64 * MIB
_FIGURE = "all eight, times one alone"


def _times(run: Run, side: str, total: int, num_repeats: int, busy: Busy) -> dict[int, list[float]]:
    """Return the seconds of one joiner and of all, measured in turn."""
    times: dict[int, list[float]] = {1: [], _NUM_JOINERS: []}
    with linked_peers(run, side, [True] * (_NUM_JOINERS + 1), shape_of(total), side) as (source, *joiners):
        for number in range(2 * num_repeats):
            some = joiners[: 1 if number % 2 == 0 else _NUM_JOINERS]
            for peer in (source, *joiners):
                peer.ask("fill", seed=run.seed + (number + 1 if peer is source else -1 - number))
            source.ask("send", step=number + 1, num_receivers=len(some))
            with busy.watched() if len(some) > 1 else nullcontext():
                times[len(some)].append(receive_together(some, [source], number + 1))
            check_equal(source, some)
            run.say(f"{side}: {len(some)} joiners: {times[len(some)][-1]:.3f} s")
    return times


def measure(run: Run) -> Section:
    """Measure ours; the reference only in the full form, because its time grows with the joiners."""
    total = (128 if run.quick else 256) * MIB
    busy = Busy()
    num_repeats = run.num_repeats(3, 1)
    theirs: dict[int, list[float]] = {1: [], _NUM_JOINERS: []}
    try:
        ours = _times(run, sides.OURS, total, num_repeats, busy)
        if not run.quick and sides.is_installed(sides.REFERENCE):
            theirs = _times(run, sides.REFERENCE, _REFERENCE_BYTES, 1, Busy())
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, _FIGURE, f"<= {BAR}x", error)
    growth = median_ratio(ours[_NUM_JOINERS], ours[1])
    rows = [
        Row(
            figure=f"  {_FIGURE}",
            ours=ratio(growth),
            reference=ratio(median_ratio(theirs[_NUM_JOINERS], theirs[1])),
            bar=f"<= {BAR}x",
            verdict=judge_at_most(growth, BAR),
        ),
        Row(
            figure=f"    all eight (one alone {seconds(median(ours[1]))})",
            ours=seconds(median(ours[_NUM_JOINERS])),
            reference=f"{seconds(median(theirs[_NUM_JOINERS]))} ({seconds(median(theirs[1]))})"
            if theirs[1]
            else "not run",
        ),
    ]
    ratios = [a / b for a, b in zip(ours[_NUM_JOINERS], ours[1], strict=True)]
    notes = [
        f"{total // MIB} MiB in tensors of 8 MiB; nine processes, each in a network namespace with tc tbf on what it sends; "
        "from one common moment until the last one has loaded the state, which was checked bit by bit; "
        f"median of {num_repeats} pairs in turn, ratios {spread(ratios)}",
        f"with all eight this machine's cores were {busy} busy",
        f"torchft: {_REFERENCE_BYTES // MIB} MiB, once, in the full form only",
    ]
    raw = {
        "ours_one_s": ours[1],
        "ours_all_s": ours[_NUM_JOINERS],
        "torchft_one_s": theirs[1],
        "torchft_all_s": theirs[_NUM_JOINERS],
    }
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)
