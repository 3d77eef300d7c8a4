"""The training loop's one partner, and the only place where coordination, transport and process group meet.

manager        the public class
step           one step: quorum, allreduce, commit
between_steps  catching up, handing over, meeting, while no step is open
step_client    coordination, and what this replica is
launch         arguments and environment to addresses, ranks, store; the connection
collectives    allreduce whose errors end the step and nothing else
serving        serves the state
recovery       gets and loads it; healing fetches it
outcomes       counts how steps ended, and says so
saving         what a durable checkpoint needs
"""

from torchft_ckpt.compat.names import lookup
from torchft_ckpt.manager.collectives import ExceptionWithTraceback
from torchft_ckpt.manager.manager import Manager, ManagerStatistics, WorldSizeMode

__all__ = ["ExceptionWithTraceback", "Manager", "ManagerStatistics", "WorldSizeMode"]

__getattr__ = lookup(__name__)
