"""Steps that are the same to the last bit, whoever computes them.

loader     `StepLoader`: the loop's two `for`s, and what a step must not be interrupted by
reading    the samples of a microbatch, in this process or in a data loader's workers
captured   what microbatches leave behind (gradients, buffers, logged values), in flat memory, as nodes of the step's tree
staying    what the inner loop leaves as it is, or is refused
kernels    deterministic ones in the inner loop, on accelerators
tree_sum   the sum of the nodes of all groups, over the process group
feeding    a framework's loop, which takes a step for a batch
audit      a microbatch that several groups compute, to find who computes something else

Who computes what, and all that follows from a step's number, is decided in `core.training.microbatches`.
"""

from torchft_ckpt.exact.loader import Step, StepLoader

__all__ = ["Step", "StepLoader"]
