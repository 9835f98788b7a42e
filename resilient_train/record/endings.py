"""How a run ended and what it left on disk: loop.json, summary.json, refused.json, failed.rank*, checkpoints, best/.

The files about an end speak of the newest process. A process that begins removes those of the previous one, so a run
without them and without a process at work was killed.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from resilient_train import files
from resilient_train.files import commit_text, read_json, read_plain
from resilient_train.ranks.lock import holder_of
from resilient_train.secrets import masked, masked_tree
from resilient_train.types import Incident, Outcome

CONFIG, LOOP = "config.yaml", "loop.json"  # mark the directory of a run: of the command's, or of the caller's own loop
SUMMARY, REFUSED, _FAILED = "summary.json", "refused.json", "failed.{}rank{}"
CHECKPOINTS = "checkpoints"

_CHECKPOINT = re.compile(r"step-\d{8,18}(\.\d+)?")
_TAIL_BYTES = 2**18  # of train.log: the line that says why it failed is near its end
_JUDGED_AFTER = 50  # steps: before, a loss that has not fallen means nothing
_LITTLE = 0.01  # of the first loss: what it has to fall by at least
_TIMED = 10_000  # laps that the median step time is taken of
_NOTHING: Mapping[str, Any] = MappingProxyType({})


# ---------------------------------------------------------------------------------------------------- a loop's own file


@dataclass(frozen=True, slots=True)
class Loop:
    """loop.json: what is known from outside about a training loop that the caller wrote."""

    steps: int | None = None  # planned
    resumes: bool = False  # the same program resumes; else it starts a new run in the next directory
    given: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # shown in MLflow, to compare runs by

    def write(self, run_dir: Path) -> None:
        """Commit it to disk."""
        node = {"steps": self.steps, "goes_on": self.resumes, "given": dict(self.given)}
        commit_text(run_dir / LOOP, json.dumps(masked_tree(node), indent=2) + "\n")


def loop_of(run_dir: Path) -> Loop | None:
    """Read loop.json; None where there is none."""
    node = read_json(run_dir / LOOP)
    if not isinstance(node, dict):
        return None
    steps, given = node.get("steps"), node.get("given")
    return Loop(
        steps=steps if type(steps) is int else None,
        resumes=node.get("goes_on") is True,
        given=given if isinstance(given, dict) else _NOTHING,
    )


def next_directory(run_dir: Path) -> str:
    """Name the directory that a loop which does not resume would write to next."""
    first = run_dir.absolute()
    if (base := re.fullmatch(r"(.+)-\d+", first.name)) and (first.with_name(base[1]) / LOOP).exists():
        first = first.with_name(base[1])
    siblings = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(one.name for one in siblings if not one.exists())


def is_run(run_dir: Path) -> bool:
    """Say whether a run has begun in a directory: the command's, or a loop that the caller wrote."""
    return (run_dir / CONFIG).is_file() or (run_dir / LOOP).is_file()


# ------------------------------------------------------------------------------------------------------------- summary


@dataclass
class Summary:
    """summary.json, whose fields scripts rely on; units in the names where there are any."""

    status: str  # completed, gave_up, preempted, failed; of the caller's own loop also: closed, ended (left)
    exit_code: int
    steps: int
    ticks: int
    steps_lost: int
    final_loss: float | None
    eval: dict[str, float] | None
    incidents: dict[str, Any]
    seconds: float
    step_ms: float | None
    weights_sha256: str | None
    state_sha256: str | None
    mlflow: dict[str, Any] | None
    first_loss: float | None = None  # the mean of the first 8, to compare the final one with
    verdict: str | None = None  # well, recovered, unrecovered, no_progress; of a run that did not complete: its status
    why: str | None = None  # the caller's own loop did not complete: it has no train.log that says why

    @classmethod
    def without_update(cls, status: str, exit_code: int, seconds: float) -> Summary:
        """Summarize a start that ended before there was anything to train."""
        nothing = {"total": 0, "recovered": 0, "by_cause": {}}
        return cls(status, exit_code, 0, 0, 0, None, None, nothing, round(seconds, 3), None, None, None, None)

    def write(self, path: Path) -> None:
        """Commit it to disk."""
        node = {key: value for key, value in asdict(self).items() if key != "why" or value is not None}
        commit_text(path, json.dumps(masked_tree(_finite(node)), indent=2) + "\n")


def verdict_of(
    status: str, incidents: Sequence[Incident], steps: int, losses: tuple[float | None, float | None]
) -> str:
    """Say in a word whether a run is all right; `losses` are those that it began and ended with."""
    if status != "completed":
        return status
    given_up = max((place for place, one in enumerate(incidents) if one.decision.gave_up is not None), default=-1)
    if any(one.outcome is Outcome.UNRECOVERED for one in incidents[given_up + 1 :]):
        return "unrecovered"
    first, final = losses
    if steps >= _JUDGED_AFTER and first is not None and final is not None and not final < first - _LITTLE * abs(first):
        return "no_progress"
    return "recovered" if incidents else "well"


@dataclass
class StepTimes:
    """How long steps took."""

    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED))  # a mean for each lap
    _lap_started: float = 0.0
    _lap_tick: int = 0

    def start_lap(self) -> None:
        """Begin to time the steps that follow."""
        self._lap_started = time.perf_counter()

    def lap(self, tick: int) -> float:
        """Return the mean seconds of the updates up to `tick` since the last lap; 0.0 if there were none.

        Between two readings the host runs ahead of a GPU; only at a reading do their clocks agree.
        """
        now = time.perf_counter()
        ticks, self._lap_tick = tick - self._lap_tick, tick
        seconds = (now - self._lap_started) / ticks if ticks else 0.0
        self._lap_started = now
        if ticks:
            self.step_seconds.append(seconds)
        return seconds

    @property
    def step_ms(self) -> float | None:
        return 1e3 * median(self.step_seconds) if self.step_seconds else None


# ------------------------------------------------------------------------------------------------------ how a run ended


def begin(run_dir: Path, *, is_finished: bool) -> None:
    """Remove what earlier processes wrote about their end; a finished run keeps its summary: nothing begins there."""
    notes = [path.name for path in run_dir.glob(_FAILED.format("*", "*"))]
    for name in [REFUSED, *notes] if is_finished else [REFUSED, SUMMARY, *notes]:
        with suppress(OSError):
            files.disk.unlink(run_dir / name)


def note_refusal(run_dir: Path, exit_code: int, why: str) -> None:
    """Note in the directory of a run that a start was refused: a launcher hides the exit code."""
    if (run_dir / CONFIG).is_file():
        with suppress(OSError):
            commit_text(run_dir / REFUSED, json.dumps({"exit_code": exit_code, "why": masked(why)}) + "\n")


def note_failure(run_dir: Path, rank: int, why: str, *, in_training: bool) -> None:
    """Note the error of a rank other than 0: rank 0 sees only a closed connection, or a request to stop.

    Without that note the end of a process counts as a kill, for which its samples may be to blame. An error before
    training began says nothing about the previous process, which has trained.
    """
    if is_run(run_dir):
        with suppress(OSError):
            commit_text(run_dir / _FAILED.format("" if in_training else "start.", rank), masked(why))


def failure(run_dir: Path, *, in_training: bool = False) -> str | None:
    """Return the error of the first rank other than 0 that noted one, in one line."""
    for path in sorted(run_dir.glob(_FAILED.format("" if in_training else "*", "*"))):
        with suppress(OSError):
            why = " ".join(read_plain(path, last=_TAIL_BYTES).decode("utf-8", "replace").split())
            return f"rank {path.name.rpartition('rank')[2]}: {why}"
    return None


def read_ending(run_dir: Path, name: str) -> dict[str, Any] | None:
    """Read SUMMARY or REFUSED; None if it is not there or makes no sense."""
    node = read_json(run_dir / name)
    return node if isinstance(node, dict) and type(node.get("exit_code")) is int else None


def at_work(run_dir: Path) -> str | None:
    """Name the process that holds the lock on a run directory; the kernel releases it with the process.

    None for the caller's own loop once it has written its end: its process may be busy with something else.
    """
    if (run_dir / LOOP).is_file() and read_ending(run_dir, SUMMARY) is not None:
        return None
    return holder_of(run_dir)


def ended_as(run_dir: Path) -> str | None:
    """Say how the newest process of a run ended: the status in its summary, or `killed`. None while one is at work."""
    if at_work(run_dir) is not None:
        return None
    if (summary := read_ending(run_dir, SUMMARY)) is not None:
        return str(summary.get("status"))
    if not is_run(run_dir):
        return None
    return "killed" if failure(run_dir) is None else "failed"


def last_sign_ms(run_dir: Path) -> int | None:
    """When a run that is over last wrote something, in ms since 1970."""
    for name in (SUMMARY, "progress"):
        with suppress(OSError):
            return (run_dir / name).stat().st_mtime_ns // 1_000_000
    return None


def why_incomplete(run_dir: Path, summary: Mapping[str, Any] | None) -> str | None:
    """Say in one line why a run did not complete: the last error in its log, else what its summary says."""
    with suppress(OSError):
        lines = read_plain(run_dir / "train.log", last=_TAIL_BYTES).decode("utf-8", "replace").splitlines()
        # Each line begins with date, time and level.
        errors = [words[3] for line in lines if len(words := line.split(" ", 3)) == 4 and words[2] == "ERROR"]
        if errors and (last := errors[-1].removeprefix("error: ")):
            return last
    why = summary.get("why") if summary is not None else None
    return why if isinstance(why, str) else failure(run_dir)


# -------------------------------------------------------------------------------------------------- checkpoints on disk


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state, or weights alone, in a directory of its own, as the JSON next to the tensors describes it."""

    step: int
    path: Path  # absolute
    kind: str  # verified; candidate: not yet verified; best: verified weights with the least evaluation loss
    tick: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    remedies: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)  # active when it was written

    @property
    def is_verified(self) -> bool:
        """Say whether the updates after it were healthy, too."""
        return self.kind == "verified"


def checkpoints_of(run_dir: Path) -> list[Checkpoint]:
    """List what a resume may load, the latest first; checksums are left to the loader."""
    try:
        names = [path for path in (run_dir / CHECKPOINTS).iterdir() if _CHECKPOINT.fullmatch(path.name)]
    except OSError:
        return []
    found = [one for path in names if (one := _checkpoint(path.absolute())) is not None]
    return sorted(found, key=lambda one: (one.tick, one.step, one.path.name), reverse=True)


def last_good_of(run_dir: Path) -> Checkpoint | None:
    """Return the newest that its manifest calls verified."""
    return next((one for one in checkpoints_of(run_dir) if one.is_verified), None)


def best_of(run_dir: Path) -> Checkpoint | None:
    """Return the weights with the least evaluation loss, if any were written."""
    path = run_dir.absolute() / "best"
    node = read_json(path / "best.json")
    step = node.get("step") if isinstance(node, dict) else None
    if type(step) is not int or step < 0 or not (path / "weights.safetensors").is_file():
        return None
    numbers = {name: one for name, one in node.items() if name != "step" and type(one) in (int, float)}
    metrics = {str(name): float(one) for name, one in numbers.items() if math.isfinite(one)}
    return Checkpoint(step, path, "best", metrics=metrics)


def _checkpoint(path: Path) -> Checkpoint | None:
    """Read a manifest; None where the checkpoint is demoted or damaged, or a file is missing or of another size."""
    node = None if path.is_symlink() else read_json(path / "manifest.json")
    match node:
        case {
            "kind": "verified" | "candidate" as kind,
            "step": int(step),
            "tick": int(tick),
            "files": dict(files),
            "remedies": dict(remedies),
        } if min(step, tick) >= 0 and files and all(_is_there(path / name, one) for name, one in files.items()):
            return Checkpoint(step, path, kind, tick, remedies=remedies)
    return None


def _is_there(file: Path, written: Any) -> bool:
    try:
        return isinstance(written, dict) and file.lstat().st_size == written.get("bytes")
    except (OSError, ValueError):
        return False


def _finite(value: Any) -> Any:
    """Spell out what JSON has no word for: a bare NaN would make the file unreadable to strict readers."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
