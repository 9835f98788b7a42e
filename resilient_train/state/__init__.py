"""What a run *is*: captured, restored, and told apart by a digest."""
