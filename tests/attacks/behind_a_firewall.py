"""A group behind a firewall asks to come into a job for as long as that trains; what does it cost those who train?

Needs root and Linux's network namespaces: each of three groups lives in one, the lighthouse in a fourth, and a fifth forwards
between them, by the rules of the firewall. The third group reaches the lighthouse, and

- drop: nothing between it and the other two groups comes through, and nobody is told;
- reject: the same, and whoever tries is told at once;
- port: only their checkpoint servers and stores can be reached, and it has a port for each of them that is fixed: it could
  receive the state, and cannot be connected;
- state: all but their checkpoint servers can be reached: it is connected, and cannot receive the state.

Says how much of their time the other two lost, and how many of their steps were discarded. Held: at most 1 %, and none. Who
cannot receive the state is held for, which comes out of `join_stall_limit`: there only the discarded steps count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

TRANSPORT_PORT, STORE_PORT = 7070, 7071
KINDS = ("none", "drop", "reject", "port", "state")
_HOSTS = [f"10.97.{number}.2" for number in range(4)]
"""Of the three groups, and of the lighthouse."""
_NOISE_S = 0.4
"""A step may take so much longer than the median because the machine is busy."""


def train(seconds: float) -> None:
    """One group: train until the time is up, and write each step's end, and whether it counted, to stdout."""
    import torch

    import torchft_ckpt as ft

    number = int(os.environ["REPLICA_GROUP_ID"])
    host = _HOSTS[number]
    torch.manual_seed(number)
    model = torch.nn.Linear(64, 64)
    inner = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    transport = ft.HTTPTransport(timedelta(seconds=10), hostname=host, port=TRANSPORT_PORT)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"g{number}",
        hostname=host,
        checkpoint_transport=transport,
        store_addr=host,
        store_port=STORE_PORT,
        rank=0,
        world_size=1,
    )
    wrapped = ft.DistributedDataParallel(manager, model)
    optimizer = ft.Optimizer(manager, inner)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        optimizer.zero_grad()
        wrapped(torch.randn(8, 64)).square().mean().backward()
        time.sleep(0.2)
        counts = optimizer.step()
        print(json.dumps([time.monotonic(), bool(counts), manager.current_step()]), flush=True)
    manager.shutdown()


def _call(command: str, *, fails: bool = False) -> None:
    subprocess.run(command.split(), check=not fails, capture_output=True)


def _make_network(name: str, kind: str) -> None:
    router = f"{name}-r"
    _call(f"ip netns add {router}")
    for number, host in enumerate(_HOSTS):
        namespace = f"{name}-{number}"
        _call(f"ip netns add {namespace}")
        _call(f"ip -n {namespace} link add eth0 type veth peer name v{number} netns {router}")
        for place, link, address in ((namespace, "eth0", host), (router, f"v{number}", host[:-1] + "1")):
            _call(f"ip -n {place} address add {address}/24 dev {link}")
            _call(f"ip -n {place} link set {link} up")
            _call(f"ip -n {place} link set lo up")
        _call(f"ip -n {namespace} route add default via {host[:-1]}1")
    _call(f"ip netns exec {router} sysctl -q -w net.ipv4.ip_forward=1")
    action = "prohibit" if kind == "reject" else "blackhole"
    for other in _HOSTS[:2] if kind != "none" else ():
        for source, target in ((_HOSTS[2], other), (other, _HOSTS[2])):
            there = f"from {source} to {target}"
            for port in (TRANSPORT_PORT, STORE_PORT) if kind == "port" else ():
                for end in ("dport", "sport"):
                    _call(f"ip -n {router} rule add {there} ipproto tcp {end} {port} lookup main pref 100")
            closed = [f"ipproto tcp {end} {TRANSPORT_PORT}" for end in ("dport", "sport")] if kind == "state" else [""]
            for what in closed:
                _call(f"ip -n {router} rule add {there} {what} {action} pref 200")


def run(kind: str, seconds: float, folder: Path) -> dict[str, float]:
    """Train with a firewall of this kind; return what it cost the two groups that can reach each other."""
    name = f"fw{os.getpid()}{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCHFT_LIGHTHOUSE": f"{_HOSTS[3]}:29510",
        "OMP_NUM_THREADS": "1",
    }
    children: list[subprocess.Popen[bytes]] = []

    def start(number: int, command: list[str], what: str) -> Path:
        out, log = folder / f"{kind}-{what}.jsonl", folder / f"{kind}-{what}.log"
        there = ["ip", "netns", "exec", f"{name}-{number}", sys.executable, *command]
        environment = {**settings, "REPLICA_GROUP_ID": str(number)}
        with out.open("wb") as stdout, log.open("wb") as stderr:
            children.append(subprocess.Popen(there, stdout=stdout, stderr=stderr, env=environment))
        return out

    try:
        _make_network(name, kind)
        start(
            3,
            ["-m", "torchft_ckpt", "lighthouse", "--bind", f"{_HOSTS[3]}:29510", "--min-replicas", "1"],
            "lighthouse",
        )
        time.sleep(5.0)
        healthy = [start(number, [__file__, "--train", f"{seconds + 40.0}"], f"g{number}") for number in (0, 1)]
        time.sleep(20.0)
        came_at = time.monotonic()
        start(2, [__file__, "--train", f"{seconds}"], "g2")
        time.sleep(seconds)
        ended_at = time.monotonic()
    finally:
        for child in children:
            child.kill()
            child.wait()
        for place in (*range(4), "r"):
            _call(f"ip netns delete {name}-{place}", fails=True)
    figures: dict[str, float] = {}
    for number, path in enumerate(healthy):
        steps = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        ends = [at for at, *_ in steps if came_at <= at <= ended_at]
        gaps = [after - before for before, after in itertools.pairwise(ends)]
        usual_s = statistics.median(gaps)
        lost_s = sum(gap - usual_s for gap in gaps if gap > usual_s + _NOISE_S)
        figures[f"g{number} lost %"] = round(100 * lost_s / (ended_at - came_at), 2)
        figures[f"g{number} longest"] = round(max(gaps), 2)
        figures[f"g{number} steps"] = len(gaps)
    third = [json.loads(line) for line in (folder / f"{kind}-g2.jsonl").read_text().splitlines() if line.endswith("]")]
    said = (folder / f"{kind}-lighthouse.log").read_text().partition("g2:")[2]
    figures["discarded"] = said.count(" is discarded")
    figures["held"] = said.count("and the others wait for that")
    figures["g2 counted"] = sum(counts for _, counts, *_ in third)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the third group tries")
    parser.add_argument("--kind", choices=KINDS, help="one of them; all by default")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/behind-a-firewall"), help="for what they print")
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return 0
    are_held = True
    for kind in [options.kind] if options.kind else KINDS:
        figures = run(kind, options.seconds, options.folder)
        print(kind, json.dumps(figures), flush=True)
        lost = max(figures["g0 lost %"], figures["g1 lost %"])
        is_held = (kind == "state" or lost <= 1.0) and figures["discarded"] == 0
        are_held &= is_held and (figures["g2 counted"] > 0) == (kind == "none")
    print("held" if are_held else "VULNERABLE")
    return int(not are_held)


if __name__ == "__main__":
    sys.exit(main())
