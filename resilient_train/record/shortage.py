"""What a process among several leaves when it ran out of memory, for the start that follows.

The others wait for it in the midst of a backward, where nobody can fetch them: all of them have to end, and begin again
with smaller micro-batches. Each rank writes a file of its own, since the journal is kept by another, perhaps on another
host; what is found on any host is told to all.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from resilient_train.files import commit_text, read_json

_NAME = "no_room.rank"


@dataclass(frozen=True, slots=True, order=True)
class Shortage:
    """An update for which there was no room."""

    batch_size: int  # rows of its micro-batches
    step: int  # that it would have been
    rank: int
    evidence: str


def leave(directory: Path, one: Shortage) -> None:
    """Write it down. Raises OSError."""
    commit_text(directory / f"{_NAME}{one.rank}", json.dumps(asdict(one)))


def found(directory: Path | None) -> list[Shortage]:
    """What ranks have left in this host's directory; a file that is anything else is passed over."""
    ones = []
    for file in sorted(directory.glob(f"{_NAME}*")) if directory is not None else []:
        told = read_json(file)
        kinds = {"batch_size": int, "step": int, "rank": int, "evidence": str}
        if isinstance(told, dict) and {key: type(value) for key, value in told.items()} == kinds:
            ones.append(Shortage(**told))
    return [one for one in ones if one.batch_size > 0 <= one.step and one.rank >= 0]


def clear(directory: Path | None) -> None:
    """Forget what was left, now that the journal has it. Ranks that share a directory all try."""
    for file in directory.glob(f"{_NAME}*") if directory is not None else []:
        with contextlib.suppress(OSError):
            file.unlink()
