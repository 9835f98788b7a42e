"""The disk: the event log, checkpoints, resume, the lock, files."""
