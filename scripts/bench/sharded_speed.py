"""Measures how fast a group recovers its sharded model from another group's, beside the plain transport's rate.

The plain transport moves as many bytes as plain tensors, between as many source processes and two receivers. Both take turns
in the same processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bench.run import Run
from bench.sharded_group import Group, Received, groups
from bench.sharded_layouts import shards
from bench.stats import Verdict, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_figures import MIB, judge_at_least, median_ratio, rate, spread

SAME_BAR, ROWS_BAR, COLUMNS_BAR = 0.85, 0.7, 0.4
_SHAPE = (4096, 4096)
_TENSOR_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is moved: from 2 ranks that are sharded along one dimension to as many or more, by what call; see `Worker.receive`."""

    source_dim: int = 0
    target_dim: int = 0
    num_receivers: int
    how: str

    @property
    def source_model(self) -> str:
        return f"2 along {self.source_dim}"

    @property
    def target_model(self) -> str:
        return f"{self.num_receivers} along {self.target_dim}"


_PLAIN = "plain"
_MORE = "plain, 4 receivers"


def measure_same(run: Run) -> Section:
    """Recover onto the same layout."""
    cases = {
        "same layout, group of 2": _Case(num_receivers=2, how="same"),
        "the same by boxes": _Case(num_receivers=2, how="reshard"),
    }
    return _measure(run, "sharded_same", "Sharded recovery onto the same layout", cases, SAME_BAR)


def measure_rows(run: Run) -> Section:
    """Recover a group of 4 from one of 2, both sharded along dimension 0."""
    cases = {"2 to 4 along dimension 0": _Case(num_receivers=4, how="reshard")}
    return _measure(run, "sharded_dim0", "Re-sharding 2 to 4 along dimension 0", cases, ROWS_BAR)


def measure_columns(run: Run) -> Section:
    """Recover a group of 4 that is sharded along dimension 1 from one of 2 that is too; from one along dimension 0 beside it."""
    cases = {
        "2 to 4 along dimension 1": _Case(source_dim=1, target_dim=1, num_receivers=4, how="reshard"),
        "2 along dimension 0 to 4 along 1": _Case(target_dim=1, num_receivers=4, how="reshard"),
    }
    return _measure(run, "sharded_dim1", "Re-sharding 2 to 4 along dimension 1", cases, COLUMNS_BAR)


def _measure(run: Run, name: str, title: str, cases: dict[str, _Case], bar: float) -> Section:
    """Have the plain transport and the cases take turns; judge the first case."""
    num_tensors = 4 if run.quick else 16
    num_repeats = run.num_repeats(7, 5)
    num_receivers = max(case.num_receivers for case in cases.values())
    plain = {_PLAIN: _Case(num_receivers=2, how="plain")}
    if num_receivers > 2:
        plain[_MORE] = _Case(num_receivers=num_receivers, how="plain")
    times: dict[str, list[Received]] = {label: [] for label in (*plain, *cases)}
    with groups(run, 2, num_receivers) as (sources, receivers):
        _hold(sources, receivers, [*plain.values(), *cases.values()], num_tensors)
        step = 0
        for number in range(-1, num_repeats):
            in_turn = list((plain | cases).items())
            for label, case in in_turn if number % 2 else reversed(in_turn):
                step += 1
                received = _move(sources, receivers, case, run.seed + step, step)
                run.say(f"{number}: {label}: {received}")
                if number >= 0:
                    times[label].append(received)
    return _section(name, title, times, bar, num_tensors, num_repeats)


def _hold(sources: Group, receivers: Group, cases: list[_Case], num_tensors: int) -> None:
    """Have every model made that is needed, each once."""
    shapes = [_SHAPE] * num_tensors
    for source_dim in {case.source_dim for case in cases}:
        sources.hold(f"2 along {source_dim}", shards(2, source_dim), shapes)
    for case in {case.target_model: case for case in cases}.values():
        layout = shards(case.num_receivers, case.target_dim)
        receivers.first(case.num_receivers).hold(case.target_model, layout, shapes)


def _move(sources: Group, receivers: Group, case: _Case, seed: int, step: int) -> Received:
    """Give the sources other values, let the receivers recover, check every bit."""
    taking = receivers.first(case.num_receivers)
    addresses = sources.addresses()
    plain_parts = 0
    if case.how == "plain":
        plain_parts = case.num_receivers // sources.num_ranks
        addresses = sources.all_addresses(plain_parts)
    num_expected = case.num_receivers if case.how == "reshard" else 1
    sources.serve(case.source_model, seed, step, plain_parts=plain_parts, num_receivers=num_expected)
    sources_cpu_s = sources.cpu_s()
    received = taking.receive(case.target_model, [addresses], step, case.how)
    sources_cpu_s = sources.cpu_s() - sources_cpu_s
    taking.check(case.target_model, seed)
    return Received(wall_s=received.wall_s, receivers_cpu_s=received.receivers_cpu_s, sources_cpu_s=sources_cpu_s)


def _section(
    name: str, title: str, times: dict[str, list[Received]], bar: float, num_tensors: int, num_repeats: int
) -> Section:
    num_bytes = num_tensors * _TENSOR_BYTES
    walls = {label: [received.wall_s for received in of_label] for label, of_label in times.items()}
    judged = next(label for label in walls if label not in (_PLAIN, _MORE))
    rows = []
    for label, of_label in walls.items():
        if label == _PLAIN:
            continue
        part = median_ratio(walls[_PLAIN], of_label)
        is_judged = label == judged
        rows.append(
            Row(
                figure=f"  {label}, of the plain rate",
                ours=ratio(part),
                bar=f">= {bar}x" if is_judged else "",
                verdict=judge_at_least(part, bar) if is_judged else Verdict.NO_BAR,
            )
        )
        cores_part = median_ratio([_cpu_s(r) for r in times[_PLAIN]], [_cpu_s(r) for r in times[label]])
        rows.append(Row(figure="    by processor time", ours=ratio(cores_part)))
        if is_judged and _MORE in walls:
            rows.append(Row(figure="    of the rate of " + _MORE, ours=ratio(median_ratio(walls[_MORE], of_label))))
    for label, of_label in walls.items():
        middle = median(of_label)
        cpu_s = median([_cpu_s(received) for received in times[label]])
        speed = f"{seconds(middle)}, {rate(num_bytes, middle)}, {seconds(cpu_s)} of cores"
        rows.append(Row(figure=f"    {label}", ours=speed))
    ratios = [a / b for a, b in zip(walls[_PLAIN], walls[judged], strict=True)]
    notes = [
        f"{num_tensors} tensors of 64 MiB float32 [4096, 4096], {num_bytes // MIB} MiB in a group, 2 source processes; from the "
        "receivers' common release to the last one's end; "
        f"median of {num_repeats} rounds after one that is not counted, every second in reverse order, ratios {spread(ratios)}",
        "received in place into memory that was written to before, digests on, other values each time, every bit checked after "
        "it; of cores: what both groups' processes used together, which other work on the machine disturbs less",
        "plain: the same memory as plain tensors, 2 receivers, each from the source rank of its number"
        + (f"; {_MORE}: each source has a transport for each of its two" if _MORE in walls else ""),
    ]
    raw = {label: [asdict(received) for received in of_label] for label, of_label in times.items()}
    return Section(name=name, title=title, rows=rows, notes=notes, raw=raw)


def _cpu_s(received: Received) -> float:
    return received.receivers_cpu_s + received.sources_cpu_s
