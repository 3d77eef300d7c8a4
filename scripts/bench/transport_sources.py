"""Measures what three sources are worth to a receiver whose own link is not the limit, beside one of them."""

from __future__ import annotations

from bench.stats import median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import MIB, judge_at_least, median_ratio, rate, spread
from bench.transport_links import LINK_RATE, LinksUnavailableError
from bench.transport_links_peers import Busy, linked_peers, receive_together, shape_of, skipped
from bench.transport_peer import check_equal
from bench.transport_run import Run

BAR = 2.7
NAME = "three_sources"
TITLE = f"Three sources, each on a {LINK_RATE} link"
_FIGURE = "times one source"


def measure(run: Run) -> Section:
    """Let one receiver recover from one source and from all three in turn."""
    total = (96 if run.quick else 256) * MIB
    busy = Busy()
    num_repeats = run.num_repeats(3, 1)
    times: dict[int, list[float]] = {1: [], 3: []}
    try:
        with linked_peers(run, "sources", [True, True, True, False], shape_of(total)) as (*sources, receiver):
            for number in range(2 * num_repeats):
                num_sources = 1 if number % 2 == 0 else 3
                for source in sources:
                    source.ask("fill", seed=run.seed + number + 1)
                for source in sources[:num_sources]:
                    source.ask("send", step=number + 1)
                with busy.watched():
                    times[num_sources].append(receive_together([receiver], sources[:num_sources], number + 1))
                check_equal(sources[0], [receiver])
                run.say(f"{num_sources} sources: {times[num_sources][-1]:.3f} s")
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, _FIGURE, f">= {BAR}x", error)
    gain = median_ratio(times[1], times[3])
    one_s, three_s = median(times[1]), median(times[3])
    rows = [
        Row(
            figure=f"  {_FIGURE}",
            ours=ratio(gain),
            reference="has one source",
            bar=f">= {BAR}x",
            verdict=judge_at_least(gain, BAR),
        ),
        Row(figure=f"    three (one: {seconds(one_s)})", ours=seconds(three_s)),
        Row(figure=f"    speed (one: {rate(total, one_s)})", ours=rate(total, three_s)),
    ]
    ratios = [a / b for a, b in zip(times[1], times[3], strict=True)]
    notes = [
        f"{total // MIB} MiB in tensors of 8 MiB, equal at all sources; each process in a network namespace, tc tbf on what "
        f"the sources send, the receiver's link without limit; in place, load_state_dict included; median of {num_repeats} "
        f"pairs in turn, ratios {spread(ratios)}; this machine's cores were {busy} busy",
    ]
    raw = {"one_s": times[1], "three_s": times[3]}
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)
