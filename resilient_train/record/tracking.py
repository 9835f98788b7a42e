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
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from resilient_train.record.delivery.store import Store, TrackedRun, left_in, locate, shown, ui_command, url
from resilient_train.record.outbox import ARTIFACT, BEGAN, ENDED, METRICS, OUTBOX, PARAMS, Outbox

__all__ = ["NullTracker", "OutboxTracker", "TrackedRun", "Tracker", "TrackingConfig", "build", "ui_command", "url"]

_WRITE_WITHIN_S = 10.0  # at the end, what is still on its way to a disk
_END_WITHIN_S = 2.0  # once it was told to, and then killed

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
        """Attach a file or a directory, as it is when it is sent: within seconds, or at the end."""

    def finish(self, status: str) -> TrackedRun | None:
        """Deliver the rest within the time configured, and say in the log what is left."""


class NullTracker:
    """Shows nothing."""

    run: TrackedRun | None = None

    def begin(self) -> None: ...

    def metrics(self, tick: int, values: Mapping[str, float], time_ms: int | None = None) -> None: ...

    def params(self, values: Mapping[str, Any]) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def finish(self, status: str) -> TrackedRun | None:
        return None


class OutboxTracker:
    """Shows the run in MLflow, by way of a file and of a process that delivers it."""

    def __init__(self, config: TrackingConfig, directory: Path, store: Store, home: Path) -> None:
        self.run: TrackedRun | None = None
        self._config, self._directory, self._store, self._home = config, directory, store, home
        self._outbox = Outbox(directory / OUTBOX)
        self._courier: _CourierProcess | None = None
        self._is_finished = False
        self._outbox.put(BEGAN, name=directory.name, tracking_uri=shown(store.uri), experiment=config.experiment)

    def begin(self) -> None:
        if self._courier is None:
            given = {
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
        self._outbox.put(PARAMS, values={key: str(value) for key, value in values.items()})

    def artifact(self, path: Path) -> None:
        path = path.absolute()
        is_inside = path.is_relative_to(self._directory.absolute())  # then it is found wherever the directory lies
        self._outbox.put(ARTIFACT, path=str(path.relative_to(self._directory.absolute()) if is_inside else path))

    def finish(self, status: str) -> TrackedRun | None:
        if self._is_finished:
            return self.run
        self._is_finished = True
        self._outbox.put(ENDED, status=status)
        is_written = self._outbox.close(_WRITE_WITHIN_S)
        self.begin()
        assert self._courier is not None
        trouble = self._courier.end(self._config.drain_s)
        if trouble is not None:
            left = left_in(self._directory)
            what = f"{left:,} entries of {OUTBOX} are left" if left else "what it shows of the run is not complete"
            _log.warning("MLflow at %s did not get everything: %s (%s)", shown(self._store.uri), what, trouble)
            _log.warning("to deliver the rest, from any machine that has the directory:\n  %s", _sync(self._directory))
        if not is_written:
            _log.warning("%s is not complete: the disk did not take all of it", self._outbox.path)
        return self.run

    def _met(self, run: TrackedRun) -> None:
        self.run = run


class _CourierProcess:
    """The process that delivers, from the side of the run. Nothing here waits but `end`."""

    def __init__(self, given: Mapping[str, Any], where: str, met: Any) -> None:
        self._given, self._where, self._met = given, where, met
        self._trouble: str | None = "it was not asked to yet"
        self._complained = False
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="courier", daemon=True)
        self._thread.start()

    def end(self, within_s: float) -> str | None:
        """Let it deliver the rest, for no longer than `within_s`; return what kept it from that, if anything did."""
        until = time.monotonic() + within_s
        try:
            self._started.wait(within_s)
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()  # that is how it knows that no more comes
                self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._trouble = self._trouble or "it took too long"
        finally:
            self._kill()
        self._thread.join(_END_WITHIN_S)
        code = self._process.returncode if self._process is not None else None
        return None if code == 0 else self._trouble or f"its process ended with {code}"

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_WITHIN_S)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._process = process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(self._given) + "\n")
                process.stdin.flush()
            self._trouble = None
            self._started.set()
            with process.stdout:
                self._hear(process.stdout)
        except OSError as error:
            self._complain(f"no process can be started: {error.strerror or error}")
        finally:
            self._started.set()

    def _start(self) -> subprocess.Popen[str]:
        # Its modules are found where ours are, and its group is its own: a Ctrl-C is not meant for it.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {_MODULE} import main; sys.exit(main())"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
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


_MODULE = "resilient_train.record.delivery.__main__"


def _sync(directory: Path) -> str:
    return f"python -m resilient_train.sync {directory}"


def build(config: TrackingConfig, directory: Path, home: Path) -> Tracker:
    """Build the tracker that `config` names for the run in `directory`.

    `home` holds the database when no other store is named.
    """
    if config.kind == "none":
        return NullTracker()
    return OutboxTracker(config, directory, locate(config.uri, home), home)
