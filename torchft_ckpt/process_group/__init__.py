"""Training process groups whose members change: Gloo and NCCL with an abort, and the small ones that DDP needs."""

from torchft_ckpt.process_group.base import ProcessGroup
from torchft_ckpt.process_group.dummy import CompletedWork, ProcessGroupDummy
from torchft_ckpt.process_group.gloo import ProcessGroupGloo
from torchft_ckpt.process_group.managed import ManagedProcessGroup
from torchft_ckpt.process_group.nccl import ProcessGroupNCCL
from torchft_ckpt.process_group.wrapper import ProcessGroupWrapper

__all__ = [
    "CompletedWork",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
]
