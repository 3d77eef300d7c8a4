"""Who trains together next, from which state, and whether a step counts. Decisions only, as all of `core`.

Between ranks, groups and lighthouse:
messages            what travels between them: typed, bounded, validated on decode
quorum              who trains together next, and under which id
recovery            which state a quorum trains from, and who loads it from whom
commit              whether the step of a quorum counts
causes              of which few causes a discarded step was one
sequence            which collectives may start without asking, and when those of a step differ

The lighthouse:
jobs                the jobs at one lighthouse, each with a state of its own
lighthouse          one job over time: events in, instructions out; when a quorum forms
lighthouse_events   these events and instructions, as data
lighthouse_records  what is written down about a member and about the open step, and what follows from that alone
job_record          what the parts of the lighthouse share: who is here, who asks, who is waited for, which step is open
roster              who is a member, over which connection, and who took whose place
history             which states the job has had, who may still hold them, and which contributors are gone
leadership          which of several lighthouses decides, and how long members take its word
restart             what a restarted lighthouse learns from the members of the last quorum
layouts             which groups can be in one quorum, by the layout of their tensors
starting            which group reads a checkpoint when none of those that start has a state, and who gets it from that one
deciding            how the step of a quorum goes: votes, collectives, and the decision that all are told
hold                for whom a quorum is held until they have its state, and for how long
connecting          with whom a newcomer is connected before it may be in a quorum
joining             how long those who train stand still for one that comes in
beside              the groups beside the quorum: who stays outside, what it is told and taught, and when it is called
spares              when a spare takes the place of one of the others, which it has followed so far
learning            who follows the others outside of the quorum before it comes in
leaving             when a group that is to leave may go
waiting             for whom the others waited in a step, in which phase, and who is slow
patience            how long to wait before trying again
speaking            which group writes for the job what all would write
equality            which votes show different states of one name
trial               whether the groups that ask for a quorum hold one state, and what those load that do not

A replica group and its ranks:
group               all ranks of a group take part in a step, or none does
ranks_together      when the ranks of a group load a state: all of them, or none; and which are behind in their loops
replica             the life of one rank's step: what it holds, whether it may contribute, vote and commit
meeting             whether a rank and the rank 0 that it finds at a store are of one group
"""
