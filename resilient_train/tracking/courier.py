"""Carries what a run directory holds into MLflow: each entry of the outbox once, and the run as it is now."""

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

from resilient_train.record.endings import ended_as, last_sign_ms
from resilient_train.record.journal import JOURNAL, Entry, read
from resilient_train.record.outbox import ARTIFACT, BEGAN, ENDED, OUTBOX, entries, seal_before
from resilient_train.tracking.connection import (
    Connection,
    connect,
    forget_twins,
    is_refusal,
    is_unreachable,
    root_cause,
)
from resilient_train.tracking.presentation import Presentation
from resilient_train.tracking.rows import batches
from resilient_train.tracking.store import KnownRun, Store, TrackedRun

ENTRIES_AT_ONCE = 200
ENDINGS = {"completed": "FINISHED", "ended": "FINISHED", "closed": "FINISHED", "failed": "FAILED", "gave_up": "FAILED"}
ENDINGS |= {"preempted": "KILLED", "killed": "KILLED"}


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
        self._store, self._experiment, self._wants_system_metrics = store, experiment, system_metrics
        self._met, self._went_on = met, went_on
        self._known = KnownRun(run_dir)
        self._reached: tuple[Connection, Presentation] | None = None
        self._monitor: Any = None
        self._lock: int | None = None

    def deliver(self, *, is_last: bool = False) -> None:
        """Deliver all that is there by now: rows first, then the story, then files.

        What cannot be had of the later ones keeps none of the others back, and is tried again with the next call.
        """
        self._alone()
        connection, presentation = self._connected()
        self._deliver_rows(connection)
        trouble = presentation.refresh(is_last=is_last)
        for path in self._known.files:
            error = self._unless_refused(partial(self._attach, connection, path))
            trouble = trouble or error
            if error is None:
                self._known.note(files=[one for one in self._known.files if one != path])
        if trouble is not None:
            raise trouble

    def conclude(self) -> None:
        """Deliver the rest, and how the run ended."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        try:
            self.deliver(is_last=True)
        finally:  # in spite of a file that cannot be stored
            if self._reached is not None:
                self._end(self._reached[0])
        assert self._reached is not None
        assert self._lock is not None
        size, delivered = os.fstat(self._lock).st_size, self._known.delivered
        if size > delivered and next(entries(self.outbox, delivered), None) is None:
            self.report.damaged += 1  # it breaks off within a line
        forget_twins(self._reached[0], self._known, self.outbox)

    def leave(self) -> None:
        """Let another process deliver."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def run(self) -> TrackedRun | None:
        """The run in MLflow, once it is reached."""
        return self._reached[0].run if self._reached is not None else None

    def _alone(self) -> None:
        """Take the outbox for this process alone; the kernel gives it back."""
        if self._lock is None:
            lock = os.open(self.outbox, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                if isinstance(error, BlockingIOError):
                    raise Busy("another process is delivering it") from None
                raise
            self._lock = lock

    def _connected(self) -> tuple[Connection, Presentation]:
        if self._reached is None:
            first = next((entry for entry, _ in entries(self.outbox) if entry is not None), None)
            if first is None:
                raise FileNotFoundError(f"{self.outbox} holds nothing yet")
            began = min(
                [first["at"], *(one["at"] for one in read(self.run_dir / JOURNAL)[:1])]
            )  # an outbox may be late
            connection = connect(self._store, self._experiment, self._known, self.outbox, began)
            if self._known.seal != seal_before(self.outbox, self._known.delivered):
                self._known.note(delivered=0)  # it is not what it was then: a power cut took the end of it
            self._reached = connection, Presentation(connection, self.run_dir, self._known, self._refuse)
            self._met(connection)
            if self._wants_system_metrics:
                self._watch_machine(connection.run_id)
        return self._reached

    def _deliver_rows(self, connection: Connection) -> None:
        while portion := list(islice(entries(self.outbox, self._known.delivered), ENTRIES_AT_ONCE)):
            found = [entry for entry, _ in portion if entry is not None]
            self._send(connection, found)
            self.report.damaged += len(portion) - len(found)
            self.report.entries += len(portion)
            end = portion[-1][1]
            files = [str(entry.get("path")) for entry in found if entry["kind"] == ARTIFACT]
            files = list(dict.fromkeys([*self._known.files, *files]))  # it goes as it is then, so once is enough
            self._known.note(delivered=end, seal=seal_before(self.outbox, end), files=files)
            self._went_on(self.report.entries)

    def _send(self, connection: Connection, portion: list[Entry]) -> None:
        client, run_id = connection.client, connection.run_id
        for metrics, params, tags in batches(portion):
            error = _refusal(partial(client.log_batch, run_id, metrics, params, tags))
            if error is not None and params:  # one has another value there: those that a run had first are kept
                there = client.get_run(run_id).data.params
                new = [one for one in params if one.key not in there]
                error = _refusal(partial(client.log_batch, run_id, (), new, ())) if new else None
            if error is not None:
                self._refuse(root_cause(error))
        for entry in [one for one in portion if one["kind"] in (BEGAN, ENDED)][-1:]:
            if entry["kind"] == BEGAN:
                client.update_run(run_id, status="RUNNING")
            else:
                client.set_terminated(run_id, ENDINGS.get(str(entry.get("status")), "FAILED"), entry["at"])

    def _end(self, connection: Connection) -> None:
        """Note how a run ended that could not say so itself."""
        ended = ended_as(self.run_dir)
        if ended is None or connection.client.get_run(connection.run_id).info.status != "RUNNING":
            return
        connection.client.set_terminated(connection.run_id, ENDINGS.get(ended, "FAILED"), last_sign_ms(self.run_dir))

    def _attach(self, connection: Connection, path: str) -> None:
        """Attach a file of the run: of what an outbox names elsewhere, whoever wrote it, nothing is sent."""
        whole = (self.run_dir / path).resolve()
        is_ours = whole.is_relative_to(self.run_dir.resolve()) and not (self.run_dir / path).is_symlink()
        if not is_ours:
            self._refuse(f"{path} is no file of the run")
        elif not whole.is_file():
            self._refuse(f"{path} is gone")
        else:
            connection.client.log_artifact(connection.run_id, str(whole))

    def _unless_refused(self, send: Callable[[], object]) -> Exception | None:
        """Do it; return what kept it from being done for now. Raises where nobody answers."""
        try:
            send()
        except Exception as error:
            if is_unreachable(error):
                raise
            if not is_refusal(error):
                return error
            self._refuse(root_cause(error))
        return None

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


def _refusal(send: Callable[[], object]) -> Exception | None:
    """Do it; return why it will never be taken, if so."""
    try:
        send()
    except Exception as error:
        if not is_refusal(error):
            raise
        return error
    return None
