"""The ground for many processes: who is who, one reduced vector, one decision, the lock on a run directory."""
