"""Decisions only: no torch, no aiohttp, no sockets, no threads, no clock (`now` is an argument), no environment.

messages    what travels between ranks, groups and lighthouse, validated on decode
quorum      who trains together next
recovery    who recovers from whom
commit      does the step of a quorum count
lighthouse  the three above over time, for all groups: events in (`lighthouse_events`), instructions out
restart     what a restarted lighthouse learns from the members of the last quorum
group       one replica group's ranks towards the lighthouse: all of them or none
replica     the life of one rank's step: what state it holds, whether it may contribute, vote and commit
patience    back-off schedules, and when a collective counts as stalled behind a joiner
rate        how many requests of one client are let through
admission   which connections a server keeps where it may not keep all
proofs      how parties prove to each other that they know the token, and what, without sending it
places      which names keep a place, where names cost nothing to make and places do
fairness    whose work is done next where clients want more than there are threads
"""
