"""The run as an experiment tracker shows it, at no cost to the training thread.

What there is to show goes into the outbox, a file in the run directory. Another process, that of the command
`resilient-train sync --follow`, reads it and talks to MLflow: neither MLflow's import nor a slow or dead server can
hold up a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from resilient_train.record.outbox import ARTIFACT, BEGAN, ENDED, METRICS, OUTBOX, PARAMS, Outbox
from resilient_train.secrets import masked
from resilient_train.tracking.connection import Store, TrackedRun, UploadCursor, cut, left_in, locate
from resilient_train.tracking.review import command, program
from resilient_train.wording import counted

EXPERIMENT = "resilient_train"  # of the caller's own loop; conf/tracking names the same one for the command

_WRITE_WITHIN_S = 10.0  # at the end, for entries that are not on disk yet
_EXPLAIN_AFTER_S = 1.0
_EXIT_WITHIN_S = 2.0  # after a kill
_LOOK_EVERY_S = 0.5
_MOST_WORDS, _TAIL_BYTES = 300, 10_000  # of what a process wrote to its standard error before it died
_RESTART_AFTER_S, _RESTART_AT_MOST_S = 5.0, 300.0

_log = logging.getLogger("resilient_train")


@dataclass
class TrackingConfig:
    """Where the run is shown, and how long its end may wait for that."""

    kind: str = field(metadata={"one_of": ("mlflow", "none")})
    uri: str | None
    experiment: str
    drain_s: float = field(metadata={"at_least": 0})


class Tracker:
    """Takes what is worth showing, in microseconds; no call waits or raises, and only `finish` may take its time.

    This one shows nothing.
    """

    @property
    def run(self) -> TrackedRun | None:
        """The run on the tracker's side; None until it exists there."""
        return None

    def begin(self) -> None:
        """Say that the first update has landed: from now on tracking may use the CPU."""

    def metrics(self, tick: int, values: Mapping[str, float], time_ms: int | None = None) -> None:
        """Note what was measured at `tick`, now unless `time_ms` says when."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Note what the run was given; a name keeps its first value."""

    def artifact(self, path: Path) -> None:
        """Attach a file of the run directory, as it is when it is sent: within seconds, or at the end."""

    def finish(self, status: str) -> TrackedRun | None:
        """Upload the rest within the time configured, and say in the log what is left."""
        return None

    def drop(self) -> None:
        """Discard it: there was no update to show."""


class OutboxTracker(Tracker):
    """Shows the run in MLflow, through a file and a process that uploads it."""

    def __init__(
        self, config: TrackingConfig, directory: Path, store: Store, sweep: Mapping[str, str] | None = None
    ) -> None:
        self._config, self._directory, self._store, self._sweep = config, directory, store, dict(sweep or {})
        UploadCursor(directory).settle(trains=True)
        self._outbox = Outbox(directory / OUTBOX)
        self.uploader: UploaderProcess | None = None
        self._is_finished = False

    @property
    def run(self) -> TrackedRun | None:
        """The run in MLflow, from the file that the uploader keeps in the run directory."""
        return UploadCursor(self._directory).tracked_run(masked(self._store.uri), self._config.experiment)

    def begin(self) -> None:
        if self.uploader is None:
            where = {"tracking_uri": masked(self._store.uri), "experiment": self._config.experiment}
            self._outbox.put(BEGAN, name=self._directory.name, **where, **self._sweep)
            self.uploader = UploaderProcess(self._directory, self._store, self._config)

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
        assert self.uploader is not None
        why = "uploading to MLflow, for up to %g s; Ctrl-C leaves the rest to %s sync"
        explaining = threading.Timer(_EXPLAIN_AFTER_S, _log.info, (why, self._config.drain_s, program()))
        explaining.daemon = True
        with contextlib.suppress(RuntimeError):  # at the exit of the interpreter Python 3.12 starts none
            explaining.start()
        is_written = True
        try:
            is_written = self._outbox.close(_WRITE_WITHIN_S)
            trouble = self.uploader.end(self._config.drain_s)
        except KeyboardInterrupt:
            self.uploader.end(0.0)
            trouble = "interrupted"
        finally:
            explaining.cancel()
        if trouble is not None:
            left = left_in(self._directory)
            what = f"it lacks {counted(left, 'entry')} of {OUTBOX}" if left else "what it shows is not complete"
            _log.warning("MLflow at %s did not get everything: %s (%s)", self._store.uri, what, trouble)
            _log.warning(
                "to upload the rest, from any machine that has the directory:\n  %s", command("sync", self._directory)
            )
        if not is_written:
            _log.warning("%s is not complete: the disk did not take all of it", self._outbox.path)
        return self.run

    def drop(self) -> None:
        self._outbox.close(_WRITE_WITHIN_S)


class UploaderProcess:
    """Runs `resilient-train sync --follow` while the run lasts. Only `end` waits."""

    def __init__(self, directory: Path, store: Store, config: TrackingConfig) -> None:
        self._directory, self._where = directory.absolute(), store.uri
        self._command = [sys.executable, "-m", "resilient_train", "sync", str(self._directory), "--follow"]
        self._command += ["--attached", f"--experiment={config.experiment}"]
        self._command += [f"--home={store.home}"] if store.home is not None else []
        # The address may hold a password, so it is no argument: those are public. Modules are found where ours are.
        path = os.pathsep.join(one for one in sys.path if isinstance(one, str))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._environment = {**os.environ, **threads, "PYTHONPATH": path, "MLFLOW_TRACKING_URI": store.uri}
        self._environment["PYTHONSAFEPATH"] = "1"  # else a mlflow.py in the working directory would be imported
        self._trouble: str | None = None
        self._has_complained = False
        self.process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._is_complete = self._is_over = False
        self._thread = threading.Thread(target=self._main, name="uploader", daemon=True)
        with contextlib.suppress(RuntimeError):  # as above
            self._thread.start()

    def end(self, within_s: float) -> str | None:
        """Let it upload the rest, for no longer than `within_s`; return what prevented that, if anything did."""
        if self._thread.ident is None:
            return "no thread could be started for it"
        self._ending.set()
        try:
            self._ask_to_end()
            self._thread.join(within_s)
        finally:
            self._is_over = True
            self._kill()
        self._thread.join(_EXIT_WITHIN_S)
        return None if self._is_complete else self._trouble or "it took too long"

    def _ask_to_end(self) -> None:
        """Send a line, and not only the end of the pipe: children that the run has forked hold that open, too."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is gone already
                self.process.stdin.write(b"end\n")
                self.process.stdin.close()

    def _kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_WITHIN_S)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        """Keep one running until the run ends; one that dies is replaced, at the end once more as well."""
        pause = _RESTART_AFTER_S
        while True:
            is_last = self._ending.is_set()
            try:
                code = self._run()
            except OSError as error:
                self._complain(f"no process can be started: {error.strerror or error}")
                code = None
            self._is_complete = code == 0
            if self._is_complete or is_last or self._is_over:
                return
            if code is not None and not self._ending.is_set():
                self._complain(f"its process ended with {code}{self._trouble and f': {self._trouble}'}")
            self._ending.wait(pause)
            pause = min(2 * pause, _RESTART_AT_MOST_S)

    def _run(self) -> int:
        cursor = UploadCursor(self._directory)
        if cursor.get("trouble") is not None:  # of the previous one
            cursor.note(trouble=None)
        with TemporaryFile() as said:
            self.process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=self._environment,
                start_new_session=True,  # a Ctrl-C is not meant for it
            )
            if self._ending.is_set():
                self._ask_to_end()
            if self._is_over:
                self._kill()
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_EVERY_S)
                    break
                cursor.read()
                if (trouble := cursor.get("trouble")) is not None:
                    self._complain(trouble)
            lines = _last_lines(said)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        if code == 0:
            for line in lines:
                if line.startswith("MLflow refused "):
                    _log.warning("%s (%s)", line, self._where)
        else:
            self._trouble = cut(lines[-1], _MOST_WORDS) if lines else ""
        return code

    def _complain(self, trouble: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("MLflow at %s: %s. Training is not affected.", self._where, trouble)
        self._trouble = trouble


def _last_lines(said: IO[bytes]) -> list[str]:
    said.seek(max(0, said.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = [" ".join(line.split()) for line in said.read().decode("utf-8", "replace").splitlines()]
    return [masked(line) for line in lines if line]


def build(config: TrackingConfig, directory: Path, home: Path, sweep: Mapping[str, str] | None = None) -> Tracker:
    """Build the tracker that `config` names for the run in `directory`.

    `home` holds the database when no other store is named; `sweep` names the sweep and the job that the run is.
    """
    if config.kind == "none":
        return Tracker()
    return OutboxTracker(config, directory, locate(config.uri, home), sweep)
