"""The disk: weights that anyone can load."""
