"""Takes the leader of several lighthouses away, by SIGKILL and by SIGSTOP in turn, and measures what that costs the groups.

Bars: no group's longest gap between commits is above the lease and 1 s; no step is lost; a step costs at most 1 ms more than
with one lighthouse. For the last two jobs, with one lighthouse and with several, live at once and take turns. It needs etcd.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import sides
from bench.job import Job, Plan, steps_of
from bench.overhead import take_turn
from bench.processes import Children, wait_until
from bench.stats import Verdict, judge_at_most, longest_gap, median
from bench.table import Row, Section, seconds

LEASE_S = 2.0
GAP_BAR_S = LEASE_S + 1.0
STEP_BAR_S = 0.001
_NUM_GROUPS = 3
_STEPS_A_TURN = 10
_PAUSE_S = 0.03


@contextmanager
def _etcd(log_dir: Path) -> Iterator[str]:
    """Run an etcd of one member; yield its address."""
    command = shutil.which("etcd")
    assert command is not None
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    url, peers = (f"http://127.0.0.1:{port}" for port in ports)
    with tempfile.TemporaryDirectory(prefix="bench-etcd-") as folder, (log_dir / "etcd.log").open("ab") as log:
        options = ["--data-dir", folder, "--listen-client-urls", url, "--advertise-client-urls", url]
        options += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        process = subprocess.Popen([command, *options, "--initial-cluster", f"default={peers}"], stderr=log, stdout=log)
        try:
            wait_until(lambda: _answers(url), 30, "etcd answers")
            yield url
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool | None:
    request = urllib.request.Request(f"{url}/v3/maintenance/status", b"{}")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return True if "leader" in json.load(answer) else None
    except OSError:
        return None


def _leader(job: Job) -> str | None:
    """Return the address of the lighthouse that leads; None: none does yet."""
    for address, child in job.lighthouses.items():
        if child.ended():
            continue
        try:
            with urllib.request.urlopen(address, timeout=0.2) as answer:
                if json.load(answer)["leads"]:
                    return address
        except OSError:  # it is stopped, or was killed just now
            continue
    return None


def _take_away(job: Job, how: signal.Signals) -> dict[str, Any]:
    """Kill or stop the leader, and return the worst that this cost a group."""
    leader = wait_until(lambda: _leader(job), 30, "one leads")
    began = job.lighthouses[leader].kill(how)

    def go_on() -> bool | None:
        later = (sum(s.committed and s.ended > began + 0.2 for s in steps_of(child)) for child in job.groups.values())
        return True if all(number >= 10 for number in later) else None

    wait_until(go_on, 60, "the groups commit again")
    end = time.monotonic()
    gaps = [longest_gap([s.ended for s in steps_of(child) if s.committed], began, end) for child in job.groups.values()]
    return {"how": how.name, "gap_s": max(gap or 0.0 for gap in gaps)}


def _num_lost(job: Job) -> int:
    """Return how many steps a group has gone back, or has left out, the worst one."""
    return max(
        sum(abs(after["step"] - before["step"] - after["committed"]) for before, after in pairwise(events))
        for events in (child.events("step") for child in job.groups.values())
    )


def _compare_steps(
    jobs: dict[str, Job], num_turns: int, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Let the jobs take turns; return the seconds that a step took in each, and the processor seconds of its groups."""
    walls: dict[str, list[float]] = {name: [] for name in jobs}
    cpus: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        for child in job.groups.values():
            child.tell(until=0)  # it stops where it is
    time.sleep(1.0)
    targets = {name: max(c.events("step")[-1]["step"] for c in job.groups.values()) for name, job in jobs.items()}
    for turn in range(-1, num_turns):
        for name, job in jobs.items():
            targets[name] += _STEPS_A_TURN
            wall_s, cpu_s = take_turn(job, targets[name])
            if turn >= 0:
                walls[name].append(wall_s)
                cpus[name].append(cpu_s)
        if turn >= 0:
            say(f"turn {turn}: " + ", ".join(f"{name} {walls[name][-1] * 1000:.2f} ms" for name in jobs))
    return walls, cpus


def _more_s(of: dict[str, list[float]]) -> float | None:
    """Return how much more it is with several lighthouses than with one, of neighbouring turns."""
    return median([b - a for a, b in zip(of["one"], of["several"], strict=True)])


def _signed(value: float | None) -> str:
    return seconds(value) if value is None or value >= 0 else f"-{seconds(-value)}"


def run(*, quick: bool, seed: int, log_dir: Path, say: Callable[[str], None]) -> Section:
    """Compare steps, then take one leader after the other away."""
    title = "What the loss of the lighthouse that leads costs, where several are"
    if shutil.which("etcd") is None:
        row = Row(figure="  there is no etcd here (Debian's etcd-server)", ours="", verdict=Verdict.NOT_RUN)
        return Section(name="lighthouse_failover", title=title, rows=[row])
    losses = [signal.SIGKILL, signal.SIGSTOP] * (1 if quick else 3)
    with _etcd(log_dir) as url, Children(log_dir) as children:
        common: dict[str, Any] = {
            "side": sides.OURS,
            "num_groups": _NUM_GROUPS,
            "task": "small",
            "seed": seed,
            "pause_s": _PAUSE_S,
        }
        jobs = {
            "one": Job(children, Plan(name="one", **common)),
            "several": Job(children, Plan(name="several", etcd=url, num_lighthouses=len(losses) + 1, **common)),
        }
        for job in jobs.values():
            job.start()
        walls, cpus = _compare_steps(jobs, 10 if quick else 40, say)
        several = jobs["several"]
        for child in jobs["one"].groups.values():
            child.end()
        for child in several.groups.values():
            child.tell(until=1 << 60)
        found = []
        for how in losses:
            several.wait_for_all_in()
            found.append(_take_away(several, how))
            say(f"{found[-1]}")
        lost = _num_lost(several)
    more_s = _more_s(walls)
    rows = []
    for how in dict.fromkeys(losses):
        gaps = [one["gap_s"] for one in found if one["how"] == how.name]
        rows.append(
            Row(
                figure=f"  groups' longest gap, the leader gets {how.name} ({len(gaps)} times)",
                ours=f"median {seconds(median(gaps))}, max {seconds(max(gaps))}",
                bar=f"max <= {GAP_BAR_S:g} s",
                verdict=judge_at_most(max(gaps), GAP_BAR_S),
            )
        )
    rows += [
        Row(figure="  steps lost", ours=str(lost), bar="0", verdict=judge_at_most(lost, 0)),
        Row(
            figure=f"  a step costs more than with one lighthouse ({seconds(median(walls['one']))})",
            ours=_signed(more_s),
            bar=f"<= {seconds(STEP_BAR_S)}",
            verdict=judge_at_most(more_s, STEP_BAR_S),
        ),
        Row(figure="    processor time of all groups", ours=_signed(_more_s(cpus))),
    ]
    notes = [
        f"{_NUM_GROUPS} groups of one rank, 0.4 M parameters; each forward pass idles {_PAUSE_S * 1000:.0f} ms",
        f"a lease of {LEASE_S:g} s in an etcd of one member on this machine",
        f"the cost of a step: the median over {len(walls['one'])} pairs of turns of {_STEPS_A_TURN} steps, the first left out",
    ]
    raw = {"losses": found, "step_s": walls, "cpu_s": cpus}
    return Section(name="lighthouse_failover", title=title, rows=rows, notes=notes, raw=raw)
