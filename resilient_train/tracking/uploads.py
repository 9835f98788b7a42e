"""The run as an experiment tracker shows it, at no cost to the training thread.

What there is to show goes into the outbox, a file in the run directory. A process of its own reads that and talks to
MLflow: so neither MLflow's import nor a server that is slow, dead or never answers can hold up a step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from resilient_train.record.outbox import ARTIFACT, BEGAN, ENDED, METRICS, OUTBOX, PARAMS, Outbox
from resilient_train.secrets import masked
from resilient_train.tracking.review import command
from resilient_train.tracking.rows import cut
from resilient_train.tracking.store import KnownRun, Store, TrackedRun, left_in, locate, shown, ui_command, url

__all__ = ["NullTracker", "OutboxTracker", "TrackedRun", "Tracker", "TrackingConfig", "build", "ui_command", "url"]

EXPERIMENT = "resilient_train"  # that a loop of somebody's own is filed under, as conf/tracking has it for runs of ours

_WRITE_WITHIN_S = 10.0  # at the end, what is still on its way to a disk
_SILENCE_S = 1.0  # at most, where a person waits
_END_WITHIN_S = 2.0  # once it was killed
_MOST_WORDS, _LONGEST_LINE = 300, 10_000  # characters of its last words, and of a line that is read at a time
_AGAIN_S, _AGAIN_AT_MOST_S = 5.0, 300.0  # between the processes that deliver, where one has died

_log = logging.getLogger("resilient_train")


@dataclass
class TrackingConfig:
    """Where the run is shown, and how long its end may wait for that."""

    kind: str = field(metadata={"one_of": ("mlflow", "none")})
    uri: str | None
    experiment: str
    system_metrics: bool
    drain_s: float = field(metadata={"at_least": 0})


class Tracker(Protocol):
    """Takes what is worth showing, in microseconds; no call waits or raises, and only `finish` may take its time."""

    @property
    def run(self) -> TrackedRun | None:
        """The run on the tracker's side; null until it exists there."""

    def begin(self) -> None:
        """Say that the first update has landed: from now on tracking may use the CPU."""

    def metrics(self, tick: int, values: Mapping[str, float], time_ms: int | None = None) -> None:
        """Note what was measured at `tick`, now unless `time_ms` says when."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Note what the run was given; a name keeps its first value."""

    def artifact(self, path: Path) -> None:
        """Attach a file of the run directory, as it is when it is sent: within seconds, or at the end."""

    def finish(self, status: str) -> TrackedRun | None:
        """Deliver the rest within the time configured, and say in the log what is left."""

    def drop(self) -> None:
        """Leave it: there was no update to show."""


class NullTracker:
    """Shows nothing."""

    run: TrackedRun | None = None

    def begin(self) -> None: ...

    def metrics(self, tick: int, values: Mapping[str, float], time_ms: int | None = None) -> None: ...

    def params(self, values: Mapping[str, Any]) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def finish(self, status: str) -> TrackedRun | None:
        return None

    def drop(self) -> None: ...


class OutboxTracker:
    """Shows the run in MLflow, by way of a file and of a process that delivers it."""

    def __init__(self, config: TrackingConfig, directory: Path, store: Store, home: Path) -> None:
        self.run: TrackedRun | None = None
        self._config, self._directory, self._store, self._home = config, directory, store, home
        KnownRun(directory).settle(trains=True)
        self._outbox = Outbox(directory / OUTBOX)
        self._courier: _CourierProcess | None = None
        self._is_finished = False

    def begin(self) -> None:
        if self._courier is None:
            where = {"tracking_uri": shown(self._store.uri), "experiment": self._config.experiment}
            self._outbox.put(BEGAN, name=self._directory.name, **where)
            given = {
                "path": [one for one in sys.path if isinstance(one, str)],
                "run_dir": str(self._directory.absolute()),
                "uri": self._store.uri,
                "home": str(self._home),
                "experiment": self._config.experiment,
                "system_metrics": self._config.system_metrics,
            }
            self._courier = _CourierProcess(given, shown(self._store.uri), self._met)

    def metrics(self, tick: int, values: Mapping[str, float], time_ms: int | None = None) -> None:
        at = {} if time_ms is None else {"time_ms": time_ms}
        self._outbox.put(METRICS, tick=tick, values=dict(values), **at)

    def params(self, values: Mapping[str, Any]) -> None:
        self._outbox.put(PARAMS, values={key: masked(str(value)) for key, value in values.items()})

    def artifact(self, path: Path) -> None:
        self._outbox.put(ARTIFACT, path=str(path.absolute().relative_to(self._directory.absolute())))

    def finish(self, status: str) -> TrackedRun | None:
        if self._is_finished:
            return self.run
        self._is_finished = True
        self.begin()
        self._outbox.put(ENDED, status=status)
        assert self._courier is not None
        is_written = True
        try:
            with self._explained():
                is_written = self._outbox.close(_WRITE_WITHIN_S)
                trouble = self._courier.end(self._config.drain_s)
        except KeyboardInterrupt:
            self._courier.end(0.0)
            trouble = "interrupted"
        if trouble is not None:
            left = left_in(self._directory)
            what = f"{left:,} entries of {OUTBOX} are left" if left else "what it shows of the run is not complete"
            _log.warning("MLflow at %s did not get everything: %s (%s)", shown(self._store.uri), what, trouble)
            _log.warning(
                "to deliver the rest, from any machine that has the directory:\n  %s", command("sync", self._directory)
            )
        if not is_written:
            _log.warning("%s is not complete: the disk did not take all of it", self._outbox.path)
        return self.run

    def drop(self) -> None:
        self._outbox.close(_WRITE_WITHIN_S)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell a person who waits for it what it is, and that it may be left."""
        why = "delivering to MLflow, for up to %g s (tracking.drain_s); Ctrl-C leaves the rest to resilient-train sync"
        explaining = threading.Timer(_SILENCE_S, _log.info, (why, self._config.drain_s))
        explaining.daemon = True
        explaining.start()
        try:
            yield
        finally:
            explaining.cancel()

    def _met(self, run: TrackedRun) -> None:
        self.run = run


class _CourierProcess:
    """The process that delivers, from the side of the run. Nothing here waits but `end`."""

    def __init__(self, given: Mapping[str, Any], where: str, met: Callable[[TrackedRun], None]) -> None:
        self._given, self._where, self._met = given, where, met
        self._trouble: str | None = None
        self._complained = False
        self._last_words = ""  # that a process had on its standard error
        self._process: subprocess.Popen[str] | None = None
        self._ending = threading.Event()
        self._has_delivered = self._is_over = False
        self._thread = threading.Thread(target=self._main, name="courier", daemon=True)
        self._thread.start()

    def end(self, within_s: float) -> str | None:
        """Let it deliver the rest, for no longer than `within_s`; return what kept it from that, if anything did."""
        self._ending.set()
        try:
            self._tell_end()
            self._thread.join(within_s)
        finally:
            self._is_over = True
            self._kill()
        self._thread.join(_END_WITHIN_S)
        return None if self._has_delivered else self._trouble or self._last_words or "it took too long"

    def _tell_end(self) -> None:
        """A line, and not only the end of the pipe: whatever the run has forked meanwhile holds that open, too."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is gone already; or another one is about to begin
                process.stdin.write("end\n")
                process.stdin.close()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_WITHIN_S)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        """Keep one at work until the run ends; one that dies on the way is replaced, at the end once more as well."""
        pause = _AGAIN_S
        while True:
            is_last = self._ending.is_set()
            try:
                code = self._run()
            except OSError as error:
                self._complain(f"no process can be started: {error.strerror or error}")
                code = None
            self._has_delivered = code == 0
            if self._has_delivered or is_last or self._is_over:
                return
            if code is not None and not self._ending.is_set():
                self._complain(f"its process ended with {code}{self._last_words and f': {self._last_words}'}")
            self._ending.wait(pause)
            pause = min(2 * pause, _AGAIN_AT_MOST_S)

    def _run(self) -> int:
        """Start one, listen until it ends, and return its exit code."""
        self._process = process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(json.dumps(self._given) + "\n")
            process.stdin.flush()
        if self._ending.is_set():
            self._tell_end()
        if self._is_over:
            self._kill()
        assert process.stderr is not None
        last = _LastWords(process.stderr)
        with process.stdout:
            self._hear(process.stdout)
        code = process.wait()
        self._last_words = last.heard()
        with contextlib.suppress(OSError):
            process.stdin.close()
        return code

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # a Ctrl-C is not meant for it
        )

    def _hear(self, lines: IO[str]) -> None:
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:  # a library that prints
                continue
            if isinstance(run := said.get("run"), dict):
                self._trouble = None
                self._met(TrackedRun(**run))
            if trouble := said.get("trouble"):
                self._complain(trouble)
            for why in said.get("refused", ()):
                _log.warning("MLflow at %s refused something: %s", self._where, why)

    def _complain(self, trouble: str) -> None:
        self._trouble = trouble
        if not self._complained:
            self._complained = True
            _log.warning("MLflow at %s: %s. Training is not affected.", self._where, trouble)


class _LastWords:
    """Keeps the last line that a process writes to a pipe, which may never be full: it would wait for us."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe, self._last = pipe, ""
        self._thread = threading.Thread(target=self._main, name="courier's last words", daemon=True)
        self._thread.start()

    def heard(self) -> str:
        """Return it, in short and without secrets, once the process has ended."""
        self._thread.join(_END_WITHIN_S)  # what the process has started may hold its end of the pipe open
        return cut(shown(self._last), _MOST_WORDS)

    def _main(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._pipe:
            while line := self._pipe.readline(_LONGEST_LINE):
                self._last = " ".join(line.split()) or self._last


# Its modules are found where ours are.
_PROGRAM = """
import json, sys
given = json.loads(sys.stdin.readline())
sys.path[:] = given["path"]
from resilient_train.tracking.process import main
sys.exit(main(given))
"""


def build(config: TrackingConfig, directory: Path, home: Path) -> Tracker:
    """Build the tracker that `config` names for the run in `directory`.

    `home` holds the database when no other store is named.
    """
    if config.kind == "none":
        return NullTracker()
    return OutboxTracker(config, directory, locate(config.uri, home), home)
