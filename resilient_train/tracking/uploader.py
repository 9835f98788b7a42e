"""Uploads what a run directory holds to MLflow: each entry of the outbox once, and the run as it is now."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from resilient_train.record.endings import last_sign_ms
from resilient_train.record.journal import Entry, entries
from resilient_train.record.outbox import BEGAN, ENDED, METRICS, OUTBOX
from resilient_train.tracking.connection import (
    MOST_METRICS,
    Connection,
    Store,
    TrackedRun,
    connect,
    is_refusal,
    metrics_of,
    root_cause,
    slices,
)
from resilient_train.tracking.presentation import Presentation
from resilient_train.tracking.story import read_story

ENTRIES_AT_ONCE = 200


class Busy(Exception):
    """Another process is uploading the same run directory."""


class Uploader:
    """Uploads one run directory to one store. Whatever goes wrong raises, and the next call continues there."""

    def __init__(self, run_dir: Path, store: Store, experiment: str) -> None:
        self.run_dir, self.outbox = run_dir, run_dir / OUTBOX
        self.uploaded = 0  # entries, by this object
        self.damaged = 0
        self.refused: list[str] = []  # why, for each thing that MLflow will never take
        self.store, self._experiment = store, experiment
        self._reached: tuple[Connection, Presentation] | None = None
        self._lock: int | None = None

    @property
    def run(self) -> TrackedRun | None:
        return self._reached[0].run if self._reached is not None else None

    def upload(self, *, is_last: bool = False) -> None:
        """Upload all that is there by now: first the entries of the outbox; if it `is_last`, also how the run ended."""
        self._acquire()
        if self._reached is None:
            connection = connect(self.store, self._experiment, self.run_dir)
            self._reached = connection, Presentation(connection, self.run_dir, self._unless_refused)
        connection, presentation = self._reached
        self._upload_entries(connection)
        if is_last:
            self._show_end(connection)
        if (trouble := presentation.refresh(is_last=is_last)) is not None:
            raise trouble
        if is_last:
            connection.forget_twins()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(self.outbox, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise Busy("another process is uploading it") if isinstance(error, BlockingIOError) else error from None
        self._lock = lock

    def _upload_entries(self, connection: Connection) -> None:
        end = connection.cursor.get("delivered", 0)
        while portion := list(islice(entries(self.outbox, end), ENTRIES_AT_ONCE)):
            self._send(connection, [entry for entry, _ in portion if entry is not None])
            self.damaged += sum(entry is None for entry, _ in portion)
            self.uploaded += len(portion)
            end = portion[-1][1]
            assert self._lock is not None
            with suppress(OSError):  # else a power cut could take it, and other lines its place
                os.fsync(self._lock)
            connection.cursor.note(delivered=end)

    def _send(self, connection: Connection, portion: list[Entry]) -> None:
        metrics = [one for entry in portion if entry["kind"] == METRICS for one in metrics_of(entry)]
        for some in slices(metrics, MOST_METRICS):
            self._unless_refused(partial(connection.client.log_batch, connection.run_id, some))
        for entry in portion:
            if entry["kind"] == BEGAN:
                self._unless_refused(partial(connection.add_params, entry["params"]))
                connection.client.update_run(connection.run_id, status="RUNNING")
            elif entry["kind"] == ENDED:
                status = replace(read_story(self.run_dir), state=entry["status"]).in_mlflow
                connection.client.set_terminated(connection.run_id, status, entry["at"])

    def _show_end(self, connection: Connection) -> None:
        story = read_story(self.run_dir)
        shown = connection.client.get_run(connection.run_id).info.status
        if story.process is None and story.state != "none" and shown != story.in_mlflow:
            connection.client.set_terminated(connection.run_id, story.in_mlflow, last_sign_ms(self.run_dir))

    def _unless_refused(self, send: Callable[[], object]) -> None:
        """Do it, and note why where MLflow will never take it. Raises what prevents it for now."""
        try:
            send()
        except Exception as error:
            if not is_refusal(error):
                raise
            if (why := root_cause(error)) not in self.refused:
                self.refused.append(why)
