"""The ranks of a run: who is who, one reduced vector, one decision, stop and watch."""
