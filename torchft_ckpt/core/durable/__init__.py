"""Who writes and reads checkpoints that outlive a job. Decisions only, as all of `core`.

assignment      which of the ranks that hold the same bytes writes them, or reads them for the others
saving          who writes a share whose writers are lost, and who closes the checkpoint
retention       which checkpoints may be removed
restore_source  where a rank that starts takes its state from
"""
