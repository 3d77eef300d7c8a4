"""The public kit for tests of what is built on this library. Import from the modules; nothing is loaded before.

fake_transport          an in-memory `CheckpointTransport`
fake_process_group      an in-memory `ProcessGroup`: ranks as threads, failures on demand
transport_conformance   what every `CheckpointTransport` must do, as checks for your own
"""
