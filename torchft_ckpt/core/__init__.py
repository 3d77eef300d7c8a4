"""Decisions only: no torch, no aiohttp, no sockets, no threads, no clock (`now` is an argument), no environment.

Each package has a map of its own:
coordination  who trains together, from which state, and whether a step counts: lighthouse, groups, ranks
training      the training loop: discarded steps, optimizers that share a step, rounds of an outer loop
transfer      which bytes of a state come from which source, and over which of its addresses
services      how a server treats its clients: places, rates, turns, proofs of the token, addresses; how a launcher treats groups
boxes         boxes of index space: what two of them share, what is missing of a tensor
durable       durable checkpoints: who writes what, takes over, closes, removes, restores

Beside them:
text          text of others, made fit for a terminal and a log
"""
