"""Lets a group follow a running job until it is close, and compares with the same job where no group follows.

S is the state, G the gradients of a step, B what reaches the joiner a second, tau a step, T0 = S/B, rho = G/(tau B).
Forward and backward are slept, so that cores are not the limit. What the groups give of their states is bounded (`http`), or the
whole link of the joiner is, both ways, in network namespaces (`link`).
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan, steps_of
from bench.processes import Child, ChildEndedError, Children, wait_until
from bench.stats import Verdict, judge_at_most, median
from bench.table import Row, Section, ratio, seconds
from bench.transport_links import Links, LinksUnavailableError

_LAYER_BYTES = 4 * (1024 * 1024 + 1024)
_MEBIBYTE = 1 << 20
_NUM_GROUPS = 2
_NUM_BEFORE = 8
_NUM_AFTER = 4
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One joiner, and the path that its state comes by."""

    name: str
    rho: float
    """Share of the path that gradients take; 0: the path is not limited."""
    pause_s: float
    num_layers: int
    num_trained: int
    whole_link: bool = False
    first_pause_s: float = 0.0

    @property
    def gradient_bytes(self) -> int:
        """G."""
        return self.num_trained * _LAYER_BYTES

    @property
    def state_bytes(self) -> int:
        """S, with AdamW's two moments of what is trained."""
        return (self.num_layers + 2 * self.num_trained) * _LAYER_BYTES

    @property
    def changed_s(self) -> float:
        """C/B: what training changes takes so long to arrive."""
        return 3 * self.gradient_bytes / self.bytes_per_s if self.rho else 0.0

    @property
    def pays(self) -> bool:
        """Whether following brings a group closer: a part of the state stays as it is."""
        return 4 * 3 * self.gradient_bytes <= 3 * self.state_bytes

    @property
    def bytes_per_s(self) -> float:
        """B, for a step that takes `pause_s` (what it really takes is measured)."""
        return self.gradient_bytes / (self.pause_s * self.rho) if self.rho else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one joiner cost the others, and when it was in. Seconds and bytes; of the survivor for which it was worst."""

    before_s: list[float]
    during_s: list[float]
    after_s: list[float]
    """Steps of all groups together, once it adds to them: on few cores they take longer, whoever came in however."""
    has_followed: bool
    """Whether it was outside of the quorum while it received; else it came in as if it may not follow, and no bar is kept."""
    discarded: int
    quorum_ids: int
    joined_s: float | None
    """From its first `start_quorum` to the begin of the first step that it adds to; None: not within the time allowed."""
    warm_up_s: float
    cpu_before_s: float | None
    cpu_during_s: float | None
    source_bytes: int
    learner_bytes: int


def _memory(child: Child, field: str) -> int:
    try:
        text = Path(f"/proc/{child.pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def _forget_peak(child: Child) -> None:
    Path(f"/proc/{child.pid}/clear_refs").write_text("5")


def _commits(child: Child, start: float, end: float) -> list[dict[str, Any]]:
    return [e for e in child.events("step") if e["committed"] and start <= e["t"] <= end]


def _differences(events: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [b[key] - a[key] for a, b in itertools.pairwise(events)]


def _settings(follow: bool) -> dict[str, Any]:
    """Return with what a group follows, if that helps, or never."""
    return {} if follow else {"join_stall_limit": None}


def measure(setting: Setting, directory: Path, *, seed: int, follow: bool, limit_s: float, say: Say) -> Outcome:
    """Run one job, let one group come into it.

    Raises:
        ChildEndedError, TimeoutError: the job did not get going.
        LinksUnavailableError: namespaces are wanted and cannot be had.
    """
    directory.mkdir(parents=True)
    if not setting.whole_link:
        return _measure(setting, directory, None, seed=seed, follow=follow, limit_s=limit_s, say=say)
    limits = [False] * _NUM_GROUPS + [True]
    rate = f"{8 * setting.bytes_per_s / 1e6:.1f}mbit"
    with Links(limits, rate=rate, both_ways=True) as links:
        return _measure(setting, directory, links, seed=seed, follow=follow, limit_s=limit_s, say=say)


def _measure(
    setting: Setting, directory: Path, links: Links | None, *, seed: int, follow: bool, limit_s: float, say: Say
) -> Outcome:
    plan = Plan(
        side=sides.OURS,
        num_groups=_NUM_GROUPS,
        task=f"stack:{setting.num_layers}:{setting.num_trained}",
        seed=seed,
        pause_s=setting.pause_s,
        serve_bytes_per_s=0.0 if setting.whole_link else setting.bytes_per_s / _NUM_GROUPS,
        settings=_settings(follow),
        log_level="INFO",
        links=links,
    )
    with Children(directory) as children:
        job = Job(children, plan)
        job.start()
        joiner = job.prepare(_NUM_GROUPS, seed=seed + 1, first_pause_s=setting.first_pause_s)
        joiner.wait_for("ready", 120)
        survivors = list(job.groups.values())
        loaded = time.monotonic()  # the joiner's imports took cores from the others until now
        for child in survivors:
            _forget_peak(child)
        patience_s = 20 + 4 * _NUM_BEFORE * (setting.pause_s + 1)

        def await_steps(number: int, since: float) -> None:
            wait_until(
                lambda: all(len(_commits(s, since, math.inf)) > number for s in survivors) or None, patience_s, "steps"
            )

        await_steps(_NUM_BEFORE, loaded)
        peaks = [_memory(child, "VmHWM") for child in survivors]
        for child in survivors:
            _forget_peak(child)
        began = time.monotonic()
        joiner.tell(go=True)

        def contributed() -> dict[str, Any] | None:
            joiner.require_alive("it is to contribute")
            return next((e for e in joiner.events("step") if e["committed"] and e["participating"]), None)

        try:
            first: dict[str, Any] | None = wait_until(contributed, limit_s, "the joiner contributes")
        except TimeoutError:
            first = None
        ended = first["t"] if first else time.monotonic()
        source_bytes = max(_memory(c, "VmHWM") - p for c, p in zip(survivors, peaks, strict=True))
        learner_bytes = _memory(joiner, "VmHWM") - max(peaks)
        if first is not None:
            await_steps(_NUM_AFTER, ended)
        before = {s.name: _commits(s, loaded, began) for s in survivors}
        # Up to the first step of all, which one of them may end a moment before another.
        joint = first["step"] if first else max(e["step"] for s in survivors for e in _commits(s, began, ended))
        since = {s.name: _commits(s, began, math.inf) for s in survivors}
        during = {name: before[name][-1:] + [e for e in events if e["step"] <= joint] for name, events in since.items()}
        after = {name: [e for e in events if e["step"] > joint] for name, events in since.items()}
        worst = max(during, key=lambda name: max(_differences(during[name], "t"), default=0.0))
        iterations = joiner.events("step")
        ready = joiner.wait_for("manager_ready", 60)["t"]
        outcome = Outcome(
            before_s=_differences(before[worst], "t"),
            during_s=_differences(during[worst], "t"),
            after_s=_differences(after[worst], "t"),
            has_followed="follows the others outside of the quorum" in joiner.log.read_text(errors="replace"),
            discarded=max(
                sum(1 for s in steps_of(c) if not s.committed and began <= s.ended <= ended) for c in survivors
            ),
            quorum_ids=len({e["quorum_id"] for e in during[worst]}) - 1,
            joined_s=first["began"] - iterations[0]["began"] if first else None,
            warm_up_s=iterations[0]["t"] - ready if iterations else 0.0,
            cpu_before_s=median(_differences(before[worst], "cpu_s")),
            cpu_during_s=median(_differences(during[worst], "cpu_s")),
            source_bytes=source_bytes,
            learner_bytes=learner_bytes,
        )
    say(f"{setting.name}, follow={follow}: {outcome}")
    return outcome


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def survivor_rows(setting: Setting, on: Outcome, off: Outcome | None) -> list[Row]:
    """Bar 3: the others' steps while one follows."""
    base = median(on.before_s)

    def row(
        figure: str, pick: Callable[[Outcome], float | None], bar: float, write: Callable[[float | None], str]
    ) -> Row:
        value = pick(on)
        reference = write(pick(off)) if off else ""
        return Row(
            figure=figure,
            ours=write(value),
            reference=reference,
            bar=f"<= {write(bar)}",
            verdict=judge_at_most(value, bar),
        )

    def longest_beyond(o: Outcome, steps_s: list[float]) -> float | None:
        usual = median(steps_s)
        return max(o.during_s) - usual if o.during_s and usual is not None else None

    def count(value: float | None) -> str:
        return "not run" if value is None else f"{value:.0f}"

    cpu = f"{seconds(on.cpu_before_s)} -> {seconds(on.cpu_during_s)}"
    return [
        row(
            "    the others' median step, but for the longest, beside before",
            lambda o: _over(median(sorted(o.during_s)[:-1]), median(o.before_s)),
            1.02,
            ratio,
        ),
        row(
            f"    longest beyond {seconds(base)}",
            lambda o: longest_beyond(o, o.before_s),
            1.2 * setting.changed_s + 0.1,
            seconds,
        ),
        Row(
            figure=f"      beyond {seconds(median(on.after_s))}, a step of all groups once it adds to them",
            ours=seconds(longest_beyond(on, on.after_s)),
            reference=seconds(longest_beyond(off, off.after_s)) if off else "",
        ),
        row("    steps that they discard", lambda o: float(o.discarded), 0, count),
        row("    changes of the quorum id", lambda o: float(o.quorum_ids), 1, count),
        Row(
            figure="    their CPU seconds a step, before -> while it comes in",
            ours=cpu,
            reference=f"{seconds(off.cpu_before_s)} -> {seconds(off.cpu_during_s)}" if off else "",
        ),
    ]


def time_row(setting: Setting, on: Outcome, off: Outcome | None) -> Row:
    """Bars 4 and 5: from the first `start_quorum` to the begin of the first step that it adds to."""
    step_s = median(on.before_s) or setting.pause_s
    transfer_s = setting.state_bytes / setting.bytes_per_s
    rho = setting.gradient_bytes / (step_s * setting.bytes_per_s)
    bar_s = 1.15 * transfer_s / (1 - rho) + 3 * step_s if rho < 1 else math.inf
    path = "whole link" if setting.whole_link else "HTTP"
    never = "not in the time allowed"
    return Row(
        figure=f"  {setting.name}: {path}, rho {rho:.2f}, T0 {transfer_s / step_s:.1f} tau, tau {seconds(step_s)}: until it adds",
        ours=never if on.joined_s is None else seconds(on.joined_s),
        reference="" if off is None else never if off.joined_s is None else seconds(off.joined_s),
        bar=f"<= {seconds(bar_s)}",
        verdict=judge_at_most(math.inf if on.joined_s is None else on.joined_s, bar_s),
    )


def memory_rows(setting: Setting, on: Outcome) -> list[Row]:
    """Bar 10: what following takes of memory."""
    rows = []
    source_bar = setting.state_bytes + setting.gradient_bytes + 64 * _MEBIBYTE
    learner_bar = 2 * setting.gradient_bytes + 64 * _MEBIBYTE
    for who, value, bar in (("source", on.source_bytes, source_bar), ("learner", on.learner_bytes, learner_bar)):
        rows.append(
            Row(
                figure=f"    memory of the {who} beyond a training group's",
                ours=f"{value / _MEBIBYTE:.0f} MiB",
                bar=f"<= {bar / _MEBIBYTE:.0f} MiB",
                verdict=judge_at_most(float(value), float(bar)),
            )
        )
    return rows


def _section(
    name: str,
    title: str,
    settings: Sequence[Setting],
    rows_of: Callable[[Setting, Outcome, Outcome | None], list[Row]],
    *,
    quick: bool,
    seed: int,
    log_dir: Path,
    say: Say,
) -> Section:
    """Measure each setting with following, then without: a pair lies side by side in one run."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for setting in settings:
        pair: dict[bool, Outcome | None] = {True: None, False: None}
        step_s = setting.pause_s + 0.5
        expected_s = setting.state_bytes / setting.bytes_per_s / max(0.09, 1 - setting.rho) if setting.rho else 20.0
        limit_s = 30 + setting.first_pause_s + 2 * expected_s + 10 * step_s
        for follow in (True, False):
            try:
                where = log_dir / f"{setting.name.replace(' ', '_')}-{'on' if follow else 'off'}"
                limit = min(limit_s, 60.0) if quick and not follow else limit_s
                pair[follow] = measure(setting, where, seed=seed, follow=follow, limit_s=limit, say=say)
            except (LinksUnavailableError, ChildEndedError, TimeoutError) as error:
                why = str(error).splitlines()[0][:60]
                rows.append(Row(figure=f"  {setting.name}, follow={follow}: {why}", ours="", verdict=Verdict.NOT_RUN))
        on = pair[True]
        if on is not None:
            rows += rows_of(setting, on, pair[False])
            has_followed = "yes" if on.has_followed else "no: it came in as without follow"
            verdict = Verdict.MET if on.has_followed == setting.pays else Verdict.MISSED
            rows.append(
                Row(figure="    it followed", ours=has_followed, bar="yes" if setting.pays else "no", verdict=verdict)
            )
        raw[setting.name] = {str(follow): asdict(outcome) for follow, outcome in pair.items() if outcome is not None}
    notes = [
        f"{_NUM_GROUPS} groups and one that comes, one thread each, AdamW; forward and backward are slept",
        'the column "torchft 0.2.0" has this library with join_stall_limit=None here',
    ]
    return Section(name=name, title=title, rows=rows, notes=notes, raw=raw)


def _size(quick: bool) -> tuple[float, int]:
    return (1.5, 4) if quick else (4.0, 12)


def run_steps(*, quick: bool, seed: int, log_dir: Path, say: Say) -> Section:
    """Bars 3 and 10."""
    pause_s, layers = _size(quick)
    settings = [
        Setting(name=f"rho {rho}", rho=rho, pause_s=pause_s, num_layers=layers, num_trained=layers)
        for rho in ((0.7,) if quick else (0.3, 0.7))
    ]

    def rows_of(setting: Setting, on: Outcome, off: Outcome | None) -> list[Row]:
        return [time_row(setting, on, off), *survivor_rows(setting, on, off), *memory_rows(setting, on)]

    title = "What the others notice of a group that follows"
    return _section("join_steps", title, settings, rows_of, quick=quick, seed=seed, log_dir=log_dir, say=say)


def run_time(*, quick: bool, seed: int, log_dir: Path, say: Say) -> Section:
    """Bars 4 and 5."""
    pause_s, layers = _size(quick)
    trained = dict(pause_s=pause_s, num_layers=layers, num_trained=layers)
    http = (0.5,) if quick else (0.2, 0.5, 0.8)
    link = (0.5,) if quick else (0.2, 0.5)
    settings = [Setting(name=f"trained http {rho}", rho=rho, **trained) for rho in http]
    settings += [Setting(name=f"trained link {rho}", rho=rho, whole_link=True, **trained) for rho in link]
    # 1 of 20 layers: S/G = 22, so T0 = 20 tau is rho = 20/22.
    settings.append(Setting(name="95 % frozen", rho=20 / 22, pause_s=1.0, num_layers=20, num_trained=1))
    if quick:
        settings[-1] = Setting(name="95 % frozen (T0 = 8 tau)", rho=8 / 22, pause_s=1.0, num_layers=20, num_trained=1)

    def rows_of(setting: Setting, on: Outcome, off: Outcome | None) -> list[Row]:
        return [time_row(setting, on, off)]

    title = "How long a group needs until it adds to a step"
    return _section("join_time", title, settings, rows_of, quick=quick, seed=seed, log_dir=log_dir, say=say)


def run_cold(*, quick: bool, seed: int, log_dir: Path, say: Say) -> Section:
    """Bar 8: its first iteration takes 20 s."""
    pause_s, layers = (1.0, 4) if quick else (2.0, 12)
    setting = Setting(
        name="first iteration of 20 s",
        rho=0.5,
        pause_s=pause_s,
        num_layers=layers,
        num_trained=layers,
        first_pause_s=20.0,
    )

    def rows_of(setting: Setting, on: Outcome, off: Outcome | None) -> list[Row]:
        step_s = median(on.before_s) or setting.pause_s
        rho = setting.gradient_bytes / (step_s * setting.bytes_per_s)
        # All of the transfer follows the warm-up.
        catch_up_s = setting.state_bytes / setting.bytes_per_s / (1 - rho)
        bar_s = setting.first_pause_s + catch_up_s + 2 * step_s
        value = math.inf if on.joined_s is None else on.joined_s
        row = Row(
            figure=f"  {setting.name}, catching up takes {seconds(catch_up_s)}: until it adds to a step",
            ours="not in the time allowed" if on.joined_s is None else seconds(value),
            reference="" if off is None or off.joined_s is None else seconds(off.joined_s),
            bar=f"<= {seconds(bar_s)}",
            verdict=judge_at_most(value, bar_s),
        )
        return [row, *survivor_rows(setting, on, off)]

    title = "A group whose first iteration is slow"
    return _section("join_cold", title, [setting], rows_of, quick=quick, seed=seed, log_dir=log_dir, say=say)


def run_idle(*, quick: bool, seed: int, log_dir: Path, say: Say) -> Section:
    """Bar 12: a job that no group joins, with following and without, in turns."""
    medians: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 if quick else 5):
        for follow in (True, False) if turn % 2 else (False, True):
            directory = log_dir / f"{turn}-{follow}"
            directory.mkdir(parents=True)
            plan = Plan(
                side=sides.OURS,
                num_groups=3,
                task="stack:4:4",
                seed=seed,
                pause_s=0.1,
                settings=_settings(follow),
            )
            with Children(directory) as children:
                job = Job(children, plan)
                job.start()
                started = time.monotonic()
                time.sleep(8 if quick else 20)
                events = _commits(job.groups[0], started, time.monotonic())
            medians[follow].append(median(_differences(events, "t")) or 0.0)
            say(f"follow={follow}: {medians[follow][-1]}")
    # A hundredth is what two runs of the same code differ by.
    value = _over(median(medians[True]), median(medians[False]))
    row = Row(
        figure="  median step with follow, beside without",
        ours=ratio(value),
        bar="<= 1.01x (1.00x)",
        verdict=judge_at_most(value, 1.01),
    )
    notes = ["the rest of this bar, rejoin no slower than before: `--only rejoin` of two revisions"]
    title = "A job that no group joins"
    return Section(name="join_idle", title=title, rows=[row], notes=notes, raw={str(k): v for k, v in medians.items()})


def run_spare(*, quick: bool, seed: int, log_dir: Path, say: Say) -> Section:
    """A spare costs the collectives nothing, and contributes within two steps of a death."""
    pause_s = 1.0 if quick else 2.0
    plan = Plan(side=sides.OURS, num_groups=3, task="stack:4:4", seed=seed, pause_s=pause_s, log_level="INFO")
    num_kills = 2 if quick else 5
    log_dir.mkdir(parents=True, exist_ok=True)
    waits_s: list[float] = []
    discarded: list[int] = []
    with Children(log_dir) as children:
        job = Job(children, plan)
        job.start()
        before_s, during_s = [_paced(job, 10 * pause_s)], []
        for kill in range(num_kills):
            spare = job.prepare(plan.num_groups + kill, settings={"spare": True})
            spare.wait_for("ready", 120)
            spare.tell(go=True)
            wait_until(
                lambda s=spare: "this spare is ready" in s.log.read_text(errors="replace"), 60, "a spare is ready"
            )
            during_s.append(_paced(job, 10 * pause_s))
            number, victim = next(iter(job.groups.items()))
            del job.groups[number]
            time.sleep(pause_s * (0.3 + 0.4 * kill / num_kills))  # at another moment of a step each time
            killed_at = time.monotonic()
            victim.kill()

            def contributes(spare: Child = spare) -> dict[str, Any] | None:
                spare.require_alive("it is to contribute")
                return next((e for e in spare.events("step") if e["committed"] and e["participating"]), None)

            first = wait_until(contributes, 60, "the spare contributes")
            waits_s.append(first["began"] - killed_at)
            ended = time.monotonic()
            discarded.append(
                max(
                    sum(not s.committed and killed_at <= s.ended <= ended for s in steps_of(c))
                    for c in job.groups.values()
                )
            )
            job.groups[plan.num_groups + kill] = spare
            job.wait_for_all_in()
    step_s = median(before_s) or pause_s
    longest_s = max(waits_s)
    say(f"steps {before_s} without a spare, {during_s} with one; until it contributes {waits_s}; discarded {discarded}")
    beside = _over(median(during_s), step_s)
    rows = [
        Row(
            figure="  the others' median step beside a spare, to that without",
            ours=ratio(beside),
            bar="<= 1.02x (1.00x)",
            verdict=judge_at_most(beside, 1.02),
        ),
        Row(
            figure=f"  from the death of one to the step in which a spare adds, tau {seconds(step_s)}, longest of {num_kills}",
            ours=seconds(longest_s),
            bar=f"<= {seconds(2 * step_s)}",
            verdict=judge_at_most(longest_s, 2 * step_s),
        ),
        Row(
            figure="    steps that the others discard for it, at most",
            ours=str(max(discarded)),
            bar="<= 1",
            verdict=judge_at_most(float(max(discarded)), 1.0),
        ),
    ]
    notes = [
        "3 groups train and a spare follows, AdamW; a group is killed, and the next spare comes when the first trains"
    ]
    raw = {"before_s": before_s, "during_s": during_s, "until_it_contributes_s": waits_s, "discarded": discarded}
    return Section(name="join_spare", title="A spare takes the place of a group", rows=rows, notes=notes, raw=raw)


def _paced(job: Job, seconds_s: float) -> float:
    """Return the median step of a group that trains, over so many seconds."""
    started = time.monotonic()
    time.sleep(seconds_s)
    group = next(iter(job.groups.values()))
    return median(_differences(_commits(group, started, time.monotonic()), "t")) or 0.0
