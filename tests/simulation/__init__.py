"""The deterministic simulation of whole jobs: everything around `core` that is slow, unreliable or can die, as a model.

clock        virtual time, processes that can be killed and stopped
network      connections between groups and the lighthouse
collectives  the training process group: allreduce that fails for some members and succeeds for others
transfers    state from a healthy rank to a healing one: slow, failing, torn
trainer      one rank: drives `core.coordination.replica` as the manager does
outer_rank   likewise, as an outer loop does: long phases between two rounds
outer_watch  what must hold of the quorums of outer loops
group        one replica group: drives `core.coordination.group`, keeps a connection to the lighthouse
lighthouse   drives `core.coordination.lighthouse`, dies and comes back without memory
oracle       what must hold after every event
chaos        what goes wrong, and when
run          puts them together: one job from one seed, and the command line (`scripts/simulate`)

All chance comes from the seed.
"""
