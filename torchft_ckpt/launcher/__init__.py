"""`torchft-ckpt run`: all replica groups of a job on one machine. `core/services/launching.py` decides what starts again.

supervisor  the groups: starts them, and ends them
agent       the process of one group: torchrun, which ends when the launcher does, and its ranks with it
"""
