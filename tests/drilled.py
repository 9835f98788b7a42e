"""Faults on purpose, for tests that have no journal."""

from __future__ import annotations

from typing import Any

from resilient_train.extensions.drills import Drill


def drill_of(*faults: Any) -> Drill:
    """One that remembers by itself what it has fired."""
    fired: set[int] = set()
    return Drill(faults, has_fired=fired.__contains__, fired=lambda number, *_: fired.add(number))
