"""Counts the bytes that are sent again when one of two sources is killed with 90 % of the state received.

Counted twice: by the receiver's own progress, and by its link, as TCP payload beyond the state's bytes.
"""

from __future__ import annotations

from bench.stats import judge_at_most
from bench.table import Row, Section, seconds
from bench.transport_figures import MIB, mebibytes
from bench.transport_links import LINK_RATE, LinksUnavailableError
from bench.transport_links_peers import linked_peers, received_payload, shape_of, skipped
from bench.transport_peer import CommandFailedError, check_equal
from bench.transport_run import Run

NAME = "failover"
TITLE = f"A source killed at 90 %, another at hand, each on a {LINK_RATE} link"
_FIGURE = "sent again, by the receiver's link"
_KILL_AT = 0.9
_BLOCK_BYTES = 4 * MIB


def _once(run: Run, total: int, number: int, kills: bool) -> dict[str, float]:
    """Recover from two sources; with `kills`, the first of them is killed on the way."""
    with linked_peers(run, f"failover-{number}-{kills}", [True, True, False], shape_of(total)) as peers:
        first, second, receiver = peers
        for source in (first, second):
            source.ask("fill", seed=run.seed + number + 1)
            source.ask("send", step=number + 1)
        before = received_payload(receiver)
        receiver.begin("receive", sources=[first.metadata, second.metadata], step=number + 1, tell_at=_KILL_AT)
        reached = receiver.wait_for("reached", 1)["received_bytes"]
        if not reached:
            receiver.answer()
            raise CommandFailedError(f"the receiver did not report {_KILL_AT:.0%} of the state before it had all of it")
        if kills:
            first.kill()
        answer = receiver.answer()
        result = {
            "reached": reached / total,
            "beyond_bytes": received_payload(receiver) - before - total,
            "resent_bytes": answer["resent_bytes"],
            "took_s": answer["ended"] - answer["started"],
            "num_streams": receiver.num_streams,
        }
        check_equal(second, [receiver])
    run.say(f"kill={kills}: {result}")
    return result


def measure(run: Run) -> Section:
    """Recover with and without a kill in turn; the worst kill counts."""
    total = (96 if run.quick else 256) * MIB
    num_repeats = run.num_repeats(3, 1)
    try:
        plain = [_once(run, total, number, False) for number in range(num_repeats)]
        killed = [_once(run, total, number, True) for number in range(num_repeats)]
    except LinksUnavailableError as error:
        return skipped(NAME, TITLE, _FIGURE, "blocks in flight", error)
    bar_bytes = int(killed[0]["num_streams"]) * _BLOCK_BYTES
    usual_bytes = min(result["beyond_bytes"] for result in plain)
    by_link = max(result["beyond_bytes"] for result in killed) - usual_bytes
    by_progress = max(result["resent_bytes"] for result in killed)
    bar = f"<= {mebibytes(bar_bytes)}"
    rows = [
        Row(
            figure=f"  {_FIGURE}",
            ours=mebibytes(by_link),
            reference="starts again",
            bar=bar,
            verdict=judge_at_most(by_link, bar_bytes),
        ),
        Row(
            figure="  sent again, by its own progress",
            ours=mebibytes(by_progress),
            bar=bar,
            verdict=judge_at_most(by_progress, bar_bytes),
        ),
        Row(
            figure=f"    the transfer (without the kill {seconds(max(r['took_s'] for r in plain))})",
            ours=seconds(max(result["took_s"] for result in killed)),
        ),
    ]
    notes = [
        f"{total // MIB} MiB from two sources in network namespaces, the first killed by SIGKILL once the receiver reports "
        f"{min(r['reached'] for r in killed):.1%} received; the bar: {int(killed[0]['num_streams'])} streams of blocks of 4 MiB; "
        f"the worst of {num_repeats}; the state was checked bit by bit",
        "by the link: bytes and packets of the receiver's interface, less headers, less the state, less what a transfer "
        f"without a kill has beyond it (heads of requests and answers, {usual_bytes:.0f} bytes)",
    ]
    raw = {"plain": plain, "killed": killed}
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)
