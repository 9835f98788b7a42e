"""How a run ended: loop.json, summary.json, refused.json, failed.rank*.

All but loop.json are about the newest process. A process that begins removes those of the previous one, so a run
without them and without a live process was killed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resilient_train import files
from resilient_train.files import commit_text, read_json, read_yaml
from resilient_train.ranks.lock import holder_of
from resilient_train.record.journal import plain
from resilient_train.record.progress import PROGRESS, Failed, clear, found, leave
from resilient_train.record.status import RunFacts
from resilient_train.secrets import masked, masked_tree

CONFIG, LOOP = "config.yaml", "loop.json"  # of a run of the command, and of a loop that the caller wrote
SUMMARY, REFUSED = "summary.json", "refused.json"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Loop:
    steps: int | None = None  # planned
    resumes: bool = False  # the same program resumes; otherwise it starts a new run in the next directory
    given: Mapping[str, Any] = field(default_factory=dict)  # to the guard; for a person to read
    is_trainers: bool = False  # which writes checkpoints of its own

    def write(self, run_dir: Path) -> None:
        commit_text(run_dir / LOOP, json.dumps(masked_tree(asdict(self)), indent=2) + "\n")


def loop_of(run_dir: Path) -> Loop | None:
    """Read loop.json; None if there is none, or if it is damaged."""
    try:
        return Loop(**read_json(run_dir / LOOP))
    except TypeError:
        return None


def settings_of(run_dir: Path) -> Mapping[str, Any]:
    """Read the settings of a run of the command, the node `run` of its configuration; none if that is damaged."""
    node = read_yaml(run_dir / CONFIG)
    run = node.get("run") if isinstance(node, dict) else None
    return run if isinstance(run, dict) else {}


def resumes(run_dir: Path) -> bool:
    """Say whether the same command, or program, resumes the run; otherwise it starts a new one in a sibling."""
    loop = loop_of(run_dir)
    return settings_of(run_dir).get("resume") != "never" if loop is None else loop.resumes


def is_run(run_dir: Path) -> bool:
    return (run_dir / CONFIG).is_file() or (run_dir / LOOP).is_file()


@dataclass
class Summary:
    """summary.json, whose fields scripts rely on. Units are in the names."""

    status: str  # completed, gave_up, preempted, failed; of a loop that the caller wrote also closed, ended (left)
    exit_code: int
    steps: int = 0
    ticks: int = 0
    steps_lost: int = 0
    final_loss: float | None = None
    eval: dict[str, float] | None = None
    incidents: dict[str, Any] = field(default_factory=lambda: {"total": 0, "recovered": 0, "by_cause": {}})
    seconds: float = 0.0
    step_ms: float | None = None
    weights_sha256: str | None = None
    state_sha256: str | None = None
    mlflow: dict[str, Any] | None = None
    first_loss: float | None = None  # the level of the first 8, to compare the final one with
    # the steps in which the loss was far lower than at the end, and their level; null if it was not
    best_level: dict[str, Any] | None = None
    # well, recovered, observed, unrecovered, no_progress, above_best; the status if the run did not complete
    verdict: str | None = None
    trial_updates: int = 0  # made to try remedies: neither steps nor ticks
    why: str | None = None  # it did not complete, in one line

    def write(self, path: Path) -> None:
        commit_text(path, json.dumps(masked_tree(plain(asdict(self))), indent=2) + "\n")


def begin(run_dir: Path, *, is_finished: bool) -> None:
    """Remove what earlier processes wrote about their end. A finished run keeps its summary: nothing begins there."""
    clear(run_dir, Failed)
    for name in [REFUSED] if is_finished else [REFUSED, SUMMARY]:
        with suppress(OSError):
            files.disk.unlink(run_dir / name)


def note_refusal(run_dir: Path, exit_code: int, why: str) -> None:
    """Note in the directory of a run that a start was refused: a launcher hides the exit code."""
    if (run_dir / CONFIG).is_file():
        with suppress(OSError):
            commit_text(run_dir / REFUSED, json.dumps({"exit_code": exit_code, "why": masked(why)}) + "\n")


def note_failure(run_dir: Path, rank: int, why: str, *, in_training: bool) -> None:
    """Note the error of a rank other than 0. Without, the end of its process counts as a kill by its samples."""
    if is_run(run_dir):
        with suppress(OSError):
            leave(run_dir, Failed(rank, why, in_training))


def failure(run_dir: Path, *, in_training: bool = False) -> str:
    """Return the error of the first rank other than 0 that noted one, in one line; empty if none did."""
    noted = [one for one in found(run_dir, Failed) if one.in_training or not in_training]
    return f"rank {noted[0].rank}: {' '.join(noted[0].why.split())}" if noted else ""


def read_ending(run_dir: Path, name: str) -> dict[str, Any] | None:
    """Read SUMMARY or REFUSED; None if it is not there or is damaged."""
    node = read_json(run_dir / name)
    return node if isinstance(node, dict) and type(node.get("exit_code")) is int else None


def at_work(run_dir: Path) -> str | None:
    """Name the process that holds the lock on a run directory."""
    if (run_dir / LOOP).is_file() and read_ending(run_dir, SUMMARY) is not None:
        return None  # the process of the caller's loop may be busy with something else
    return holder_of(run_dir)


def facts_of(run_dir: Path) -> RunFacts:
    """Read what a directory says of its run besides the journal."""
    return RunFacts(
        process=at_work(run_dir),  # first: a process that ends now has written its summary
        summary=read_ending(run_dir, SUMMARY) or {},
        failure=failure(run_dir),
        refusal=read_ending(run_dir, REFUSED) or {},
        is_run=is_run(run_dir),
    )


def last_sign_ms(run_dir: Path) -> int | None:
    """Return when a run that is over last wrote how it stands, in ms since 1970."""
    for name in (SUMMARY, PROGRESS):
        with suppress(OSError):
            return (run_dir / name).stat().st_mtime_ns // 1_000_000
    return None
