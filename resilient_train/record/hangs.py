"""What the other ranks leave behind when they do not go on: rank 0 tells it, or the next start if rank 0 cannot."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from resilient_train.files import commit_text, read_json
from resilient_train.secrets import masked_tree
from resilient_train.wording import rank_names

_NAME = "hung.rank{}.json"
_LOOK_S = 0.1
_MOST = 2**20  # ranks


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank that did not go on, as its own watchdog saw it."""

    rank: int
    evidence: str
    is_in_users_code: bool  # else it may only have waited for another


def leave(run_dir: Path, hung: Hung) -> None:
    """Note it in the run directory; a rank of a host that does not have that one notes nothing."""
    with suppress(OSError):
        if run_dir.is_dir():
            commit_text(run_dir / _NAME.format(hung.rank), json.dumps(masked_tree(asdict(hung))) + "\n")


def found(run_dir: Path) -> list[Hung]:
    """What was noted, in order of the ranks."""
    several = []
    for path in run_dir.glob(_NAME.format("*")):
        node = read_json(path)
        match node:
            case {"rank": int(rank), "evidence": str(evidence), "is_in_users_code": bool(is_in)} if 0 <= rank < _MOST:
                several.append(Hung(rank, evidence, is_in))
    return sorted(several, key=lambda one: one.rank)


def gathered(run_dir: Path, mine: Hung, size: int, seconds: float) -> list[Hung]:
    """What was noted, once all other ranks have noted something, or so long after it was asked for."""
    deadline = time.monotonic() + seconds
    while len(noted := found(run_dir)) < size - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return [mine, *noted]


def clear(run_dir: Path) -> None:
    """Take the notes away, as they were told."""
    for path in run_dir.glob(_NAME.format("*")):
        with suppress(OSError):
            path.unlink()


def told(noted: Sequence[Hung], size: int) -> str:
    """Say in one line who hung where: most ranks only wait for the one that did not come."""
    silent = sorted(set(range(size)) - {one.rank for one in noted})
    at_fault = [f"rank {one.rank}: {one.evidence}" for one in noted if one.is_in_users_code]
    if silent and not at_fault:
        at_fault.append(f"{rank_names(silent)} gave no sign of life, and the others waited: {noted[0].evidence}")
    return "; ".join(at_fault or [noted[0].evidence])
