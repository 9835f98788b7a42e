"""Where an input of `attacks.py` is tried: a directory with copies of prepared runs, and what has to hold there.

Every process is forked from one that has imported everything, and does from there on what a `python` does that has
just been started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fork_server import ENVIRONMENT, Forked, python

BEFORE, GOAL = 20, 30  # updates of a prepared run, and of one that resumes it
TOOL_S, TRAIN_S = 30.0, 90.0  # both take a second on a machine that has nothing else to do
LINE = 800  # characters of a refusal at most

# Neither is ever to be seen again. One is in the environment of all processes, the other one in their configuration.
SECRETS = ("canary-Xq7Tz2Lk9Vb4", "hf_CanaryKd8Wm3Rp5Ys1Qn6Jt0")
HERE = Path(__file__).resolve().parent

SAVING = ["checkpoint.disk.every=5", "checkpoint.memory.every=5", "checkpoint.verify_after=5", "run.log_every=1000"]
MODEL = ["model=mlp", "model.in_features=8", "model.hidden=[8]", "model.out_features=4"]
RUN = [*MODEL, "data=custom", "data.train._target_=attacks_programs.Rows", f"+data.train.token={SECRETS[1]}"]
RUN += [
    "data.batch_size=8",
    "objective=classification",
    "schedule=constant",
    "accelerate.cpu=true",
    "tracking=none",
    *SAVING,
]


class Failed(Exception):
    """What an input did that it must not do, in one line."""


@dataclass(frozen=True)
class Said:
    """How a process ended, and what it said."""

    what: str
    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def last(self) -> str:
        """Its error, or the end of what it said, for a line about it."""
        return " / ".join(self.errors or self.text.strip().split("\n")[-3:])[-300:]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(("error", "interrupted"))]


class Place:
    """A directory of one input."""

    def __init__(self, path: Path, prepared: Path) -> None:
        self.path, self.prepared = path, prepared
        path.mkdir()
        (path / "home").mkdir()
        self.run_dir, self.canary = path / "run", path / "canary"
        self.secrets = list(SECRETS)
        self._count = 0
        self._started: list[Started] = []

    # ------------------------------------------------------------------------------------------------- what is started

    def environment(self, **more: str) -> dict[str, str]:
        own = {"HOME": str(self.path / "home"), "CANARY_API_TOKEN": SECRETS[0], "OMP_NUM_THREADS": "1"}
        around = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("MLFLOW")}
        path = os.pathsep.join([str(HERE), ENVIRONMENT["PYTHONPATH"]])
        return {**around, **own, "PYTHONPATH": path, **more}

    def start(self, what: Callable[..., Any], *args: Any, environment: dict[str, str] | None = None) -> Started:
        """Call something in a process of its own."""
        self._count += 1
        out, err = (self.path / f"{stream}-{self._count}.txt" for stream in ("out", "err"))
        around = self.environment() if environment is None else environment
        forked = Forked(what, *args, place=self.path, out=out, errors=err, environment=around)
        self._started.append(Started(forked, out, err))
        return self._started[-1]

    def train(self, *words: str, limit_s: float = TRAIN_S, **environment: str) -> Said:
        """Train the small model, in `run` unless the words say otherwise."""
        own = [] if any(word.startswith("run.dir=") for word in words) else ["run.dir=run"]
        own += [] if any(word.startswith("run.steps=") for word in words) else [f"run.steps={GOAL}"]
        run = self.start(
            python, "-m", "resilient_train", *RUN, *own, *words, environment=self.environment(**environment)
        )
        return run.end("the run", limit_s)

    # ------------------------------------------------------------------------------------------------- what has to hold

    def copy(self) -> None:
        """Put a copy of the prepared run here."""
        shutil.copytree(self.prepared / "run", self.run_dir)

    def unharmed(self, said: Said) -> None:
        """A run that says it is complete has the weights of one that nobody disturbed."""
        if said.code != 0:
            raise Failed(f"ended with {said.code}: {said.last}")
        whole = self.prepared / "goal"
        goal = json.loads((whole / "summary.json").read_text())
        try:
            summary = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError) as error:
            weights = "weights.safetensors"
            if "summary.json cannot be written" not in said.text:
                raise Failed(f"ended with 0, and its summary cannot be read: {error}") from None
            if (self.run_dir / weights).read_bytes() != (whole / weights).read_bytes():
                raise Failed("ended with 0, but with other weights than an undisturbed run") from None
            return
        if (summary["status"], summary["steps"]) != ("completed", GOAL):
            raise Failed(f"ended with 0, {summary['status']} at step {summary['steps']} of {GOAL}")
        if summary["weights_sha256"] != goal["weights_sha256"]:
            raise Failed("ended with 0, but with other weights than an undisturbed run")

    def refused(self, said: Said, *codes: int) -> None:
        """It ended with one of these codes, and one line says why."""
        if said.code not in codes:
            raise Failed(f"ended with {said.code} instead of {' or '.join(map(str, codes))}: {said.last}")
        lines = said.errors
        if len(lines) != 1 or len(lines[0]) > LINE:
            raise Failed(f"refused in {len(lines)} lines instead of one: {said.last}")

    def resumes(self, *words: str, codes: Sequence[int] = (1, 2), **environment: Any) -> Said:
        """The run goes on to the weights of an undisturbed one, or is refused; what is lost on the way is told."""
        said = self.train(*words, **environment)
        if said.code != 0:
            self.refused(said, *codes)
            return said
        self.unharmed(said)
        found = re.search(r"resumes from step (\d+)", said.text)
        if (int(found[1]) if found else 0) < BEFORE and not re.search(r"damage|cannot|could not|missing", said.text):
            raise Failed(f"updates were lost without a word: {said.last}")
        known = '"data"' in text_of(self.run_dir / "incidents.jsonl") or "1 incident" in said.text
        if not known and not re.search(r"journal\b|incidents\.jsonl", said.text):
            raise Failed("the incident of the run is gone without a word")
        return said

    def asked(self) -> None:
        """Every verb answers, whatever lies in the run directory."""
        said = self.start(_verbs).end("status, incidents, checkpoints", 3 * TOOL_S)
        for name, code, seconds in re.findall(r"== (\w+) (\S+) ([\d.]+)", said.out):
            if code not in ("0", "1", "2", "3", "75"):
                raise Failed(f"{name} ended with {code}: {said.last}")
            if float(seconds) > TOOL_S:
                raise Failed(f"{name} took {seconds} s")
        if said.out.count("== ") != 3:
            raise Failed(f"a verb ended the process: {said.last}")

    def fails(self, why: str) -> NoReturn:
        raise Failed(why)

    def leave(self) -> None:
        """Nothing is left of it, processes least of all."""
        for started in self._started:
            started.kill()
        shutil.rmtree(self.path, ignore_errors=True)

    def audit(self) -> None:
        """Nothing was executed, and no secret got out."""
        if self.canary.exists() or (self.path / "home" / "canary").exists() or (self.run_dir / "canary").exists():
            raise Failed("executed what it was given")
        wanted = [secret.encode() for secret in self.secrets]
        for file in self.path.rglob("*"):
            with contextlib.suppress(OSError):
                if not stat.S_ISREG((entry := file.lstat()).st_mode) or entry.st_blocks > 100_000:
                    continue
                content = file.read_bytes() if entry.st_size < 2**27 else b""
                for secret in wanted:
                    if secret in content:
                        raise Failed(f"a secret is in {file.relative_to(self.path)}")


class Started:
    """A process that is at work."""

    def __init__(self, forked: Forked, out: Path, err: Path) -> None:
        self.forked, self.out, self.err, self.began = forked, out, err, time.monotonic()

    def end(self, what: str, limit_s: float) -> Said:
        """Wait for its end: it comes in time, by no signal, and without a traceback."""
        code, until = None, time.monotonic() + limit_s
        while code is None and (left := until - time.monotonic()) > 0:
            code = self.forked.ended(left)  # it closes its files a moment before it has ended
        seconds = time.monotonic() - self.began
        kill_group(self.forked.pid)
        if code is None:
            self.forked.kill()
            raise Failed(f"hangs: {what} has not ended after {limit_s:.0f} s: {text_of(self.err)[-200:]!r}")
        return judged(what, code, self.out, self.err, seconds)

    def kill(self) -> None:
        kill_group(self.forked.pid)
        self.forked.kill()


def judged(what: str, code: int, out: Path, err: Path, seconds: float) -> Said:
    said = Said(what, code, text_of(out), text_of(err), seconds)
    if code < 0:
        raise Failed(f"{what} died of signal {-code}: {said.last}")
    if "Traceback (most recent call last)" in said.text:
        raise Failed(f"{what} shows a traceback: {said.text.strip().splitlines()[-1][:300]}")
    return said


def text_of(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return ""


def kill_group(pid: int) -> None:
    """No process of an input outlives it: loader workers, couriers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _verbs() -> None:
    """Ask three verbs, one after the other: what takes time is to start."""
    from resilient_train.command import checkpoints, incidents, status

    for verb in (status, incidents, checkpoints):
        began = time.monotonic()
        code: Any = None
        try:
            code = verb.main(["run"])
        except SystemExit as ended:
            code = ended.code
        print(f"== {verb.__name__.rpartition('.')[2]} {code} {time.monotonic() - began:.2f}", flush=True)
