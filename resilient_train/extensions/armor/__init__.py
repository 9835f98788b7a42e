"""Patches for single operations in code that users wrote: what breaks is repaired where it breaks."""
