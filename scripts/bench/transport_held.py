"""Measures how long a trainer is held by a receiver that reads slowly, beside `clone()` of what that one has not got yet."""

from __future__ import annotations

from bench import sides
from bench.processes import Children
from bench.stats import judge_at_most, median, pair_ratios
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import MIB, mebibytes, spread
from bench.transport_peer import CommandFailedError, Peer
from bench.transport_reader import SlowReader
from bench.transport_run import Run
from bench.transport_states import SHAPES
from bench.transport_trainer import BY_DISALLOW, BY_HOOK

BAR = 1.5
_READ_BYTES_PER_S = 16e6
_READ_BEFORE_BYTES = 8 * MIB


class _Held:
    """The times of one way of holding the trainer up."""

    def __init__(self) -> None:
        self.held_s: list[float] = []
        self.clone_s: list[float] = []
        self.unsent_bytes: list[float] = []

    def ratios(self) -> list[float]:
        return pair_ratios(self.held_s, self.clone_s)


def _once(run: Run, source: Peer, side: str, by: str, number: int, into: _Held) -> None:
    """Serve, let the reader read some, then mutate: which state it gets in the end is checked for ours."""
    total = SHAPES["held"][0] * SHAPES["held"][1]
    source.ask("fill", seed=run.seed + number + 1)
    wanted = source.ask("digest")["digest"]
    source.ask("send", step=number + 1)
    reader = SlowReader(source.metadata, number + 1, is_ours=side == sides.OURS, bytes_per_s=_READ_BYTES_PER_S)
    reader.wait_until(_READ_BEFORE_BYTES)
    unsent = max(total - reader.num_bytes(), 0)
    answer = source.ask("mutate_after", by=by, clone_bytes=unsent, clone_first=bool(number // 2 % 2))
    reader.hurry()
    got = reader.finish()
    if side == sides.OURS and got != wanted:
        raise CommandFailedError("the slow reader got another state than the one of its step")
    run.say(
        f"{side} by {by}: held {answer['held_s']:.4f} s, clone {answer['clone_s']:.4f} s, unsent {mebibytes(unsent)}"
    )
    if number >= 0:
        into.held_s.append(answer["held_s"])
        into.clone_s.append(answer["clone_s"])
        into.unsent_bytes.append(unsent)


def measure(run: Run) -> Section:
    """Hold the trainer up both ways that there are with ours, and by the reference's only one."""
    ours = {BY_DISALLOW: _Held(), BY_HOOK: _Held()}
    theirs = _Held()
    num_repeats = run.num_repeats(9, 3)
    with Children(run.log_dir) as children:
        source = Peer(children, "ours", SHAPES["held"]).ready()
        for number in range(num_repeats):
            for offset, (by, held) in enumerate(ours.items()):
                _once(run, source, sides.OURS, by, 2 * number + offset, held)
        if sides.is_installed(sides.REFERENCE):
            source = Peer(children, "torchft", SHAPES["held"], side=sides.REFERENCE).ready()
            for number in range(run.num_repeats(2, 1)):
                _once(run, source, sides.REFERENCE, BY_DISALLOW, number, theirs)
    rows = []
    for by, what in ((BY_DISALLOW, "disallow_checkpoint"), (BY_HOOK, "the optimizer's pre-step hook")):
        middle = median(ours[by].ratios())
        their_ratio = median(theirs.ratios()) if by == BY_DISALLOW else None
        rows += [
            Row(
                figure=f"  {what}, over clone()",
                ours=ratio(middle),
                reference="" if their_ratio is None else f"{their_ratio:.0f}x",
                bar=f"<= {BAR}x",
                verdict=judge_at_most(middle, BAR),
            ),
            Row(
                figure=f"    held (clone() of what was unsent {seconds(median(ours[by].clone_s))})",
                ours=seconds(median(ours[by].held_s)),
                reference=seconds(median(theirs.held_s)) if by == BY_DISALLOW else "",
            ),
        ]
    notes = [
        f"a plain socket reads 64 MiB (16 tensors) at 16 MB/s; at {mebibytes(_READ_BEFORE_BYTES)} the trainer is to mutate; "
        f"clone() in the same process, just before or just after in turn, of the {mebibytes(median(ours[BY_HOOK].unsent_bytes))} "
        "that the reader had not got",
        f"median of {num_repeats} pairs, ratios {spread(ours[BY_DISALLOW].ratios())} and {spread(ours[BY_HOOK].ratios())}; "
        "the trainer mutated everything at once, and the reader got the state of its step bit by bit",
        "torchft: one GET of the whole state, as its own receiver sends with num_chunks 0",
    ]
    raw = {
        **{f"ours_{by}": {"held_s": held.held_s, "clone_s": held.clone_s} for by, held in ours.items()},
        "torchft": {"held_s": theirs.held_s, "clone_s": theirs.clone_s},
    }
    title = "Trainer held by a 16 MB/s reader of 64 MiB"
    return Section(name="held", title=title, rows=rows, notes=notes, raw=raw)
