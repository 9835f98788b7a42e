"""Uploads what a run directory holds to MLflow: each entry of the outbox once, and the run as it is now.

Of a run MLflow shows a description, traces of its incidents, and a report.
"""

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
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient_train.durable.endings import CHECKPOINTS, CONFIG, LOOP, facts_of, last_sign_ms
from resilient_train.durable.incident_log import INCIDENTS
from resilient_train.durable.journal import BEGAN, JOURNAL, METRICS, OUTBOX, entries
from resilient_train.durable.run_history import Chapter, in_words
from resilient_train.ground.secrets import masked
from resilient_train.ground.sentences import NOTE, ROW
from resilient_train.ground.types import Outcome, fact
from resilient_train.ground.wording import about, blamed, describe, fill, printable, say, tags
from resilient_train.report.connection import MlflowRun, cut, run_page
from resilient_train.report.story import (
    Story,
    block,
    left,
    meanwhile,
    next_start,
    read_story,
    review,
    shortened,
    things_to_do,
    verdict,
)

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
            if file.is_file() and not file.is_symlink():
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


_DOTS = "..."
_MARKS = {one: f"\\{one}" for one in "*_[]~"} | {one: f"&#{ord(one)};" for one in "&<>|\\@$¨"} | {"`": ""}
_GAP = "&ensp; | "

REPORT = "report.txt"  # its name among the artifacts
LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_TO_DO, _LONGEST_TO_DO = 3, 300  # things, and characters of each
_MOST_LEFT, _MOST_INCIDENTS, _MOST_ROWS = 260, 200, 80  # characters of a line; incidents in the report, in a note

PageUrl = Callable[[int], str]  # the page of an incident, by its number


def report(story: Story) -> str:
    """Return the full report: the review of the run, and its newest incidents as the terminal shows them."""
    lines = [str(story.directory), "", *review(story, str)]
    newest = story.chapters[-_MOST_INCIDENTS:]
    if older := len(story.chapters) - len(newest):
        lines += ["", say(fact("older", count=older))]
    for chapter in newest:
        lines += ["", *block(chapter)]
    return "\n".join(printable(masked(line)) for line in lines) + "\n"


def note(story: Story, trace_url: PageUrl) -> str:
    """Return the description in MLflow, with as many of the newest incidents as fit below its limit."""
    words, sentences = verdict(story)
    things = [text(one, _LONGEST_TO_DO) for one in shortened(things_to_do(story), _MOST_TO_DO, "and_more")]
    rows = [f"| {_GAP.join(_row(chapter, trace_url))} |" for chapter in story.chapters[:-_MOST_ROWS:-1]]
    values = {
        "headline": text(words, 300),
        "things": things,
        "calm": story.chapters and not things,
        "details": text(sentences, 900),
        "titles": _GAP.join(ROW) if story.chapters else "",
        "rule": "|---" * len(ROW),
        "left": "".join(say(fact("left", label=label, what=text(one, _MOST_LEFT))) for label, one in left(story, str)),
        "next": text(say(next_start(story)), _MOST_LEFT),
        "report": REPORT,
    }
    while True:
        older = len(story.chapters) - len(rows)
        if len(whole := fill(NOTE, values | {"rows": "\n".join(rows), "older": older})) <= LIMIT:
            return whole
        rows.pop()


def _row(chapter: Chapter, trace_url: PageUrl) -> list[str]:
    """Return one incident as cells of no more than 200 characters, without their addresses."""
    incident, culprit = chapter.incident, chapter.incident.diagnosis.culprit
    short = {"file": "/".join(culprit.file.split("/")[-2:]), "module": "", "phase": ""} if culprit else {}
    values = about(incident) | {"opened": chapter.opened_ms, "where": blamed(incident.diagnosis, **short)}
    values |= meanwhile(chapter)
    cells = {title: text(fill(template, values), 200) for title, template in ROW.items()}
    if chapter.closed_ms is not None:
        cells["#"] = f"[{cells['#']}]({trace_url(incident.id)})"
    if incident.outcome is not Outcome.RECOVERED:
        cells["outcome"] = f"**{cells['outcome']}**"
    return [*cells.values()]


def text(raw: str, most: int) -> str:
    """Show words as they are, in at most `most` characters of markdown. Never at the start of a line."""
    marks = [_MARKS.get(one, one) for one in printable(" ".join(raw.split()))]
    ends = list(accumulate(map(len, marks)))
    if ends and ends[-1] > most:
        marks = [*marks[: sum(end <= most - len(_DOTS) for end in ends)], _DOTS]
    return "".join(marks)
