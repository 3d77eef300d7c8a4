"""Other libraries' tensors, files and trainers. Nothing else imports these modules before the first of them is met.

xla           torch_xla's tensors as boxes: imported when a tensor on an xla device is met
dcp           torch.distributed.checkpoint: planners, a reader of a running job, a reader of its directories
accelerate    Hugging Face's Accelerator: one that its user imports
transformers  Hugging Face's Trainer: a callback that its user imports
lightning     Lightning's Trainer: strategies that its user imports
"""
