"""A server's treatment of its clients and its addresses; a launcher's treatment of its groups. Decisions only, as all of `core`.

admission   which connections a server keeps where it may not keep all
rate        how many requests, messages and bytes of one client are let through, and what counts as one
fairness    whose work is done next, and which names keep a place, where clients want more than there is
launching   which replica groups of a launched job start again, and how the job ends
interfaces  at which of its machine's addresses a process is reached
handshakes  why two parties do not come to speak TLS, and what to do
metrics     what is counted for Prometheus, and under which names
proofs      how two parties prove that they know the token, without sending it
"""
