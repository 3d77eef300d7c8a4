"""Boxes of index space: arithmetic for tensors that are sharded. Decisions only, as all of `core`.

geometry  boxes of index space: what two of them share, how others make one up, and what is still missing
"""
