"""The public kit for tests of what is built on this library. Import from the modules; nothing is loaded before.

- `fake_outer_manager`: an in-memory `OuterManager`, with replicas as threads and votes by a script

Checks of what a part of your own must do:

- `transport_conformance`: every `CheckpointTransport`
- `process_group_conformance`: every `ProcessGroup`
- `shard_adapter_conformance`: every `ShardAdapter`
- `storage_conformance`: every file system for durable checkpoints
- `outer_conformance`: every outer loop
"""
