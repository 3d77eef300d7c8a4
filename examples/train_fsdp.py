"""FSDP2 with tensor parallelism, in replica groups that come and go.

    python -m torchft_ckpt run --groups 2 --nproc 4 -- examples/train_fsdp.py

A group of 4 is a mesh of 2 x 2: two ranks share each matrix product, and each such pair holds half of the parameters. Groups of
1, 2 and 3 shard without tensor parallelism, unless `--tensor-parallel` says otherwise. Groups that train at the same time have
the same size, because gradients are averaged shard by shard.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from sharded.loop import Place, train
from sharded.options import Options, parse
from sharded.task import Model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchft_ckpt.errors import JobFinishedError


def shard(model: Model, options: Options) -> Place:
    """Split the blocks' matrix products along `tensor`, then shard everything along `data`."""
    num_ranks = dist.get_world_size()
    num_tensor = options.tensor_parallel or (2 if num_ranks == 4 else 1)
    mesh = init_device_mesh(
        model.scale.device.type, (num_ranks // num_tensor, num_tensor), mesh_dim_names=("data", "tensor")
    )
    for block in model.blocks:
        if num_tensor > 1:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return Place(data_rank=mesh.get_local_rank("data"))


def main() -> None:
    options = parse(__doc__, tensor_parallel=True)
    train(options, partial(shard, options=options))


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
