"""One training job of either library: a lighthouse, its groups, and spares that take a killed group's place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import sides
from bench.processes import Child, Children, wait_until
from bench.stats import Step
from bench.transport_links import Links

FOREVER = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all groups of a job have in common."""

    side: str
    name: str = ""
    """Of its processes' logs; empty: that of the side."""
    num_groups: int
    task: str
    seed: int
    pause_s: float = 0.0
    num_spares: int = 0
    by_hand: bool = False
    """Reduce gradients with `manager.allreduce` after the backward pass, instead of with the DDP wrapper."""
    join_timeout_ms: int = 60_000
    """How long the lighthouse waits for living groups that have not asked for the quorum."""
    use_async_quorum: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the Manager, besides what both libraries have."""
    serve_bytes_per_s: float = 0.0
    """What each group gives of its state; 0: as fast as it can. Collectives are not slowed."""
    etcd: str = ""
    """Where the lease is of several lighthouses, of which one leads; empty: there is one."""
    num_lighthouses: int = 1
    log_level: str = "WARNING"
    links: Links | None = None
    """Where given, group i lives in member i's namespace, and the lighthouse with group 0."""


def steps_of(child: Child) -> list[Step]:
    """Return the steps that a group's process has reported."""
    return [
        Step(ended=event["t"], committed=event["committed"], participating=event["participating"])
        for event in child.events("step")
    ]


class Job:
    """A running job; its processes end with the `Children` that it was given.

    Args:
        children: where its processes are started.
        plan: what to run.
    """

    def __init__(self, children: Children, plan: Plan) -> None:
        self._children = children
        self._plan = plan
        self._store_ports: list[int] = []
        self._lighthouse = ""
        self.lighthouses: dict[str, Child] = {}
        """By address."""
        if plan.side != sides.PLAIN:
            num_stores = plan.num_groups + plan.num_spares + 1 if plan.side == sides.REFERENCE else 0
            settings = {"min_replicas": 2, "join_timeout_ms": plan.join_timeout_ms, "heartbeat_timeout_ms": 5000}
            options = {"side": plan.side, "settings": settings, "num_stores": num_stores, "etcd": plan.etcd}
            if plan.links is not None:
                options |= {"namespace": plan.links.namespaces[0], "host": plan.links.hosts[0]}
            name = f"{plan.name or plan.side}-lighthouse"
            workers = [children.start("bench.lighthouse_worker", options, name) for _ in range(plan.num_lighthouses)]
            events = [worker.wait_for("address", 60) for worker in workers]
            self.lighthouses = dict(zip((event["address"] for event in events), workers, strict=True))
            self._lighthouse, self._store_ports = ",".join(self.lighthouses), events[0]["store_ports"]
        self._numbers = itertools.count()
        self.groups: dict[int, Child] = {}

    def prepare(self, group: int, init_method: str = "", *, seed: int | None = None, **more: Any) -> Child:
        """Start a group's process; it imports everything and waits for its `go`.

        Args:
            group: its number.
            init_method: where plain DDP's processes meet.
            seed: of its weights, if not the job's.
            more: options of the trainer, for this process alone.
        """
        options: dict[str, Any] = {
            "side": self._plan.side,
            "task": self._plan.task,
            "seed": self._plan.seed if seed is None else seed,
            "pause_s": self._plan.pause_s,
            "log_level": self._plan.log_level,
            "by_hand": self._plan.by_hand,
            "use_async_quorum": self._plan.use_async_quorum,
            "settings": dict(self._plan.settings),
            "serve_bytes_per_s": self._plan.serve_bytes_per_s,
            "group": group,
            "num_groups": self._plan.num_groups,
            "min_replica_size": 2,
            "lighthouse": self._lighthouse,
            "until": FOREVER,
            "init_method": init_method,
        }
        if self._plan.links is not None:
            options |= {"namespace": self._plan.links.namespaces[group], "host": self._plan.links.hosts[group]}
        options |= more
        if self._store_ports:
            options["store_port"] = self._store_ports.pop()
        return self._children.start(
            "bench.trainer", options, f"{self._plan.name or self._plan.side}-group{group}-life{next(self._numbers)}"
        )

    def start(self, num_groups: int | None = None, log_dir: Path | None = None) -> None:
        """Start groups and wait until all of them train together and have committed a few steps.

        Raises:
            ChildEndedError, TimeoutError: they did not get there.
        """
        number = self._plan.num_groups if num_groups is None else num_groups
        init_method = f"file://{log_dir}/rendezvous" if log_dir is not None else ""
        self.groups = {group: self.prepare(group, init_method) for group in range(number)}
        for child in self.groups.values():
            child.wait_for("ready", 90)
        for child in self.groups.values():
            child.tell(go=True)
        self.wait_for_all_in()

    def wait_for_all_in(self, timeout_s: float = 60, steps: int = 3) -> None:
        """Wait until every group's last few steps were committed with all groups participating."""

        def all_in() -> bool | None:
            for child in self.groups.values():
                child.require_alive("all groups are to train together")
                last = child.events("step")[-steps:]
                good = [e for e in last if e["committed"] and e["participants"] == len(self.groups)]
                if len(good) < steps or not all(e["participating"] for e in good):
                    return None
            return True

        wait_until(all_in, timeout_s, f"all {len(self.groups)} groups of {self._plan.side} train together")
