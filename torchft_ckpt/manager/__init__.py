"""The training loop's one partner, and the only place where coordination, transport and process group meet.

manager            the public class
hooks              what the wrappers of this package tell it, and ask of it
parts              builds what is behind it, from the bottom up
step               one step: quorum, allreduce, commit
between_steps      catching up, handing over, meeting, while no step is open
step_client        coordination, and what this replica is
rank_config        arguments and environment to addresses, ranks, store; the connection
group_store        where the ranks of one group find each other
starting           what a rank says, hears, gives and receives that starts without a state
restoring          has its group read a checkpoint, or receive what another one has read
collectives        allreduce whose errors end the step and nothing else
clearing           all groups issue the same collective
timekeeping        what the training thread spends its time on; event_file writes it down
state_registry     the state that replicas have in common
guarding           optimizers' steps take the lock of the state
optimizer_settings guards optimizers' steps, carries their settings
volatile           copies what changes while it is served, without the lock

serving            serves the state
recovery           gets and loads it; healing fetches it
checking           makes the digests that the lighthouse compares
coming_in           keeps what was loaded as an iteration ended, until the next one begins
comparing          compares states bit by bit
foreign_transport  transports of other libraries
outcomes           counts how steps ended, and says so
saving             what a durable checkpoint needs
"""

from torchft_ckpt.compat.names import lookup
from torchft_ckpt.manager.collectives import ExceptionWithTraceback
from torchft_ckpt.manager.manager import Manager, WorldSizeMode
from torchft_ckpt.manager.outcomes import ManagerStatistics

__all__ = ["ExceptionWithTraceback", "Manager", "ManagerStatistics", "WorldSizeMode"]

__getattr__ = lookup(__name__)
