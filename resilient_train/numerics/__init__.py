"""Patches for single operations in code that users wrote: what breaks in them is repaired where it breaks."""
