"""What train_hsdp.py and train_fsdp.py share: options, the launcher of a group's processes, the task, and the loop."""
