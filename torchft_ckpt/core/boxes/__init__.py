"""Boxes of index space: arithmetic for tensors that are sharded. Decisions only, as all of `core`.

geometry  boxes of index space: what two of them share, and how others make one up
coverage  what of a tensor, or of ranks, is still missing
"""
