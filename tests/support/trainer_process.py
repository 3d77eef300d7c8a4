"""The beginning, the reports and the Manager of a trainer: a process of its own that takes JSON and reports JSON lines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from support.device import USES_NCCL
from torchft_ckpt import HTTPTransport, Manager, ProcessGroupGloo, ProcessGroupNCCL
from torchft_ckpt.manager.outcomes import ManagerStatistics

TIMEOUT_S = 30
State = dict[str, Any]


def begin() -> dict[str, Any]:
    """Return the options, one JSON object on the command line; torch gets one thread, and the log goes to standard error."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    options: dict[str, Any] = json.loads(sys.argv[1])
    if USES_NCCL:
        # NCCL refuses two ranks on one GPU of one host, so each rank says that it is a host of its own.
        os.environ["NCCL_HOSTID"] = f"{options['replica_id']}/{os.environ.get('RANK', '0')}/{os.getpid()}"
    return options


def report(event: str, **fields: Any) -> None:
    """Write a line. Any thread: one write, so that lines never mix."""
    os.write(1, (json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n").encode())


def report_step(manager: Manager, before: ManagerStatistics, **more: Any) -> bool:
    """Report what became of a step, given the statistics from before it; return whether it counted."""
    after = manager.statistics()
    is_committed = after.num_committed > before.num_committed
    report(
        "step",
        step=manager.current_step(),
        committed=is_committed,
        discarded=after.num_discarded > before.num_discarded,
        participants=manager.num_participants(),
        healed=after.num_healed,
        **more,
    )
    return is_committed


def digest_of(whole: Any) -> str:
    """Return a digest of all bits of a state."""
    state = xxhash.xxh3_128()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            state.update(value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                state.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            state.update(repr(value).encode())

    add(whole)
    return state.hexdigest()


def is_over(options: dict[str, Any], step: int) -> bool:
    """Whether the file `stop` of the directory `control` is there, and its step (0 where it is empty) is reached."""
    stop = Path(options["control"]) / "stop"
    return stop.exists() and step >= int(stop.read_text() or "0")


def state_functions(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[State], None], Callable[[], State]]:
    """Return a Manager's `load_state_dict` and `state_dict` of a model and its optimizer."""

    def load_state_dict(state: State) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> State:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return load_state_dict, state_dict


def make_manager(
    options: dict[str, Any],
    transport: HTTPTransport[Any],
    load_state_dict: Callable[[State], None] | None,
    state_dict: Callable[[], State] | None,
    **more: Any,
) -> Manager:
    """Return the Manager that the options describe; `more` are arguments that a trainer decides itself."""
    timeout = timedelta(seconds=options.get("timeout_s", TIMEOUT_S))
    arguments: dict[str, Any] = {
        "min_replica_size": options.get("min_replica_size", 1),
        "use_async_quorum": options.get("use_async_quorum", True),
        "replica_id": options["replica_id"],
        "lighthouse_addr": options["lighthouse"],
        "checkpoint_transport": transport,
        "timeout": timeout,
        **more,
    }
    group = ProcessGroupNCCL(timeout=timeout) if USES_NCCL else ProcessGroupGloo(timeout=timeout)
    return Manager(group, load_state_dict, state_dict, **arguments)
