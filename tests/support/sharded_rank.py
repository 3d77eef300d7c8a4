"""One of two ranks that hold a model as shards (FSDP2) and train it with DiLoCo; a process of its own.

sharded_rank.py RANK STORE_FILE OUT_FILE
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.fake_outer_manager import FakeOuterManager, Hub
from support.outer_reference import adamw, build_model, fragments_of, nesterov, train_step
from torchft_ckpt import DiLoCo

OUTCOMES = [True, False, True]
NUM_INNER_STEPS = 20
SYNC_EVERY = 6


def main() -> None:
    rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = build_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = adamw(model)
    fragments = fragments_of(model, 2)
    outer = [nesterov(f.parameters()) for f in fragments]
    history = []
    loop = DiLoCo(
        FakeOuterManager(Hub(1, OUTCOMES), 0),
        fragments,
        inner,
        outer,
        SYNC_EVERY,
        fragment_sync_delay=1,
        fragment_update_alpha=0.5,
        use_bucketization=True,
        bucket_cap_mb=100 / 2**20,
        round_retries=0,
    )
    with loop:
        for inner_step in range(NUM_INNER_STEPS):
            train_step(model, inner, 0, inner_step)
            history.append([param.detach().full_tensor().view(torch.int64) for param in model.parameters()])
    if rank == 0:
        torch.save(history, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
