"""The public kit for tests of what is built on this library: what a part of your own must do. Import from the modules.

- `transport_conformance`: every `CheckpointTransport`
- `process_group_conformance`: every `ProcessGroup`
- `storage_conformance`: every file system for durable checkpoints
"""
