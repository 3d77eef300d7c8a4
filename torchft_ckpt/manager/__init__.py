"""Where coordination, transport and process group meet: the training loop's one partner.

manager      the public class: quorum, allreduce, commit
launch       arguments and environment to addresses, ranks, store
collectives  allreduce whose errors end the step and nothing else
healing      moving the state: what to serve, what to fetch, loading it
worker       a daemon thread that runs what may block
"""

from torchft_ckpt.compat.names import lookup
from torchft_ckpt.manager.collectives import ExceptionWithTraceback
from torchft_ckpt.manager.manager import Manager, ManagerStatistics, WorldSizeMode

__all__ = ["ExceptionWithTraceback", "Manager", "ManagerStatistics", "WorldSizeMode"]

__getattr__ = lookup(__name__)
