"""Carries what a run directory holds into MLflow: each entry of the outbox once, and the run as it stands now."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from resilient_train.record.delivery.connection import Connection, connect, forget_twins, is_refusal, root_cause
from resilient_train.record.delivery.presentation import Presentation
from resilient_train.record.delivery.rows import batches
from resilient_train.record.delivery.store import KnownRun, Store, TrackedRun
from resilient_train.record.journal import Entry
from resilient_train.record.outbox import ARTIFACT, BEGAN, ENDED, OUTBOX, entries

ENTRIES_AT_ONCE = 200
ENDINGS = {"completed": "FINISHED", "failed": "FAILED", "gave_up": "FAILED", "preempted": "KILLED"}


class Busy(Exception):
    """Somebody else delivers the same outbox."""


@dataclass
class Report:
    """What became of it, for a person."""

    entries: int = 0  # that were delivered by this process
    damaged: int = 0
    refused: list[str] = field(default_factory=list)  # why, for each thing that MLflow will never take


class Courier:
    """Delivers from one run directory to one store. Whatever goes wrong raises, and the next call goes on there."""

    def __init__(
        self,
        run_dir: Path,
        store: Store,
        experiment: str,
        *,
        system_metrics: bool = False,
        met: Callable[[Connection], None] = lambda connection: None,
        went_on: Callable[[int], None] = lambda entries: None,
    ) -> None:
        self.run_dir, self.outbox = run_dir, run_dir / OUTBOX
        self.report = Report()
        self.has_ended = False  # the newest process of the run said so
        self._store, self._experiment, self._wants_system_metrics = store, experiment, system_metrics
        self._met, self._went_on = met, went_on
        self._known = KnownRun(run_dir)
        self._connection: Connection | None = None
        self._presentation: Presentation | None = None
        self._monitor: Any = None
        self._lock: int | None = None

    def deliver(self) -> None:
        """Deliver all that is there by now."""
        self._alone()
        connection = self._connected()
        while portion := list(islice(entries(self.outbox, self._known.delivered), ENTRIES_AT_ONCE)):
            self._send(connection, [entry for entry, _ in portion if entry is not None])
            self.report.damaged += sum(entry is None for entry, _ in portion)
            self.report.entries += len(portion)
            self._known.note(delivered=portion[-1][1])
            self._went_on(self.report.entries)
        assert self._presentation is not None
        self._presentation.refresh()

    def conclude(self) -> None:
        """Deliver the rest, the last look of the run included."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        self.deliver()
        assert self._connection is not None
        forget_twins(self._connection, self.outbox)

    def leave(self) -> None:
        """Let another process deliver."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def was_killed(self) -> None:
        """Say of a run that ended without a word that it has ended."""
        assert self._connection is not None
        self._connection.client.set_terminated(self._connection.run_id, "KILLED")

    @property
    def run(self) -> TrackedRun | None:
        """The run in MLflow, once it is reached."""
        return self._connection.run if self._connection is not None else None

    def _alone(self) -> None:
        """Take the outbox for this process alone; the kernel gives it back."""
        if self._lock is None:
            lock = os.open(self.outbox, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if isinstance(error, BlockingIOError):
                    raise Busy("another process is delivering it") from None
                raise
            self._lock = lock

    def _connected(self) -> Connection:
        if self._connection is None:
            first = next((entry for entry, _ in entries(self.outbox) if entry is not None), None)
            if first is None:
                raise FileNotFoundError(f"{self.outbox} holds nothing yet")
            self._connection = connect(self._store, self._experiment, self._known, self.outbox, first["at"])
            self._presentation = Presentation(self._connection, self.run_dir, self._known, self._refuse)
            self._met(self._connection)
            if self._wants_system_metrics:
                self._watch_machine(self._connection.run_id)
        return self._connection

    def _send(self, connection: Connection, portion: list[Entry]) -> None:
        client, run_id = connection.client, connection.run_id
        for batch in batches(portion):
            self._unless_refused(partial(client.log_batch, run_id, *batch))
        # A file goes as it is now: of one that is named twice, once is enough.
        for path in dict.fromkeys(str(entry.get("path")) for entry in portion if entry["kind"] == ARTIFACT):
            self._unless_refused(partial(self._attach, client, run_id, self.run_dir / path))
        for entry in [one for one in portion if one["kind"] in (BEGAN, ENDED)][-1:]:
            self.has_ended = entry["kind"] == ENDED
            if self.has_ended:
                client.set_terminated(run_id, ENDINGS.get(str(entry.get("status")), "FAILED"), entry["at"])
            else:
                client.update_run(run_id, status="RUNNING")

    def _attach(self, client: Any, run_id: str, path: Path) -> None:
        if path.exists():
            client.log_artifact(run_id, str(path))
        else:
            self._refuse(f"{path} is gone")

    def _unless_refused(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            if not is_refusal(error):
                raise
            self._refuse(root_cause(error))

    def _refuse(self, why: str) -> None:
        if why not in self.report.refused:
            self.report.refused.append(why)

    def _watch_machine(self, run_id: str) -> None:
        try:
            module = import_module("mlflow.system_metrics.system_metrics_monitor")
            monitor = module.SystemMetricsMonitor(run_id, tracking_uri=self._store.uri, resume_logging=True)
            monitor.start()
            self._monitor = monitor
        except Exception as error:  # psutil or a driver is missing: the curves of the run are worth having without
            self._refuse(f"no system metrics: {root_cause(error)}")
