"""Checkpoints that outlive the job, in the format of torch.distributed.checkpoint. Written and found without collectives."""
