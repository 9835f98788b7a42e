"""The story of a run: how an update lands or is undone, what is noticed, where it can go back to, what is decided."""
