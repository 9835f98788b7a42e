"""Replay one step under a microscope: the operation, its line, the rows, the cause."""
