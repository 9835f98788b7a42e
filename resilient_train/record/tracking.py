"""The run as an experiment tracker shows it, at no cost to the training thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from resilient_train.record.delivery.store import KnownRun, TrackedRun, locate, ui_command, url
from resilient_train.record.mlflow_sender import Metrics, Params, Sender, Tags

__all__ = ["MlflowTracker", "NullTracker", "TrackedRun", "Tracker", "TrackingConfig", "build", "ui_command", "url"]

_log = logging.getLogger("resilient_train")

_ENDINGS = {"completed": "FINISHED", "failed": "FAILED", "gave_up": "FAILED", "preempted": "KILLED"}


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

    def tags(self, values: Mapping[str, Any]) -> None:
        """Note what is to be said about the run; a name keeps its last value."""

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

    def tags(self, values: Mapping[str, Any]) -> None: ...

    def artifact(self, path: Path) -> None: ...

    def finish(self, status: str) -> TrackedRun | None:
        return None


class MlflowTracker:
    """Shows the run in MLflow, by way of a thread of its own; MLflow is not imported before `begin`."""

    def __init__(self, sender: Sender, drain_s: float) -> None:
        self._sender = sender
        self._drain_s = drain_s

    @property
    def run(self) -> TrackedRun | None:
        return self._sender.run

    def begin(self) -> None:
        self._sender.start()

    def metrics(self, tick: int, values: Mapping[str, float], time_ms: int | None = None) -> None:
        self._sender.put(Metrics(tick, time.time_ns() // 1_000_000 if time_ms is None else time_ms, dict(values)))

    def params(self, values: Mapping[str, Any]) -> None:
        self._sender.put(Params(dict(values)))

    def tags(self, values: Mapping[str, Any]) -> None:
        self._sender.put(Tags(dict(values)))

    def artifact(self, path: Path) -> None:
        self._sender.put_file(path)

    def finish(self, status: str) -> TrackedRun | None:
        self._sender.close(_ENDINGS[status], self._drain_s)
        if left := self._sender.undelivered:
            _log.warning("MLflow at %s did not get everything: %s", self._sender.where, left)
        return self.run


def build(config: TrackingConfig, directory: Path, home: Path) -> Tracker:
    """Build the tracker that `config` names for the run in `directory`.

    `home` holds the database when no other store is named.
    """
    if config.kind == "none":
        return NullTracker()
    store, known = locate(config.uri, home), KnownRun(directory)
    return MlflowTracker(Sender(store, config.experiment, known, config.system_metrics), config.drain_s)
