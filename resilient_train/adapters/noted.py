"""What a trainer has counted and listed in its forwards: copied, and added to, so that a retry counts once."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any


def copied(noted: Any) -> Any:
    """Copy containers, but not the numbers and texts in them, of which there may be many."""
    if not isinstance(noted, dict):
        return copy.copy(noted) if isinstance(noted, list | deque) else noted
    copied_one = copy.copy(noted)  # of its kind, such as a defaultdict
    copied_one.update({name: copied(one) for name, one in noted.items()})
    return copied_one


def with_added(noted: Any, before: Any, after: Any) -> Any:
    """Return `noted` with what was added between `before` and `after`; where these are equal, it stays."""
    if isinstance(after, dict):
        result = copy.copy(after)  # which may have names that the others lack
        for name, one in after.items():
            result[name] = with_added((noted or {}).get(name), (before or {}).get(name), one)
        return result
    if isinstance(after, list | deque):
        old = list(before or ())
        if len(after) < len(old) or any(one is not other for one, other in zip(old, after, strict=False)):
            return copied(after)  # replaced: cleared, or a deque that is full
        result = copied(after)
        result.clear()
        result.extend([*(noted or ()), *list(after)[len(old) :]])
        return result
    if isinstance(after, int | float) and not isinstance(after, bool):
        return after - (before or 0) + (noted or 0)
    return noted if after is before else after
