"""What lies in a run directory to say how a run ended: summary.json, or refused.json for a start that came to nothing.

Both speak of the newest process. One that begins takes away what the one before it said, so that a kill is known by
the silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from resilient_train import files
from resilient_train.files import commit_text, read_json, read_plain
from resilient_train.ranks.lock import holder_of
from resilient_train.record.loop import LOOP
from resilient_train.secrets import masked

CONFIG = "config.yaml"  # makes a directory that of a run, as loop.json does for a loop of somebody's own
SUMMARY, REFUSED, _FAILED = "summary.json", "refused.json", "failed.{}rank{}"

_TAIL_BYTES = 2**18  # of train.log: the line that says why it failed is near its end


def is_run(run_dir: Path) -> bool:
    """Say whether a run, or a loop of somebody's own, has begun in a directory."""
    return (run_dir / CONFIG).is_file() or (run_dir / LOOP).is_file()


def refused(run_dir: Path, exit_code: int, why: str) -> None:
    """Note in the directory of a run that a start was refused: under a launcher its exit code tells nobody."""
    if (run_dir / CONFIG).is_file():
        with suppress(OSError):
            commit_text(run_dir / REFUSED, json.dumps({"exit_code": exit_code, "why": masked(why)}) + "\n")


def failed(run_dir: Path, rank: int, why: str, *, in_training: bool) -> None:
    """Note the error of a rank other than 0: rank 0 sees no more of it than a closed connection, or a request to stop.

    Without that note the end of a process is taken for a kill, for which the samples at work may be to blame. One that
    fails before it is `in_training` says nothing of the process that has trained before it.
    """
    if is_run(run_dir):
        with suppress(OSError):
            commit_text(run_dir / _FAILED.format("" if in_training else "start.", rank), masked(why))


def failure(run_dir: Path, *, in_training: bool = False) -> str | None:
    """The error of the first rank other than 0 that noted one, in one line."""
    for path in sorted(run_dir.glob(_FAILED.format("" if in_training else "*", "*"))):
        with suppress(OSError):
            why = " ".join(read_plain(path, last=_TAIL_BYTES).decode("utf-8", "replace").split())
            return f"rank {path.name.rpartition('rank')[2]}: {why}"
    return None


def begin(run_dir: Path, *, is_finished: bool) -> None:
    """Take away what was said of earlier processes; a finished run keeps its summary, for nothing begins there."""
    notes = [path.name for path in run_dir.glob(_FAILED.format("*", "*"))]
    for name in [REFUSED, *notes] if is_finished else [REFUSED, SUMMARY, *notes]:
        with suppress(OSError):
            files.disk.unlink(run_dir / name)


def told(run_dir: Path, name: str) -> dict[str, Any] | None:
    """What one of the two says; None if it is not there or makes no sense."""
    node = read_json(run_dir / name)
    return node if isinstance(node, dict) and type(node.get("exit_code")) is int else None


def at_work(run_dir: Path) -> str | None:
    """Who holds the lock on a run directory; the kernel lets go of it with its process.

    Nobody where a loop of somebody's own has said its end: its process may be at other things.
    """
    if (run_dir / LOOP).is_file() and told(run_dir, SUMMARY) is not None:
        return None
    return holder_of(run_dir)


def stands(run_dir: Path) -> str | None:
    """How the newest process of a run ended: as its summary has it, or `killed`. None while one is at work."""
    if at_work(run_dir) is not None:
        return None
    if (summary := told(run_dir, SUMMARY)) is not None:
        return str(summary.get("status"))
    if not is_run(run_dir):
        return None
    return "killed" if failure(run_dir) is None else "failed"


def last_sign_ms(run_dir: Path) -> int | None:
    """When a run that is over gave its last sign, in ms since 1970."""
    for name in (SUMMARY, "progress"):
        with suppress(OSError):
            return (run_dir / name).stat().st_mtime_ns // 1_000_000
    return None


def why_of(run_dir: Path, summary: Mapping[str, Any] | None) -> str | None:
    """Why a run did not complete, in one line: the last error of its log, else as its summary has it."""
    why = summary.get("why") if summary is not None else None
    return last_error(run_dir / "train.log") or (why if isinstance(why, str) else failure(run_dir))


def last_error(log: Path) -> str | None:
    """The last error of a train.log, whose lines begin with date, time and level."""
    try:
        lines = read_plain(log, last=_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    errors = [words[3] for line in lines if len(words := line.split(" ", 3)) == 4 and words[2] == "ERROR"]
    return errors[-1].removeprefix("error: ") if errors else None
