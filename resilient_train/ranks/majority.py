"""Which ranks differ, of those that should all say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

_NAMED = 8  # ranks at most


def odd_ones(said: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks that say something else than most; all of them where no two agree, or two camps are of one size."""
    (most, count), *others = Counter(said).most_common(2) if said else [(None, 0)]
    if others and (count == 1 or others[0][1] == count):
        return tuple(range(len(said)))
    return tuple(rank for rank, one in enumerate(said) if one != most)


def named(ranks: Sequence[int]) -> str:
    """Name some ranks: "rank 3", "ranks 0, 1 and 3"."""
    shown = [str(rank) for rank in ranks[:_NAMED]]
    if more := len(ranks) - len(shown):
        shown.append(f"{more:,} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
