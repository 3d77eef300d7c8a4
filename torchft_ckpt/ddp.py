"""Data parallel training across replica groups: PyTorch's DDP, its gradients averaged by the manager.

The reducer's buckets are reduced as they fill, while the backward pass goes on. PyTorch's own process group is a dummy:
nothing but the communication hook crosses replicas, so a group that dies leaves DDP itself untouched.

(PyTorch reads the hook's annotations, so they are not postponed here.)
"""

from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # DDP's constructor imports it, which takes a second: better now than while others wait
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from torchft_ckpt.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from torchft_ckpt.manager import Manager


class DistributedDataParallel(parallel.DistributedDataParallel):
    """DDP over replica groups that come and go.

    Initial weights are made equal by the manager (`init_sync`), not by a broadcast. Buffers are not broadcast at all:
    what must be equal belongs into the state dict.

    Args:
        manager: of this rank.
        module: to train.
        kwargs: of PyTorch's DDP. `find_unused_parameters` is always on: without it the reducer rebuilds its buckets
            after the first step, and a replica that joins later would have other ones than the rest.
    """

    def __init__(self, manager: "Manager", module: nn.Module, **kwargs: Any) -> None:
        kwargs["find_unused_parameters"] = True
        kwargs["init_sync"] = False  # it would copy all parameters through the dummy group
        kwargs["process_group"] = ProcessGroupDummy(0, 1)
        super().__init__(module, **kwargs)
        self.register_comm_hook(manager, _average_bucket)


def _average_bucket(manager: "Manager", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start to average one bucket, flat, of the gradients' dtype; the future completes with it."""
    return manager.allreduce(bucket.buffer()).get_future()


class PureDistributedDataParallel(nn.Module):
    """One allreduce per gradient as it is accumulated, without DDP's reducer.

    Slower than `DistributedDataParallel` with many small parameters; for modules that its reducer cannot handle.

    Args:
        manager: of this rank.
        module: to train.
    """

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__()
        self.module = module

        def average(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                manager.allreduce(parameter.grad)

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)
