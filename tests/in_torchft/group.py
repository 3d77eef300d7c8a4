"""A rank of a replica group that trains inside torchft: its Manager, its lighthouse, and our transport. One rank alone trains
with torchft's DDP, several train one model sharded by FSDP2.

Its options come as one JSON object on the command line; it reports JSON lines. It ends `steps_together` steps after the first
one that two groups contributed to, which is the same step on both, and then waits for its standard input to end, so that no
group takes its store away while the other one is in its last collective.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torchft.manager
import xxhash
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchft_ckpt import HTTPTransport

_TIMEOUT = timedelta(seconds=60)


class WatchedTransport(HTTPTransport):
    """Ours, which reports what torchft's Manager asks of it."""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)
        report("sending", step=step, digest=digest_of(state_dict["user"]["default"]))

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        report("received", step=step, metadata=metadata, digest=digest_of(state["user"]["default"]))
        return state


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def digest_of(state: Any) -> str:
    """Return a digest of all bits of the tensors in a state, in the order in which they are met."""
    hasher = xxhash.xxh3_128()

    def visit(value: Any) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if torch.is_tensor(value):
            hasher.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(state)
    return hasher.hexdigest()


def _local(state: Any) -> Any:
    """Return a state with this rank's part of each tensor."""
    if isinstance(state, dict):
        return {key: _local(value) for key, value in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


def _refuse_torchfts_transport(*_: object, **__: object) -> None:
    raise RuntimeError("torchft's own HTTPTransport was made, so ours is not the one in use")


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(options["group"])  # the groups start from different weights: only healing makes them equal
    torchft.manager.HTTPTransport = _refuse_torchfts_transport  # type: ignore[misc]
    rank, world_size = options.get("rank", 0), options.get("world_size", 1)
    store = distributed.TCPStore(
        "127.0.0.1", options.get("port", 0), is_master=rank == 0, wait_for_workers=False, timeout=_TIMEOUT
    )
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if world_size > 1:
        own = distributed.PrefixStore("own", store)
        distributed.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    transport: HTTPTransport[Any] = WatchedTransport(timeout=_TIMEOUT, hostname="127.0.0.1", bind="127.0.0.1")
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=options["use_async_quorum"],
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=rank,
        world_size=world_size,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options["lighthouse"],
        replica_id=f"group_{options['group']}",
        hostname="127.0.0.1",
        checkpoint_transport=transport,
    )
    ddp = model if world_size > 1 else torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(options["group"])
    last_step: int | None = None
    while last_step is None or manager.current_step() < last_step:
        batch = torch.randn(8, 64, generator=generator)
        optimizer.zero_grad()
        time.sleep(0.02)  # stands for a forward pass
        (ddp(batch) - batch).square().mean().backward()
        if world_size > 1:
            for parameter in model.parameters():
                manager.allreduce(parameter.grad.to_local()).wait()  # type: ignore[union-attr]  # a DTensor, as its parameter
        before = manager.current_step()
        optimizer.step()
        participants = manager.num_participants()
        if manager.current_step() > before:
            if last_step is None and participants == 2:
                last_step = manager.current_step() + options["steps_together"]
            report("step", step=manager.current_step(), participants=participants, digest=digest_of(state_dict()))
    torch.save(_local(state_dict()), options["result"])
    report("done", step=manager.current_step(), metadata=transport.metadata())
    sys.stdin.read()
    manager.shutdown()


if __name__ == "__main__":
    main()
