"""Decisions only: no torch, no aiohttp, no sockets, no threads, no clock (`now` is an argument), no environment.

Between ranks, groups and lighthouse:
messages            what travels between them: typed, bounded, validated on decode
text                text of others, made fit for a terminal and a log
proofs              how two parties prove that they know the token, without sending it
quorum              who trains together next, and under which id
recovery            which state a quorum trains from, and who loads it from whom
commit              whether the step of a quorum counts
sequence            which collectives may start without asking, and when those of a step differ

The lighthouse:
jobs                the jobs at one lighthouse, each with a state of its own
lighthouse          one job over time: events in, instructions out
lighthouse_events   these events and instructions, as data
lighthouse_records  what is written down about a member and about the open step, and what follows from that alone
roster              who is a member, over which connection, and who took whose place
history             which states the job has had, who may still hold them, and which contributors are gone
restart             what a restarted lighthouse learns from the members of the last quorum
layouts             which groups can be in one quorum, by the layout of their tensors
gathering           which groups look for a state together when none of them has one
joining             how long those who train wait for one that joins
patience            how long to wait before trying again
equality            which groups hold another state than the others of the same name
callers             quorums of callers of `LighthouseClient.quorum`

A replica group and its ranks:
group               all ranks of a group take part in a step, or none does
rank_calls          calls that all ranks of a group make, and the answer to each
replica             the life of one rank's step: what it holds, whether it may contribute, vote and commit; who shares the step
meeting             whether a rank and the rank 0 that it finds at a store are of one group
restore_source      where a rank that starts takes its state from
discards            what would help where steps are discarded again and again
outer_schedule      when an outer loop exchanges a fragment, and what becomes of its round

Transfers and services:
transfer            which unit of a state, a block or a box, comes from which source
paths               over which of a source's addresses it comes
pages               with which pages fresh memory is touched
boxes               boxes of index space: what two of them share, and how others make one up
interfaces          at which of its machine's addresses a process is reached
admission           which connections a server keeps where it may not keep all
rate                how many requests and bytes of one client are let through
places              which names keep a place, where anybody can make up names
fairness            whose work is done next where clients want more than there are threads

Durable checkpoints:
shares              which of the ranks that hold the same bytes writes them, or reads them for the others
saving              who writes a share whose writers are lost, and who closes the checkpoint
coverage            what of a tensor, or of ranks, is still missing
retention           which checkpoints may be removed
"""
