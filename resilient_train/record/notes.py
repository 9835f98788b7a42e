"""Notes that ranks leave in the run directory where no collective reaches rank 0: who hung, who ran out of memory.

Each rank writes a file of its own, since rank 0 keeps the journal, perhaps on another host. Rank 0 reads the notes
before it ends, or the next start does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from resilient_train.files import commit_text, read_json
from resilient_train.secrets import masked_tree
from resilient_train.wording import rank_names

_LOOK_S = 0.1
_MOST_RANKS = 2**20


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank that hung, as its own watchdog saw it."""

    rank: int
    evidence: str
    is_in_users_code: bool  # else it may only have waited for another rank


@dataclass(frozen=True, slots=True, order=True)
class OutOfMemory:
    """An update that did not fit into a rank's memory: all ranks end, and restart with smaller micro-batches."""

    batch_size: int  # rows of its micro-batches
    step: int  # that it would have been
    rank: int
    evidence: str


Note = TypeVar("Note", Hung, OutOfMemory)

_FILE: dict[type, str] = {Hung: "hung.rank{}.json", OutOfMemory: "no_room.rank{}"}
_FIELDS: dict[type, dict[str, type]] = {
    Hung: {"rank": int, "evidence": str, "is_in_users_code": bool},
    OutOfMemory: {"batch_size": int, "step": int, "rank": int, "evidence": str},
}


def leave(run_dir: Path, note: Hung | OutOfMemory) -> None:
    """Write a note. Raises OSError where this host does not have the directory, or cannot write to it."""
    commit_text(run_dir / _FILE[type(note)].format(note.rank), json.dumps(masked_tree(asdict(note))) + "\n")


def found(run_dir: Path | None, kind: type[Note]) -> list[Note]:
    """Return what ranks noted in this host's directory, in order of the ranks; other files are passed over."""
    notes = []
    for path in run_dir.glob(_FILE[kind].format("*")) if run_dir is not None else []:
        node = read_json(path)
        if isinstance(node, dict) and {key: type(value) for key, value in node.items()} == _FIELDS[kind]:
            is_sane = node.get("batch_size", 1) > 0 <= node.get("step", 0)
            if is_sane and 0 <= node["rank"] < _MOST_RANKS:
                notes.append(kind(**node))
    return sorted(notes, key=lambda one: one.rank)


def clear(run_dir: Path | None, kind: type) -> None:
    """Remove the notes, now that the journal has them. Ranks that share a directory all try."""
    for path in run_dir.glob(_FILE[kind].format("*")) if run_dir is not None else []:
        with suppress(OSError):
            path.unlink()


def gather_hung(run_dir: Path, mine: Hung, size: int, seconds: float) -> list[Hung]:
    """Wait until all other ranks have noted where they hang, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while len(noted := found(run_dir, Hung)) < size - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return [mine, *noted]


def who_hung(noted: Sequence[Hung], size: int) -> str:
    """Say in one line who hung where: most ranks only wait for the one that did not come."""
    silent = sorted(set(range(size)) - {one.rank for one in noted})
    at_fault = [f"rank {one.rank}: {one.evidence}" for one in noted if one.is_in_users_code]
    if silent and not at_fault:
        at_fault.append(f"{rank_names(silent)} gave no sign of life, and the others waited: {noted[0].evidence}")
    return "; ".join(at_fault or [noted[0].evidence])
