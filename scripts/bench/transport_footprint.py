"""Measures the memory that a transfer of 1 GiB takes beyond the model, in both processes, with no step in between."""

from __future__ import annotations

from bench import sides
from bench.stats import judge_at_most
from bench.table import Row, Section
from bench.transport_figures import MIB, mebibytes
from bench.transport_peer import check_equal, transfer
from bench.transport_run import Run, pair
from bench.transport_states import SHAPES

BAR_BYTES = 64 * MIB
_REFERENCE_CHUNKS = 4


def _once(run: Run, side: str, num_chunks: int, number: int) -> tuple[float, float]:
    with pair(run, f"{side}-{number}", SHAPES["large"], side, num_chunks) as (source, receiver):
        source.ask("fill", seed=run.seed + number + 1)
        source.ask("watch_memory")
        receiver.ask("watch_memory")
        transfer(source, receiver, step=number + 1)
        grown = (source.ask("memory")["growth_bytes"], receiver.ask("memory")["growth_bytes"])
        check_equal(source, [receiver])
    run.say(f"{side}: source {mebibytes(grown[0])}, receiver {mebibytes(grown[1])}")
    return grown


def measure(run: Run) -> Section:
    """Measure both sides in fresh processes; the worst of all repetitions counts."""
    ours = [_once(run, sides.OURS, 0, number) for number in range(run.num_repeats(3, 1))]
    theirs = []
    if sides.is_installed(sides.REFERENCE):
        theirs = [_once(run, sides.REFERENCE, _REFERENCE_CHUNKS, number) for number in range(run.num_repeats(2, 1))]
    rows = []
    for index, what in enumerate(("source, no step in between", "receiver, in place")):
        worst = max(grown[index] for grown in ours)
        rows.append(
            Row(
                figure=f"  {what}",
                ours=mebibytes(worst),
                reference=mebibytes(max((grown[index] for grown in theirs), default=None)),
                bar="< 64 MiB",
                verdict=judge_at_most(worst, BAR_BYTES - 1),
            )
        )
    notes = [
        "growth of the peak resident size that the kernel keeps (VmHWM, reset before), from before send_checkpoint until "
        f"the state was loaded; fresh processes, the worst of {len(ours)}; the kernel's socket buffers are not in it",
        f"torchft: num_chunks {_REFERENCE_CHUNKS}; its receiver always gets a copy of its own",
    ]
    raw = {"ours_bytes": ours, "torchft_bytes": theirs}
    return Section(name="memory", title="Memory beyond the model, 1 GiB", rows=rows, notes=notes, raw=raw)
