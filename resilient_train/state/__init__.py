"""What a run *is*: captured, restored, and compared by a digest."""
