"""One rank of a replica group; trains a small model until it gets SIGTERM. Writes a line a step to its file, as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchft_ckpt import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--lighthouse", required=True, help="HOST:PORT")
    parser.add_argument("--store-port", type=int, required=True, help="of the group's rank 0")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds before each step")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load,
        lambda: {"model": module.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        rank=options.rank,
        world_size=options.world_size,
        store_addr="127.0.0.1",
        store_port=options.store_port,
        lighthouse_addr=options.lighthouse,
        replica_id=options.group,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ddp, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    with options.out.open("w", buffering=1) as out:
        addresses = {
            "transport": manager._transport.metadata(),
            "service": getattr(manager._client.link, "address", ""),
        }
        out.write(json.dumps({"pid": os.getpid(), "replica_id": manager.replica_id(), **addresses}) + "\n")
        while not stop.is_set():
            optimizer.zero_grad()
            time.sleep(options.pause)
            ddp(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            now = manager.statistics()
            line = {"t": time.monotonic(), "step": manager.current_step(), "discarded": now.num_discarded}
            out.write(json.dumps(line) + "\n")
    manager.shutdown()


if __name__ == "__main__":
    main()
