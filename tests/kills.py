"""Runs that a signal strikes at a chosen moment, and that the same command goes on with: for tests and benchmark.

What strikes looks at what any other program could look at: the file `progress`, and the names in `checkpoints/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import ENVIRONMENT, Forked, python
from paused_run import HELD, held_at, is_held

COMMAND = [sys.executable, "-m", "resilient_train"]

WRITINGS = "writings"  # beside the run directory: the steps at which checkpoints were offered and heard of
SAVING = "checkpoints/.new.resilient-tmp"  # what is there while a checkpoint is being written

_CLOSELY_S = 0.0003


# ----------------------------------------------------------------------------------------------------------- looking on


class Stand(NamedTuple):
    doing: int = 0
    tick: int = 0
    step: int = 0
    start: int = 0
    stop: int = 0


def stand(run_dir: Path) -> Stand:
    """Where a run stands, as far as it has got to say so."""
    with contextlib.suppress(OSError):
        sealed = re.fullmatch(rb'(.*), "crc": "([0-9a-f]{8})"}', (run_dir / "progress").read_bytes().rstrip())
        if sealed is not None and zlib.crc32(sealed[1]) == int(sealed[2], 16):  # it may be being written
            return Stand(*json.loads(sealed[1] + b"}")["position"])
    return Stand()


def checkpoints(run_dir: Path) -> dict[int, bool]:
    """The steps of which there is a checkpoint, and whether it is what its manifest says: by no code of ours."""
    found = {}
    for place in sorted((run_dir / "checkpoints").glob("step-*")):
        try:
            manifest = json.loads((place / "manifest.json").read_text())
            whole = all(
                hashlib.sha256((place / name).read_bytes()).hexdigest() == file["sha256"]
                for name, file in manifest["files"].items()
            )
        except (OSError, ValueError, KeyError):
            whole = False
        found[int(place.name.removeprefix("step-")[:8])] = whole
    return found


def kinds(run_dir: Path) -> dict[int, str]:
    """Of its checkpoints, by step: demoted by their names, and else as their manifests say."""
    found = {}
    for file in run_dir.glob("checkpoints/step-*/manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
            one = json.loads(file.read_text())
            found[one["step"]] = "demoted" if file.parent.name.endswith(".demoted") else one["kind"]
    return found


def left_overs(run_dir: Path) -> list[str]:
    """Files and directories that are half made, or half removed."""
    return sorted(str(one.relative_to(run_dir)) for one in run_dir.rglob(".*.resilient-tmp"))


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Those whose outcome is known."""
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


def die_with_checkpoint(run_dir: Path) -> None:
    """As soon as there is one: it is written beside the training, and small updates are quicker than a disk."""
    while not any(run_dir.glob("checkpoints/step-*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def in_journal(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Its entries of a kind, as far as they are whole."""
    with contextlib.suppress(OSError):
        lines = (run_dir / "journal.jsonl").read_text().split("\n")[:-1]
        return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
    return []


# ------------------------------------------------------------------------------------------------------------- starting


class Nursery:
    """Starts runs in `place`, one at a time, without the seconds that a start takes."""

    def __init__(self, place: Path, run: Callable[..., None] | None = None) -> None:
        """`run` does what `command` does, and more."""
        self.place, self._count = place, 0
        self._run = run or command
        self._last: Forked | None = None

    def __enter__(self) -> Nursery:
        self.place.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        """One at a time: what a test that failed has left running is killed."""
        if self._last is not None:
            self._last.kill()

    def start(self, *arguments: str, **environment: str) -> Forked:
        self._end()
        (self.place / HELD).unlink(missing_ok=True)
        self._count += 1
        out = self.place / f"out-{self._count}.txt"
        self._last = Forked(self._run, *arguments, place=self.place, out=out, environment=ENVIRONMENT | environment)
        return self._last

    def run(self, *arguments: str, **environment: str) -> Forked:
        started = self.start(*arguments, **environment)
        started.wait()
        return started

    def struck(self, number: signal.Signals, run_dir: Path, tick: int, *arguments: str, hold: int) -> int:
        """Start it, send it a signal behind update `tick`, and return its exit code; it is held at step `hold`."""
        with held_at(self.place, hold):
            started = self.start(*arguments)
            assert at_tick(run_dir, tick)(started), started.output
            started.strike(number)
        return started.wait()


def command(*arguments: str) -> None:
    _note_writings()
    python("-m", "resilient_train", *arguments)


def _note_writings() -> None:
    """Let a run write down at which steps it offers a checkpoint to its writer, and hears that it is written."""
    from resilient_train.durable.keeper import CheckpointKeeper

    make, heard, offered = CheckpointKeeper._job, CheckpointKeeper._note_outcome, set[Any]()

    def note(keeper: Any, what: str) -> None:
        run_dir = keeper._store.path.parent
        with open(run_dir.with_name(f"{run_dir.name}.{WRITINGS}"), "ab", buffering=0) as file:
            file.write(f"{os.getpid()} {what} {stand(run_dir).step}\n".encode())

    def noting_offer(keeper: Any, snapshot: Any) -> Any:
        if (job := make(keeper, snapshot)) is not None:
            note(keeper, f"offered {job.step}")
            offered.add(job)
        return job

    def noting_heard(keeper: Any, job: Any) -> None:
        heard(keeper, job)
        if job in offered:
            note(keeper, f"heard {job.step}")

    CheckpointKeeper._job, CheckpointKeeper._note_outcome = noting_offer, noting_heard  # type: ignore[assignment,method-assign]


# ------------------------------------------------------------------------------------------------------------- striking


@dataclass(frozen=True)
class Struck:
    """A start that was cut short, and how the next one took the run up."""

    moment: str
    stand: Stand  # when it was struck
    resumed: int  # the step that the next start began at
    newest: int  # the newest step of which a whole checkpoint lay there
    writing: int  # updates made while checkpoints were being written, since the one that it went on from was offered
    left_overs: tuple[str, ...]
    unsound: tuple[int, ...]  # steps of checkpoints that are not what was written

    @property
    def lost(self) -> int:
        return max(0, self.stand.step - self.resumed)


Moment = Callable[[Forked], bool]  # waits for its moment; False if the process ended before


def at_tick(run_dir: Path, tick: int, delay_s: float = 0.0) -> Moment:
    """So long after an update is begun, or where the run is held."""

    def waits(started: Forked) -> bool:
        found = started.until(lambda: stand(run_dir).tick >= tick or is_held(run_dir.parent))
        time.sleep(delay_s)
        return found and started.code is None

    return waits


def at_save(run_dir: Path, begun: int, number: int, delay_s: float) -> Moment:
    """So long after a start behind tick `begun` begins to write its checkpoint of this number, or where it is held."""

    def waits(started: Forked) -> bool:
        saving, place = run_dir / SAVING, run_dir.parent
        if not started.until(lambda: stand(run_dir).tick > begun):  # what an earlier start has left is swept by then
            return False
        for nth in range(number):
            if nth and not started.until(lambda: not saving.exists(), look_s=_CLOSELY_S):
                return False
            if not started.until(lambda: saving.exists() or is_held(place), look_s=_CLOSELY_S):
                return False
        time.sleep(delay_s)
        return started.code is None

    return waits


def after(seconds: float) -> Moment:
    """So long after the start: while it builds, is taken up, or trains."""

    def waits(started: Forked) -> bool:
        return started.ended(seconds) is None

    return waits


def killed(
    nursery: Nursery,
    arguments: Sequence[str],
    run_dir: Path,
    moments: Iterable[tuple[str, Callable[[int], Moment]]],
    hold: int,
) -> Iterator[Struck]:
    """Start the command again and again, and kill it at each moment, before step `hold`; the last start ends with 0."""
    struck: list[tuple[str, Stand, int, tuple[str, ...], tuple[int, ...], int]] = []
    for name, moment in moments:
        taken_up = len(taken_up_at(run_dir))
        with held_at(run_dir.parent, hold):
            started = nursery.start(*arguments)
            is_there = moment(stand(run_dir).tick)(started)
            assert is_there, f"ended before {name}:\n{started.output[-2000:]}"
            started.strike(signal.SIGKILL)
        code = started.wait()
        assert code == -signal.SIGKILL, f"exit code {code} instead of a kill:\n{started.output[-2000:]}"
        if (steps := taken_up_at(run_dir)[taken_up:]) or not struck:
            yield from (_struck(run_dir, one, steps[0]) for one in struck)
            struck = []
        sound = checkpoints(run_dir)
        unsound = tuple(step for step, whole in sound.items() if not whole)
        newest = max((step for step, whole in sound.items() if whole), default=0)
        stood, pid = stand(run_dir), started.pid
        if struck and stood.tick == struck[-1][1].tick:
            pid = struck[-1][-1]  # it made no update: what there is to lose, an earlier one made
        struck.append((name, stood, newest, tuple(left_overs(run_dir)), unsound, pid))
    taken_up = len(taken_up_at(run_dir))
    last = nursery.start(*arguments)
    code = last.wait(400.0)
    assert code == 0, last.output[-3000:]
    yield from (_struck(run_dir, one, taken_up_at(run_dir)[taken_up]) for one in struck)


def taken_up_at(run_dir: Path) -> list[int]:
    """The steps that starts after the first one began at, by the log of the run."""
    log = run_dir / "train.log"
    text = log.read_text() if log.exists() else ""
    found = re.findall(r" INFO resumes from step (\d+)|(had no checkpoint yet: it begins at step 0)", text)
    return [int(step or 0) for step, _ in found]


def _struck(
    run_dir: Path, facts: tuple[str, Stand, int, tuple[str, ...], tuple[int, ...], int], resumed: int
) -> Struck:
    name, stood, newest, over, unsound, pid = facts
    writing = _updates_while_writing(run_dir, pid, resumed, stood.step)
    return Struck(name, stood, resumed, newest, writing, over, unsound)


def _updates_while_writing(run_dir: Path, pid: int, since: int, until: int) -> int:
    """How many updates a process made while it was writing checkpoints not older than `since`."""
    begun: dict[int, int] = {}
    total = 0
    file = run_dir.with_name(f"{run_dir.name}.{WRITINGS}")
    for line in file.read_text().splitlines() if file.exists() else ():
        process, what, saved, step = line.split()
        if int(process) == pid and int(saved) >= since:
            if what == "offered":
                begun[int(saved)] = int(step)
            else:
                total += int(step) - begun.pop(int(saved), int(step))
    return total + sum(until - step for step in begun.values())
