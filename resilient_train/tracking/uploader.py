"""Uploads what a run directory holds to MLflow: each entry of the outbox once, and the run as it is now."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient_train.files import MOST_BYTES
from resilient_train.record.endings import CHECKPOINTS, CONFIG, LOOP, facts_of, last_sign_ms
from resilient_train.record.incident_log import INCIDENTS
from resilient_train.record.journal import BEGAN, JOURNAL, METRICS, OUTBOX, entries
from resilient_train.record.run_history import Chapter, in_words
from resilient_train.tracking.connection import MlflowRun, cut, run_page
from resilient_train.tracking.report import REPORT, note, report
from resilient_train.tracking.story import Story, read_story
from resilient_train.types import Outcome
from resilient_train.wording import describe, printable, tags

if TYPE_CHECKING:
    from mlflow.tracing.client import TracingClient

ENTRIES_AT_ONCE = 200

_AS_THEY_ARE = (CONFIG, LOOP, INCIDENTS, "train.log")  # files of the run directory
_REST = 10  # times as long as describing a run took: with many incidents it takes at most a tenth of the time


class Uploader:
    """Uploads one run directory to one store. Whatever goes wrong raises, and the next call continues there."""

    def __init__(self, run_dir: Path, uri: str, experiment: str, say: Callable[[str], None]) -> None:
        """`say` gets what MLflow will never take."""
        self.run_dir, self._connect = run_dir, partial(MlflowRun, uri, experiment, run_dir, say)
        self._outbox: int | None = None  # the file, locked: one process uploads at a time
        self._run: MlflowRun | None = None
        self._seen: object = None  # the state of the run directory that MLflow shows
        self._rests_until = 0.0

    def upload(self, *, is_last: bool = False) -> None:
        """Upload all that is there by now: first the entries of the outbox; if it `is_last`, also how the run ended."""
        if self._outbox is None:
            self._outbox = os.open(self.run_dir / OUTBOX, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._outbox, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError("another process is uploading it") from None
        run = self._run = self._run or self._connect()
        self._upload_entries(run)
        self._show(run, is_last=is_last)
        if is_last:
            run.forget_twins()

    def close(self) -> None:
        if self._outbox is not None:
            os.close(self._outbox)

    def _upload_entries(self, run: MlflowRun) -> None:
        end = run.cursor.get("delivered", 0)
        while portion := list(islice(entries(self.run_dir / OUTBOX, end), ENTRIES_AT_ONCE)):
            rows = [entry for entry, _ in portion if entry is not None]
            run.add_metrics(row for row in rows if row["kind"] == METRICS)
            for row in rows:
                if row["kind"] == BEGAN:
                    run.add_params(row["params"])
                    if sweep := row.get("sweep"):
                        run.send(run.client.set_tag, "resilience.sweep", sweep)
            end = portion[-1][1]
            assert self._outbox is not None
            with suppress(OSError):  # else a power cut could take it, and other lines its place
                os.fsync(self._outbox)
            run.cursor.note(delivered=end)

    def _show(self, run: MlflowRun, *, is_last: bool) -> None:
        """Show the run as it is now, if something has changed. All of it may be uploaded again, to the same place."""
        state, began = self._state(), time.monotonic()
        if not is_last and (began < self._rests_until or state == self._seen):
            return
        is_first, self._seen = self._seen is None, None  # until all is there
        story = read_story(self.run_dir)
        try:
            self._describe(run, story, is_last=is_last)
            self._upload_traces(run, story)
        finally:  # the store of the files may be another one, and fail alone
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - began)
            if is_first or is_last:
                self._upload_files(run)
            if is_last:  # only then: uploads would grow with the square of the number of incidents
                run.send(run.client.log_text, report(story), REPORT)
        self._seen = state

    def _state(self) -> object:
        """Return what differs when something has changed, at the cost of a few looks at files."""
        paths = [self.run_dir / name for name in (JOURNAL, CHECKPOINTS, "best")]
        return facts_of(self.run_dir), [path.stat().st_mtime_ns for path in paths if path.exists()]

    def _describe(self, run: MlflowRun, story: Story, *, is_last: bool) -> None:
        is_over = is_last and story.state not in ("running", "none")
        status = story.in_mlflow if is_over else "RUNNING"
        page = run_page(run.experiment_id, run.run_id, "/traces")

        def trace(number: int) -> str:
            return f"{page}&selectedEvaluationId={trace_id_of(run.run_id, number)}"

        run.describe(status, last_sign_ms(self.run_dir), tags(story.incidents, story.status), note(story, trace))

    def _upload_traces(self, run: MlflowRun, story: Story) -> None:
        traced = dict.fromkeys(run.cursor.get("traced", []))  # incidents whose trace was sent, or refused
        try:
            for chapter in story.chapters:
                if chapter.closed_ms is not None and chapter.incident.id not in traced:
                    run.send(upload_trace, chapter, run.tracing, run.experiment_id)
                    traced[chapter.incident.id] = None
        finally:
            run.cursor.note(traced=[*traced])

    def _upload_files(self, run: MlflowRun) -> None:
        for name in _AS_THEY_ARE:
            file = self.run_dir / name  # of a directory that somebody else made it may be anything
            if file.is_file() and not file.is_symlink() and file.stat().st_size <= MOST_BYTES:
                run.send(run.client.log_artifact, str(file))


_TAGS = ("step", "signal", "cause", "outcome")  # of a trace, to filter a list by
_PREVIEW = 1000  # characters that MLflow's database has room for


def trace_id_of(run_id: str, incident_id: int) -> str:
    return "tr-" + hashlib.sha256(f"resilient_train/{run_id}/{incident_id}".encode()).hexdigest()[:32]


def upload_trace(run_id: str, chapter: Chapter, client: TracingClient, experiment_id: str) -> None:
    """Make sure that MLflow has the trace of an incident whose outcome is known. It raises what goes wrong."""
    from mlflow.entities import Span, TraceInfo, TraceLocation, TraceState

    incident, began = chapter.incident, chapter.opened_ms
    ended = max(began, chapter.treated_ms or chapter.closed_ms or began)
    trace_id, line = trace_id_of(run_id, incident.id), in_words(incident)
    if _is_there(client, trace_id):
        return
    name = f"incident {incident.id}: {incident.anomaly.signal}"
    # What came back later has an incident of its own.
    state = "ERROR" if incident.outcome in (Outcome.UNRECOVERED, Outcome.GAVE_UP) else "OK"
    sign, handled = describe(incident, "sign"), describe(incident, "handled")
    known = {
        **line,
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": "WORKFLOW",
        "mlflow.spanInputs": sign,
        "mlflow.spanOutputs": handled,
    }
    span: dict[str, Any] = {
        "trace_id": b64encode(bytes.fromhex(trace_id[3:])).decode(),
        "span_id": b64encode(hashlib.sha256(f"{trace_id}/root".encode()).digest()[:8]).decode(),
        "parent_span_id": None,
        "name": name,
        "start_time_unix_nano": began * 1_000_000,
        "end_time_unix_nano": ended * 1_000_000,
        "events": [],
        "status": {"code": f"STATUS_CODE_{state}"},
        "attributes": {key: json.dumps(value) for key, value in known.items()},
    }
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=began,
        execution_duration=ended - began,
        state=TraceState(state),
        request_preview=cut(printable(sign), _PREVIEW),  # a database has no room for a zero either
        response_preview=cut(printable(handled), _PREVIEW),
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
        tags={
            "mlflow.traceName": name,
            "resilience.incident": str(incident.id),
            **{f"resilience.{key}": str(line[key]) for key in _TAGS},
        },
    )
    # The span first: as long as it is alone, it is sent again.
    try:
        client.log_spans(experiment_id, [Span.from_dict(span)])
    except NotImplementedError as error:
        if "could not identify" in str(error):  # no answer, and MLflow would remember that the server has none
            client.store._get_server_version.cache_clear()
            raise ConnectionError("the server does not tell its version") from None
        raise
    client.start_trace(info)


def _is_there(client: TracingClient, trace_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        # A span alone does not belong to the run yet.
        return "mlflow.sourceRun" in client.get_trace_info(trace_id).trace_metadata
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
