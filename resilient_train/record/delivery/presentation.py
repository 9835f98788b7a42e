"""The run as MLflow shows it, made anew from the run directory whenever that has changed.

All of it may be done any number of times: what is there already stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from resilient_train.record.delivery.connection import Connection, is_refusal, root_cause
from resilient_train.record.delivery.models import show_models
from resilient_train.record.delivery.pictures import picture_url, show_overview, show_picture, strip_url
from resilient_train.record.delivery.report import note, report
from resilient_train.record.delivery.rows import tag_batches
from resilient_train.record.delivery.store import KnownRun, trace_url
from resilient_train.record.delivery.traces import Traces, trace_id_of
from resilient_train.record.delivery.views import prepare_run_list
from resilient_train.record.journal import JOURNAL
from resilient_train.record.story import Chapter, Story, told
from resilient_train.record.surroundings import around, surroundings_of
from resilient_train.record.telling import tags

REPORT = "report.md"  # the artifact that holds all of it


class Presentation:
    """Shows tags, the note, the report, traces, pictures and checkpoints of a run."""

    def __init__(self, connection: Connection, run_dir: Path, known: KnownRun, refuse: Callable[[str], None]) -> None:
        self._connection, self._run_dir, self._known, self._refuse = connection, run_dir, known, refuse
        self._traces = Traces(connection.uri, connection.experiment_id, connection.run_id)
        self._seen: object = None
        self._text = ""
        self._drawn: object = None
        self._unless_refused(lambda: prepare_run_list(connection.client, connection.experiment_id))

    def refresh(self) -> None:
        """Show what has changed since the last time."""
        if (stand := self._stand()) == self._seen:
            return
        story = told(self._run_dir)
        shown = self._known.shown
        for chapter in story.chapters:
            signature = self._signature(chapter)
            if shown.get(str(chapter.incident.id)) != signature:
                self._show_chapter(chapter)
                shown[str(chapter.incident.id)] = signature
                self._known.note(shown=shown)
        self._show_whole(story)
        self._seen = stand

    def _show_chapter(self, chapter: Chapter) -> None:
        connection, points = self._connection, around(self._run_dir, chapter.incident.id)
        self._unless_refused(lambda: self._traces.show(chapter))
        self._unless_refused(lambda: show_picture(connection.client, connection.run_id, chapter, points))

    def _show_whole(self, story: Story) -> None:
        client, experiment_id, run_id = self._connection.client, self._connection.experiment_id, self._connection.run_id
        self._unless_refused(lambda: show_models(client, experiment_id, run_id, story))
        drawn = story.status, [(one.incident.id, one.incident.outcome) for one in story.chapters]
        if drawn != self._drawn:
            self._unless_refused(lambda: show_overview(client, run_id, story))
            self._drawn = drawn
        whole = report(story, self._trace_url)
        if whole != self._text:
            with TemporaryDirectory() as place:
                path = Path(place, REPORT)
                path.write_text(whole, "utf-8")
                self._unless_refused(lambda: client.log_artifact(run_id, str(path)))
            self._text = whole
        said = tags([one.incident for one in story.chapters], story.status)
        pictures = {one.incident.id: picture_url(experiment_id, run_id, one) for one in story.chapters}
        said["mlflow.note.content"] = note(story, self._trace_url, pictures.get, strip_url(run_id))
        for batch in tag_batches(said):
            self._unless_refused(partial(client.log_batch, run_id, *batch))

    def _trace_url(self, incident_id: int) -> str | None:
        connection = self._connection
        trace_id = trace_id_of(connection.run_id, incident_id)
        return trace_url(connection.experiment_id, connection.run_id, trace_id)

    def _stand(self) -> object:
        """What tells that something has changed, at the cost of a few looks at files."""
        names = (JOURNAL, "summary.json", "incidents", "checkpoints", "best")
        return [_changed(self._run_dir / name) for name in names]

    def _signature(self, chapter: Chapter) -> str:
        marks = (chapter.treated_ms, chapter.closed_ms, len(chapter.phases), chapter.incident.outcome)
        drawn = _changed(surroundings_of(self._run_dir, chapter.incident.id))
        return f"{marks} {drawn}"

    def _unless_refused(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            if not is_refusal(error):
                raise
            self._refuse(root_cause(error))


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns
