"""Notes that ranks leave in the run directory when no collective reaches rank 0: which one hung or ran out of memory.

Each rank writes its own file, as rank 0 keeps the journal, perhaps on another host. Rank 0 reads the notes before it
ends, or the next process does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar, get_type_hints

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
    is_in_users_code: bool  # otherwise it may only have waited for another rank


@dataclass(frozen=True, slots=True, order=True)
class OutOfMemory:
    """An update that did not fit into a rank's memory: all ranks end, and restart with smaller micro-batches."""

    batch_size: int  # rows of its micro-batches
    step: int  # that it would have been
    rank: int
    evidence: str


Note = TypeVar("Note", Hung, OutOfMemory)

_FILES: dict[type, str] = {Hung: "hung.rank{}.json", OutOfMemory: "no_room.rank{}"}


def leave(run_dir: Path, note: Hung | OutOfMemory) -> None:
    """Write a note. Raises OSError if this host does not have the directory, or cannot write to it."""
    commit_text(run_dir / _FILES[type(note)].format(note.rank), json.dumps(masked_tree(asdict(note))) + "\n")


def found(run_dir: Path | None, kind: type[Note]) -> list[Note]:
    """Return the notes of this kind in this host's directory, in order of the ranks; damaged files are left out."""
    notes = []
    for path in run_dir.glob(_FILES[kind].format("*")) if run_dir is not None else []:
        node = read_json(path)
        if isinstance(node, dict) and {key: type(value) for key, value in node.items()} == get_type_hints(kind):
            is_sane = node.get("batch_size", 1) > 0 <= node.get("step", 0)
            if is_sane and 0 <= node["rank"] < _MOST_RANKS:
                notes.append(kind(**node))
    return sorted(notes, key=lambda one: one.rank)


def clear(run_dir: Path | None, kind: type) -> None:
    """Remove the notes, as the journal has them now. All ranks that share a directory try to."""
    for path in run_dir.glob(_FILES[kind].format("*")) if run_dir is not None else []:
        with suppress(OSError):
            path.unlink()


def gather_hung(run_dir: Path, mine: Hung, size: int, seconds: float) -> list[Hung]:
    """Wait at most so many seconds for all other ranks to note where they hang; return the notes, mine first."""
    deadline = time.monotonic() + seconds
    while len(noted := found(run_dir, Hung)) < size - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return [mine, *noted]


def who_hung(noted: Sequence[Hung], size: int) -> str:
    """Say in one line which ranks hung where: most of them only wait for the one at fault."""
    silent = sorted(set(range(size)) - {one.rank for one in noted})
    at_fault = [f"rank {one.rank}: {one.evidence}" for one in noted if one.is_in_users_code]
    if silent and not at_fault:
        at_fault.append(f"{rank_names(silent)} did not respond, and the others waited: {noted[0].evidence}")
    return "; ".join(at_fault or [noted[0].evidence])
