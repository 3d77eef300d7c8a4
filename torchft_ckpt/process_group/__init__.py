"""Training process groups whose members change: Gloo and NCCL with an abort, and the small ones that DDP needs."""

from torchft_ckpt.process_group.base import ProcessGroup
from torchft_ckpt.process_group.gloo import ProcessGroupGloo
from torchft_ckpt.process_group.wrapper import ProcessGroupWrapper

__all__ = [
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupWrapper",
]
