"""The run as an experiment tracker shows it, at no cost to the training thread.

What there is to show goes into the outbox, a file. Another process, `resilient-train sync --follow`, reads it and
talks to MLflow: neither MLflow's import nor a slow or dead server can hold up a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from resilient_train.record.outbox import BEGAN, ENDED, METRICS, OUTBOX, Outbox
from resilient_train.secrets import masked
from resilient_train.tracking.connection import Store, TrackedRun, UploadCursor, cut, left_in, locate
from resilient_train.tracking.review import command
from resilient_train.wording import counted

EXPERIMENT = "resilient_train"  # of the caller's own loop; conf/tracking names the same one for the command

_WRITE_WITHIN_S = 10.0  # at the end, for entries that are not on disk yet
_EXPLAIN_AFTER_S = 1.0
_EXIT_WITHIN_S = 2.0  # after a kill
_RESTART_AFTER_S = 30.0
_MOST_LINES, _MOST_WORDS, _MOST_BYTES = 5, 300, 10_000  # of what the process says: lines, and characters of each

_log = logging.getLogger("resilient_train")


@dataclass
class TrackingConfig:
    kind: str = field(metadata={"one_of": ("mlflow", "none")})
    uri: str | None
    experiment: str
    drain_s: float = field(metadata={"at_least": 0})


class Tracker:
    """Takes what is worth showing; only `finish` may wait, and no call raises. This one shows nothing."""

    @property
    def run(self) -> TrackedRun | None:
        return None

    def begin(self) -> None:
        """Say that the first update has landed: from now on tracking may use the CPU."""

    def metrics(self, tick: int, values: Mapping[str, float]) -> None:
        """Note what was measured at `tick`."""

    def finish(self, status: str) -> TrackedRun | None:
        """Upload the rest within the time configured, and say in the log what is left."""
        return None

    def drop(self) -> None:
        """Discard it: there was no update to show."""


class OutboxTracker(Tracker):
    def __init__(self, config: TrackingConfig, directory: Path, store: Store, about: Mapping[str, Any]) -> None:
        self._config, self._directory, self._store, self._about = config, directory, store, about
        cursor = UploadCursor(directory)
        cursor.settle()
        cursor.aim(masked(store.uri), config.experiment)
        self._outbox = Outbox(directory / OUTBOX, self._look_after_uploader)
        self.uploader: UploaderProcess | None = None
        self._starts_at = 0.0  # when the next process is started, if this one dies
        self._logged: list[str] = []
        self._trouble: str | None = None  # the newest
        self._has_begun = False

    @property
    def run(self) -> TrackedRun | None:
        """The run in MLflow, from the file that the uploader keeps in the run directory."""
        return UploadCursor(self._directory).run

    def begin(self) -> None:
        if not self._has_begun:
            self._outbox.put(BEGAN, **self._about)
            self._has_begun = True

    def metrics(self, tick: int, values: Mapping[str, float]) -> None:
        self._outbox.put(METRICS, tick=tick, values=dict(values))

    def finish(self, status: str) -> TrackedRun | None:
        self.begin()
        self._outbox.put(ENDED, status=status)
        is_written = True
        try:
            is_written = self._outbox.close(_WRITE_WITHIN_S)
            trouble = self._finish_uploads()
        except KeyboardInterrupt:
            trouble = "interrupted"
        finally:
            if self.uploader is not None:
                self.uploader.close()
        if trouble is not None:
            left = left_in(self._directory)
            what = f"it lacks {counted(left, 'entry')} of {OUTBOX}" if left else "what it shows is not complete"
            _log.warning("MLflow at %s did not get everything: %s (%s)", self._store.uri, what, trouble)
            how = "to upload the rest, from any machine that has the directory:\n  %s"
            _log.warning(how, command("sync", self._directory))
        if not is_written:
            _log.warning("%s is not complete: the disk did not take all of it", self._outbox.path)
        return self.run

    def drop(self) -> None:
        self._outbox.close(_WRITE_WITHIN_S)

    def _finish_uploads(self) -> str | None:
        if self.uploader is None or self.uploader.code is not None:
            self._start_uploader()  # once more
        if self.uploader is None:
            return self._trouble
        self.uploader.ask_to_end()
        drain_s = self._config.drain_s
        if self.uploader.wait(min(drain_s, _EXPLAIN_AFTER_S)) is None and drain_s > _EXPLAIN_AFTER_S:
            why = "uploading to MLflow, for up to %g s; Ctrl-C leaves the rest to %s"
            _log.info(why, drain_s, command("sync", self._directory))
            self.uploader.wait(drain_s - _EXPLAIN_AFTER_S)
        self._report(self.uploader.read())
        return None if self.uploader.code == 0 else self._trouble or self.uploader.last_error() or "it took too long"

    # -- in the thread of the outbox -----------------------------------------------------------------------------------

    def _look_after_uploader(self) -> None:
        """Start the process once the run has begun, log what it says, and replace it if it dies."""
        if not self._has_begun:
            return
        if self.uploader is not None:
            code = self.uploader.code
            self._report(self.uploader.read())
            if code is None:
                return
            self._report([f"its process ended with {code}: {self.uploader.last_error()}"])
        if time.monotonic() > self._starts_at:
            self._start_uploader()

    def _start_uploader(self) -> None:
        self._starts_at = time.monotonic() + _RESTART_AFTER_S
        if self.uploader is not None:
            self.uploader.close()
            self.uploader = None
        try:
            self.uploader = UploaderProcess(self._directory, self._store, self._config.experiment)
        except (OSError, RuntimeError) as error:  # RuntimeError: at the exit of the interpreter
            self._report([f"no process can be started: {getattr(error, 'strerror', None) or error}"])

    def _report(self, lines: Sequence[str]) -> None:
        """Log what the process says, each line once, and only so many."""
        for line in lines:
            self._trouble = line
            if line not in self._logged and len(self._logged) < _MOST_LINES:
                self._logged.append(line)
                _log.warning("MLflow at %s: %s. Training is not affected.", self._store.uri, line)


class UploaderProcess:
    def __init__(self, directory: Path, store: Store, experiment: str) -> None:
        start = [sys.executable, "-m", "resilient_train", "sync", str(directory.absolute())]
        start += ["--follow", "--attached", f"--experiment={experiment}"]
        # The address may hold a password, so it is no argument: those are public. Modules are found where ours are.
        path = os.pathsep.join(one for one in sys.path if isinstance(one, str))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONPATH": path, "MLFLOW_TRACKING_URI": store.uri}
        environment["PYTHONSAFEPATH"] = "1"  # else a mlflow.py in the working directory would be imported
        self._read = 0  # bytes of its output
        with contextlib.ExitStack() as files:
            self._output, self._errors = files.enter_context(TemporaryFile()), files.enter_context(TemporaryFile())
            self.process = subprocess.Popen(
                start,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # a Ctrl-C is not meant for it
            )
            self._files = files.pop_all()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def read(self) -> list[str]:
        new = os.pread(self._output.fileno(), _MOST_BYTES, self._read)
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return _lines(whole)

    def last_error(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        lines = _lines(os.pread(self._errors.fileno(), _MOST_BYTES, max(0, size - _MOST_BYTES)))
        return lines[-1] if lines else ""

    def ask_to_end(self) -> None:
        """Send a line, and not only the end of the pipe: children that the run has forked hold that open, too."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already
            self.process.stdin.write(b"end\n")

    def wait(self, within_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.code

    def close(self) -> None:
        self.process.kill()
        self.wait(_EXIT_WITHIN_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._files.close()


def _lines(output: bytes) -> list[str]:
    lines = (" ".join(line.split()) for line in output.decode("utf-8", "replace").splitlines())
    return [cut(masked(line), _MOST_WORDS) for line in lines if line]


def build(
    config: TrackingConfig,
    directory: Path,
    home: Path,
    params: Mapping[str, Any] | None = None,
    sweep: str | None = None,
) -> Tracker:
    """`home` holds the database if no other store is named; runs are compared by `params`; `sweep` is a name."""
    if config.kind == "none":
        return Tracker()
    about: dict[str, Any] = {"params": {key: masked(str(value)) for key, value in (params or {}).items()}}
    if sweep is not None:
        about["sweep"] = sweep
    return OutboxTracker(config, directory, locate(config.uri, home), about)
