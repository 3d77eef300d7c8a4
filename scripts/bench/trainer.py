"""A process that is one replica group of one rank: it trains with either library, or with plain DDP, and reports each step.

It waits for `go` before it makes its Manager, so that importing torch is no part of any figure; it trains as long as its
step lies below the last `until` that it was told. The training loop is the same for all; only `_Loop`s differ in set-up.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim

from bench import sides
from bench.models import Task
from bench.transport_links import enter
from bench.wire import Commands, Reporter

_TIMEOUT = timedelta(seconds=10)
"""Of collectives, votes and transfers, for both libraries alike."""
_QUORUM_TIMEOUT = timedelta(seconds=40)


class _PlainLoop:
    """torch's own DDP on Gloo: every step counts."""

    def __init__(self, options: dict[str, Any], task: Task) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=options["init_method"], rank=options["group"], world_size=options["num_groups"]
        )
        self.forward = nn.parallel.DistributedDataParallel(task.model)
        self.optimizer = _make_optimizer(options, task.model)
        self._taken = 0
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._taken += 1

    def reduce(self) -> None:
        return

    def step(self) -> int:
        return self._taken

    def participating(self) -> bool:
        return True

    def participants(self) -> int:
        return torch.distributed.get_world_size()

    def quorum_id(self) -> int:
        return 0


class _ManagedLoop:
    """The loop that both fault-tolerant libraries document: Manager, DDP wrapper, optimizer wrapper."""

    def __init__(self, options: dict[str, Any], task: Task, reporter: Reporter) -> None:
        library = sides.load(options["side"])
        inner = _make_optimizer(options, task.model)

        _report_transfers(library.HTTPTransport, reporter)

        def load_state_dict(state: dict[str, Any]) -> None:
            task.model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])

        def state_dict() -> dict[str, Any]:
            return {"model": task.model.state_dict(), "optimizer": inner.state_dict()}

        store = {"store_addr": "127.0.0.1", "store_port": options["store_port"]} if "store_port" in options else {}
        settings = dict(options.get("settings", {}))
        if bytes_per_s := options.get("serve_bytes_per_s"):
            settings["checkpoint_transport"] = library.HTTPTransport(_TIMEOUT, max_serve_bytes_per_s=bytes_per_s)
        if stall_limit_s := settings.pop("join_stall_limit_s", None):
            settings["join_stall_limit"] = timedelta(seconds=stall_limit_s)
        # Older code has no learners: there this is the column "today".
        known = inspect.signature(library.Manager).parameters
        for name in ("follow", "spare"):
            if name in settings and name not in known:
                del settings[name]
        self.manager = library.Manager(
            pg=library.ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=load_state_dict,
            state_dict=state_dict,
            min_replica_size=options["min_replica_size"],
            use_async_quorum=options.get("use_async_quorum", True),
            timeout=_TIMEOUT,
            quorum_timeout=_QUORUM_TIMEOUT,
            connect_timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            lighthouse_addr=options["lighthouse"],
            replica_id=f"group_{options['group']}",
            hostname=options.get("host", "127.0.0.1"),
            **store,
            **settings,
        )
        reporter.emit("manager_ready")
        self._by_hand = list(task.model.parameters()) if options["by_hand"] else []
        self.forward = task.model if options["by_hand"] else library.DistributedDataParallel(self.manager, task.model)
        self.optimizer = library.Optimizer(self.manager, inner)

    def reduce(self) -> None:
        """Average the gradients without the DDP wrapper, where the plan says so."""
        works = [self.manager.allreduce(parameter.grad) for parameter in self._by_hand]
        for work in works:
            work.wait()

    def step(self) -> int:
        return self.manager.current_step()

    def participating(self) -> bool:
        return self.manager.is_participating()

    def participants(self) -> int:
        return self.manager.num_participants()

    def quorum_id(self) -> int:
        return self.manager.statistics().quorum_id if hasattr(self.manager, "statistics") else 0


def _report_transfers(transport: type, reporter: Reporter) -> None:
    """Make the class report when the receiving side of a transfer begins and ends."""
    # Our Manager fetches from all sources that a quorum names, torchft's receives from one.
    method = "fetch_checkpoint" if hasattr(transport, "fetch_checkpoint") else "recv_checkpoint"
    receive = getattr(transport, method)

    def reported(self: Any, *arguments: Any, **named: Any) -> Any:
        reporter.emit("transfer_started")
        received = receive(self, *arguments, **named)
        reporter.emit("transfer_ended")
        return received

    setattr(transport, method, reported)


def _make_optimizer(options: dict[str, Any], model: nn.Module) -> optim.Optimizer:
    if options["task"] == "transformer" or options["task"].startswith("stack:"):
        return optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return optim.SGD(model.parameters(), lr=1e-3)


def _train(
    options: dict[str, Any], loop: _PlainLoop | _ManagedLoop, task: Task, commands: Commands, reporter: Reporter
) -> None:
    until = options["until"]
    pause_s = options.get("pause_s", 0.0)
    first_pause_s = options.get("first_pause_s", 0.0)
    while True:
        command = commands.next_now() if loop.step() < until else commands.next()
        if command is not None:
            until = command.get("until", until)
            continue
        began = time.monotonic()
        loop.optimizer.zero_grad()
        computing = time.monotonic()
        loss = task.loss(loop.forward)
        # As if the passes took so long: before them it would be time of the loop's own lines.
        if pause_s or first_pause_s:
            time.sleep(first_pause_s or pause_s)
            first_pause_s = 0.0
        loss.backward()
        loop.reduce()
        participating, participants, before = loop.participating(), loop.participants(), loop.step()
        loop.optimizer.step()
        after = loop.step()
        reporter.emit(
            "step",
            step=after,
            committed=after > before,
            participating=participating,
            participants=participants,
            cpu_s=time.process_time(),
            began=began,
            computing=computing,
            quorum_id=loop.quorum_id(),
        )


def main() -> None:
    """Import, report `ready`, wait for `go`, train; an exception is reported as `died` and ends the process."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    reporter, commands = Reporter(), Commands()
    logging.basicConfig(level=options.get("log_level", "WARNING"), format="%(created).3f %(name)s %(message)s")
    torch.set_num_threads(1)
    if namespace := options.get("namespace"):
        enter(namespace)
    if options["side"] != sides.PLAIN:
        sides.load(options["side"])
    task = Task(options["task"], options["seed"], options["group"])
    reporter.emit("ready")
    commands.next()
    with reporter.telling_death():
        is_plain = options["side"] == sides.PLAIN
        loop = _PlainLoop(options, task) if is_plain else _ManagedLoop(options, task, reporter)
        _train(options, loop, task, commands, reporter)


if __name__ == "__main__":
    main()
