"""Why a line stays as it is."""

from __future__ import annotations


class CannotArmor(Exception):
    """The line cannot be armored. The message says why, in one line for a person."""
