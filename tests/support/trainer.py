"""One rank of a replica group that trains a tiny model; a process of its own. It reports each step as a JSON line.

Its options come as one JSON object on the command line. Files in the directory `control` steer it while it runs:
`stop` holds the step to end at, `slow` the seconds that each fetch takes, `pause` those of a forward pass (else `pause_s`), and
`fail` makes each fetch fail. With `frozen_mb` the state holds so much that no step changes; `rate` is what a transfer is expected
to bring in a second, before one was measured, and `serve_bytes_per_s` what this rank serves. Loading takes `load_s`, and the loop
`top_s` from then to its next step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.device import DEVICE
from support.trainer_process import begin, digest_of, is_over, make_manager, report, report_step, state_functions
from torchft_ckpt import DistributedDataParallel, HTTPTransport, Optimizer, WorldSizeMode
from torchft_ckpt.checkpointing.progress import TransferProgress
from torchft_ckpt.core.coordination import joining
from torchft_ckpt.errors import SourceLostError, TorchftCkptError, TransferCancelledError


class SteeredTransport(HTTPTransport):
    """An `HTTPTransport` whose fetches can be made slow, or fail, from outside."""

    control: Path
    cancelled: threading.Event

    def fetch_checkpoint(self, sources: Sequence[str], step: int, timeout: timedelta, **how: Any) -> Any:
        self.cancelled.clear()
        report("fetching", step=step)
        if (self.control / "fail").exists():
            raise SourceLostError("told to fail", party="test")
        slow = self.control / "slow"
        if slow.exists() and self.cancelled.wait(float(slow.read_text())):
            raise TransferCancelledError("cancelled while slow", party="test")
        tell, seen = how.pop("on_progress"), list[TransferProgress]()

        def note(progress: TransferProgress) -> None:
            seen.append(progress)
            tell(progress)

        state = super().fetch_checkpoint(sources, step, timeout, on_progress=note, **how)
        report("fetched", step=step, received_bytes=seen[-1].received_bytes, total_bytes=seen[-1].total_bytes)
        return state

    def cancel_recv(self) -> None:
        self.cancelled.set()
        super().cancel_recv()


def main() -> None:
    options = begin()
    torch.manual_seed(options["seed"])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(DEVICE)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "frozen_mb" in options:
        model.register_buffer("frozen", torch.randn(options["frozen_mb"] << 18, device=DEVICE))
    if "rate" in options:
        joining.FIRST_RATE = options["rate"]
    transport = SteeredTransport(
        timeout=timedelta(seconds=30),
        num_chunks=0,
        hostname="127.0.0.1",
        max_serve_bytes_per_s=options.get("serve_bytes_per_s"),
    )
    control = Path(options["control"])
    transport.control, transport.cancelled = control, threading.Event()
    load_now, state_dict = state_functions(model, inner)

    def load_state_dict(state: dict[str, Any]) -> None:
        report("loading")
        time.sleep(options.get("load_s", 0.0))
        load_now(state)
        report("loaded")

    follows = options.get("follow", False) or options.get("spare", False) or "join_stall_limit_s" in options
    stall_limit = timedelta(seconds=options.get("join_stall_limit_s", 60.0)) if follows else None
    try:
        manager = make_manager(
            options,
            transport,
            load_state_dict,
            state_dict,
            min_replica_size=options.get("min_replica_size", 2),
            world_size_mode=WorldSizeMode[options.get("world_size_mode", "DYNAMIC")],
            spare=options.get("spare", False),
            join_stall_limit=stall_limit,
        )
    except TorchftCkptError as error:
        report("refused", error=type(error).__name__, message=str(error))
        transport.shutdown()
        raise
    service = getattr(manager._client.link, "address", "")
    report("ready", replica_id=manager.replica_id(), transport=transport.metadata(), service=service)
    if "restore_step" in options:
        manager.load_state_dict({"step": options["restore_step"], "batches_committed": 0})
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(options["seed"])
    if options.get("forks"):
        # A child that was forked while the connections are open, and outlives this process, as a data loader's worker may.
        if not (child := os.fork()):
            signal.alarm(300)
            while True:
                signal.pause()
        report("forked", child=child)
    num_abandoned = 0
    try:
        while not is_over(options, manager.current_step()):
            before = manager.statistics()
            if manager.view().came_in:
                time.sleep(options.get("top_s", 0.0))
                report("begins")
            batch = torch.randn(8, 64, generator=generator).to(DEVICE)
            optimizer.zero_grad()
            pause = control / "pause"
            pause_s = float(pause.read_text()) if pause.exists() else options.get("pause_s")
            if pause_s:
                time.sleep(pause_s)  # stands for a longer forward pass
            loss = (ddp(batch) - batch).square().mean()
            if num_abandoned < options.get("abandon", 0) and not manager.is_participating():
                num_abandoned += 1
                report("abandoned", step=manager.current_step())
                continue
            loss.backward()
            contributed = manager.is_participating()  # before the quorum is there nobody is
            optimizer.step()
            average = float(contributed)
            if options.get("logs_loss"):
                average_of_all = torch.tensor([average], device=DEVICE)
                is_good = manager.allreduce(average_of_all).wait()
                average = average_of_all.item() if is_good else -1.0
            report_step(
                manager,
                before,
                contributed=contributed,
                logged=average,
                quorum=manager.statistics().quorum_id,
                digest=digest_of(state_dict()) if options.get("digest_each_step") else "",
            )
        report("done", step=manager.current_step(), digest=digest_of(state_dict()))
    finally:
        manager.shutdown()
        transport.shutdown()


if __name__ == "__main__":
    main()
