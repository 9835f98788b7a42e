"""The run as MLflow shows it, made anew from the run directory whenever that has changed.

All of it may be done any number of times: what is there already stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from resilient_train.record.endings import ended_as
from resilient_train.record.journal import JOURNAL
from resilient_train.record.surroundings import around, surroundings_of
from resilient_train.tracking.connection import Connection, is_refusal, is_unreachable, root_cause
from resilient_train.tracking.models import show_models
from resilient_train.tracking.pictures import picture_url, show_overview, show_picture, strip_url
from resilient_train.tracking.report import REPORT, note, report
from resilient_train.tracking.rows import TAG_LENGTH, cut, tag_batches
from resilient_train.tracking.store import KnownRun, trace_url
from resilient_train.tracking.story import Chapter, Story, read_story
from resilient_train.tracking.traces import Traces, trace_id_of
from resilient_train.tracking.views import prepare_run_list
from resilient_train.wording import tags

_MANY, _REST = 20, 10  # incidents, and times as long as it took to show them
_NOTE_EVERY_S = 2.0
_NOTE = "mlflow.note.content"
_OURS = "mlflow.resilience.note"  # the digest of the note that was written last, and not by a person


class Presentation:
    """Shows tags, the note, the report, traces, pictures and checkpoints of a run."""

    def __init__(self, connection: Connection, run_dir: Path, known: KnownRun, refuse: Callable[[str], None]) -> None:
        self._connection, self._run_dir, self._known, self._refuse = connection, run_dir, known, refuse
        self._traces = Traces(connection.uri, connection.experiment_id, connection.run_id)
        self._seen: object = None
        self._trouble: Exception | None = None
        self._rests_until = 0.0
        prepare_run_list(connection.client, connection.experiment_id)

    def refresh(self, *, is_last: bool = False) -> Exception | None:
        """Show what has changed since the last time, the words first; return what kept something from being shown.

        Each part is tried, whatever became of the others. Raises where nobody answers. All of it is made of all
        incidents: where there are many, it rests for ten times as long as it took, but for the last time.
        """
        stand, began = self._stand(), time.monotonic()
        if (stand == self._seen and self._trouble is None) or (began < self._rests_until and not is_last):
            return None
        self._trouble = None
        story, shown, noted = read_story(self._run_dir), self._known.shown, began
        self._attempt(lambda: self._say(story))
        for chapter in story.chapters:
            name, signature = str(chapter.incident.id), self._signature(chapter)
            if shown.get(name) != signature and self._attempt(partial(self._show_chapter, chapter)):
                shown[name] = signature
                if time.monotonic() - noted > _NOTE_EVERY_S:  # all of them, each time
                    self._known.note(shown=shown)
                    noted = time.monotonic()
        if shown != self._known.shown:
            self._known.note(shown=shown)
        client, experiment_id, run_id = self._connection.client, self._connection.experiment_id, self._connection.run_id
        self._attempt(lambda: show_models(client, experiment_id, run_id, story))
        self._attempt(lambda: show_overview(client, run_id, story))
        self._attempt(lambda: self._report(story))
        self._seen = stand
        if len(story.chapters) > _MANY:
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - began)
        return self._trouble

    def _say(self, story: Story) -> None:
        """The tags and the note; a description that a person has written stays."""
        client, run_id = self._connection.client, self._connection.run_id
        said = tags([one.incident for one in story.chapters], story.status)
        there = client.get_run(run_id).data.tags
        if _digest(there.get(_NOTE, "")) in (_digest(""), there.get(_OURS)):
            pictures = {
                one.incident.id: picture_url(self._connection.experiment_id, run_id, one) for one in story.chapters
            }
            said[_NOTE] = note(story, self._trace_url, pictures.get, strip_url(run_id))
            said[_OURS] = _digest(cut(said[_NOTE], TAG_LENGTH))
        for batch in tag_batches(said):
            client.log_batch(run_id, *batch)

    def _show_chapter(self, chapter: Chapter) -> None:
        connection, points = self._connection, around(self._run_dir, chapter.incident.id)
        try:
            self._traces.show(chapter)
        except NotImplementedError as error:  # a server that is too old for it
            self._refuse(root_cause(error))
        show_picture(connection.client, connection.run_id, chapter, points)

    def _report(self, story: Story) -> None:
        with TemporaryDirectory() as place:
            path = Path(place, REPORT)
            path.write_text(report(story, self._trace_url), "utf-8")
            self._connection.client.log_artifact(self._connection.run_id, str(path))

    def _trace_url(self, incident_id: int) -> str:
        connection = self._connection
        trace_id = trace_id_of(connection.run_id, incident_id)
        return trace_url(connection.experiment_id, connection.run_id, trace_id)

    def _stand(self) -> object:
        """What tells that something has changed, at the cost of a few looks at files."""
        names = (JOURNAL, "summary.json", "incidents", "checkpoints", "best")
        return [_changed(self._run_dir / name) for name in names], ended_as(self._run_dir)

    def _signature(self, chapter: Chapter) -> str:
        marks = (chapter.treated_ms, chapter.closed_ms, len(chapter.phases), chapter.incident.outcome)
        drawn = _changed(surroundings_of(self._run_dir, chapter.incident.id))
        return f"{marks} {drawn}"

    def _attempt(self, show: Callable[[], object]) -> bool:
        """Do it, and say whether that is settled: shown, or refused for good."""
        try:
            show()
        except Exception as error:
            if is_unreachable(error):
                raise
            if not is_refusal(error):
                self._trouble = self._trouble or error
                return False
            self._refuse(root_cause(error))
        return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns
