"""`torchft-ckpt run`: all replica groups of a job on one machine. `core/services/launching.py` decides what starts again.

supervisor  the lighthouse and the groups: starts them, writes what they say, ends them
agent       the process of one group: torchrun, which ends when the launcher does
orphans     processes that a killed group leaves behind
"""
