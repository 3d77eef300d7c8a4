"""One rank of a group that shards a small model by FSDP2 and trains it by a `StepLoader`, for some steps; a process of its own.

The option `dies` has rank 0 kill itself in the second microbatch of that step.
"""

from __future__ import annotations

import hashlib
import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support.trainer_process import begin, make_manager, report, state_functions
from torchft_ckpt import HTTPTransport, Optimizer, StepLoader, set_all_reduce_hook
from torchft_ckpt.events import MicrobatchDiffers


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the shards that are here, of parameters and moments."""
    found = hashlib.blake2b(digest_size=12)
    moments = [t for state in optimizer.state.values() for _, t in sorted(state.items()) if torch.is_tensor(t)]
    for tensor in [*model.parameters(), *moments]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    options = begin()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(options["weights"])
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))
    for part in (model[0], model[3], model):
        fully_shard(part)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    transport: HTTPTransport[Any] = HTTPTransport(timeout=timedelta(seconds=30), num_chunks=0, hostname="127.0.0.1")
    differ: list[str] = []
    hear = {"on_event": lambda event: differ.append(repr(event)) if isinstance(event, MicrobatchDiffers) else None}
    manager = make_manager(options, transport, *state_functions(model, inner), **hear)
    set_all_reduce_hook(manager, model)  # of a loop that had none of this; it does nothing here
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    steps = StepLoader(
        manager,
        rows,
        global_batch_size=12,
        microbatch_size=4,
        num_steps=options["num_steps"],
        rank_in_microbatch=(dist.get_rank(), dist.get_world_size()),
        check_microbatches_every=2,
    )
    optimizer = Optimizer(manager, inner)
    report("ready")
    for step in steps:
        optimizer.zero_grad()
        for number, batch in enumerate(step):
            if step.number == options.get("dies") and number == 1 and dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(batch).square().mean()
            loss.backward()
            step.log(loss=loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        counts = optimizer.step()
        loss_text = step.means["loss"].hex() if counts else ""
        report("step", step=manager.current_step(), committed=counts, loss=loss_text)
    report("done", step=manager.current_step(), digest=digest(model, inner), differ=differ)
    dist.barrier()
    manager.shutdown()
    transport.shutdown()


if __name__ == "__main__":
    main()
