"""Measures what a receiver makes of a source with two links: one slow and named first, both equal, one cut in the middle."""

from __future__ import annotations

from collections.abc import Sequence

from bench.processes import Children
from bench.stats import judge_at_most, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import MIB, judge_at_least, mebibytes, rate, spread
from bench.transport_links import LinksUnavailableError, ParallelLinks
from bench.transport_links_peers import Busy, shape_of, skipped
from bench.transport_peer import Peer, check_equal
from bench.transport_run import Run

NAME = "two_links"
TITLE = "One source on two links"
SLOW, FAST = 20, 200
BAR_SLOW_FIRST = 1.1
BAR_EQUAL = 0.85
_CUT_AT = 0.5
_BLOCK_BYTES = 4 * MIB
_FIGURE = f"{SLOW} and {FAST} MB/s, the slow one named first, times the fast one alone"


def _once(
    run: Run, rates: Sequence[int], total: int, number: int, busy: Busy, *, only: int = -1, cut: int = -1
) -> dict[str, float]:
    """Receive once; over one link where it is the only one that the source names, and with one of them cut at half."""
    name = f"two_links-{'-'.join(map(str, rates))}-{only}-{cut}-{number}"
    with ParallelLinks(rates) as links, Children(run.log_dir) as children:
        hosts = [links.hosts[only] if only >= 0 else "", "127.0.0.1"]
        peers = [
            Peer(children, f"{name}-{end}", shape_of(total), host=host, namespace=namespace)
            for end, host, namespace in zip(("source", "receiver"), hosts, links.namespaces, strict=True)
        ]
        source, receiver = [peer.ready() for peer in peers]
        source.ask("fill", seed=run.seed + number + 1)
        source.ask("send", step=number + 1)
        with busy.watched():
            receiver.begin("receive", sources=[source.metadata], step=number + 1, tell_at=_CUT_AT)
            if cut >= 0:
                receiver.wait_for("reached", 1)
                links.cut(cut)
            answer = receiver.answer()
        check_equal(source, [receiver])
        num_streams = receiver.num_streams
    result = {
        "took_s": answer["ended"] - answer["started"],
        "resent_bytes": answer.get("resent_bytes", 0),
        "num_streams": num_streams,
    }
    run.say(f"{rates} MB/s, only {only}, cut {cut}: {result}")
    return result


def measure(run: Run) -> Section:
    """Measure all in turn; the worst cut counts."""
    total = (256 if run.quick else 1024) * MIB
    busy = Busy()
    alone, slow_first, equal, cut = [], [], [], []
    try:
        for number in range(run.num_repeats(3, 1)):
            alone.append(_once(run, [SLOW, FAST], total, number, busy, only=1))
            slow_first.append(_once(run, [SLOW, FAST], total, number, busy))
            equal.append(_once(run, [FAST, FAST], total, number, busy))
            cut.append(_once(run, [FAST, FAST], total, number, busy, cut=number % 2))
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, _FIGURE, f"<= {BAR_SLOW_FIRST}x", error)
    times = {
        name: [one["took_s"] for one in of] for name, of in (("alone", alone), ("slow", slow_first), ("equal", equal))
    }
    growths = [slow / one for slow, one in zip(times["slow"], times["alone"], strict=True)]
    sums = [one / (2 * both) for both, one in zip(times["equal"], times["alone"], strict=True)]
    resent_bytes = max(one["resent_bytes"] for one in cut)
    in_flight_bytes = int(cut[0]["num_streams"]) * _BLOCK_BYTES
    rows = [
        Row(
            figure=f"  {_FIGURE}",
            ours=ratio(median(growths)),
            bar=f"<= {BAR_SLOW_FIRST}x",
            verdict=judge_at_most(median(growths), BAR_SLOW_FIRST),
        ),
        Row(
            figure=f"    both (the fast one alone {rate(total, median(times['alone']))})",
            ours=rate(total, median(times["slow"])),
        ),
        Row(
            figure=f"  {FAST} and {FAST} MB/s, of the sum of what each gives alone",
            ours=ratio(median(sums)),
            bar=f">= {BAR_EQUAL}x",
            verdict=judge_at_least(median(sums), BAR_EQUAL),
        ),
        Row(figure="    both", ours=rate(total, median(times["equal"]))),
        Row(
            figure=f"  sent again where one of them is cut at {_CUT_AT:.0%}",
            ours=mebibytes(resent_bytes),
            bar=f"<= {mebibytes(in_flight_bytes)}",
            verdict=judge_at_most(resent_bytes, in_flight_bytes),
        ),
        Row(figure="    the transfer", ours=seconds(median([one["took_s"] for one in cut]))),
    ]
    notes = [
        f"{total // MIB} MiB in tensors of 8 MiB, received in place; source and receiver in network namespaces, with a veth for"
        " each link, and tc tbf on what the source sends; its address is that of its default route, on the first link; the"
        f" state was checked bit by bit; median of {len(alone)} in turn, ratios {spread(growths)} and {spread(sums)}",
        "cut by taking the link down at the source, of which no connection hears; the bar: the blocks of 4 MiB in flight on it",
        f"this machine's cores were {busy} busy",
    ]
    raw = {"alone": alone, "slow_first": slow_first, "equal": equal, "cut": cut}
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)
