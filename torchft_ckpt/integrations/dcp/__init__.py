"""torch.distributed.checkpoint (DCP): its planners and readers for our states, and our reader for its checkpoints.

planners         DCP's planners for SPMD tensors that have an adapter
peer_reader      DCP's storage reader that reads a running job
reader           checkpoints that DCP wrote; nothing of them is executed
"""
