"""HSDP that survives its replicas: FSDP2 shards the model inside a replica group, groups come and go.

    python -m torchft_ckpt run --groups 2 --nproc 2 -- examples/train_hsdp.py

Kill one process: its group ends as a whole and starts again, each rank fetches its own shards from its counterpart in another
group, and training goes on there without a pause in the others.
"""

from __future__ import annotations

import torch.distributed as dist
from sharded.loop import Place, train
from sharded.options import parse
from sharded.task import Model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchft_ckpt.errors import JobFinishedError


def shard(model: Model) -> Place:
    """Shard over all ranks of this group. The replicate dimension of HSDP is no part of the mesh: it is the manager's."""
    mesh = init_device_mesh(model.scale.device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Place(data_rank=mesh.get_local_rank())


def main() -> None:
    train(parse(__doc__), shard)


if __name__ == "__main__":
    try:
        main()
    except JobFinishedError as over:  # this group came when the others had made the last step
        print(over, flush=True)
