"""The run as MLflow shows it. All of it may be uploaded again: it goes to the same place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from resilient_train.files import MOST_BYTES
from resilient_train.record.endings import CHECKPOINTS, CONFIG, LOOP, SUMMARY, facts_of
from resilient_train.record.incident_log import INCIDENTS
from resilient_train.record.journal import JOURNAL
from resilient_train.tracking.connection import Connection, is_unreachable, run_page
from resilient_train.tracking.figure import draw_strip
from resilient_train.tracking.report import REPORT, note, report
from resilient_train.tracking.story import Story, read_story
from resilient_train.tracking.traces import Traces, trace_id_of
from resilient_train.wording import tags

_AS_THEY_ARE = (CONFIG, LOOP, INCIDENTS, "train.log")  # files of the run directory
_STRIP = "incidents.png"  # an artifact

_FEW, _REST = 20, 10  # incidents; with more it pauses for so many times as long as reading and describing them took


class Presentation:
    def __init__(
        self, connection: Connection, run_dir: Path, unless_refused: Callable[[Callable[[], object]], None]
    ) -> None:
        """What is `unless_refused` raises only what prevents it for now."""
        self._mlflow, self._run_dir, self._unless_refused = connection, run_dir, unless_refused
        self._traces = Traces(connection.client, connection.uri, connection.experiment_id, connection.run_id)
        self._traced: set[int] = set()  # incidents with a trace
        self._seen: object = None
        self._trouble: Exception | None = None
        self._rests_until = 0.0

    def refresh(self, *, is_last: bool = False) -> Exception | None:
        """Show what has changed, the words first; return what prevented some of it. Raises if MLflow does not answer.

        The report is uploaded at the end only, so that uploads do not grow with the square of the number of incidents.
        With many of them, words and the picture take at most a tenth of the time.
        """
        state, began = self._state(), time.monotonic()
        if not is_last and (began < self._rests_until or (state == self._seen and self._trouble is None)):
            return None
        self._trouble = None
        story = read_story(self._run_dir)
        self._attempt(lambda: self._describe(story))
        if story.chapters:
            self._attempt(lambda: self._mlflow.client.log_figure(self._mlflow.run_id, draw_strip(story), _STRIP))
        if len(story.chapters) > _FEW:
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - began)
        if is_last or self._seen is None:
            for name in _AS_THEY_ARE:
                self._attempt(partial(self._attach_as_it_is, self._run_dir / name))
        for chapter in story.chapters:
            is_due = chapter.closed_ms is not None and chapter.incident.id not in self._traced
            if is_due and self._attempt(partial(self._traces.upload, chapter)):
                self._traced.add(chapter.incident.id)
        if is_last:
            self._attempt(lambda: self._mlflow.client.log_text(self._mlflow.run_id, report(story), REPORT))
        self._seen = state
        return self._trouble

    def _describe(self, story: Story) -> None:
        page = run_page(self._mlflow.experiment_id, self._mlflow.run_id, "/traces")

        def trace(number: int) -> str:
            return f"{page}&selectedEvaluationId={trace_id_of(self._mlflow.run_id, number)}"

        # The content of an artifact, for a page of the same server.
        strip = f"get-artifact?path={_STRIP}&run_uuid={self._mlflow.run_id}"
        self._mlflow.show_tags(tags(story.incidents, story.status), note(story, trace, strip))

    def _attach_as_it_is(self, file: Path) -> None:
        """Attach a file of the run, if it is a plain one: a directory that somebody else made may hold anything."""
        if file.is_file() and not file.is_symlink() and file.stat().st_size <= MOST_BYTES:
            self._mlflow.client.log_artifact(self._mlflow.run_id, str(file))

    def _state(self) -> object:
        """Return what differs when something has changed, at the cost of a few looks at files."""
        found: list[object] = [facts_of(self._run_dir)]
        for name in (JOURNAL, SUMMARY, CHECKPOINTS, "best"):
            with contextlib.suppress(OSError):
                known = os.stat(self._run_dir / name)
                found.append((name, known.st_size, known.st_mtime_ns))
        return found

    def _attempt(self, show: Callable[[], object]) -> bool:
        """Do it; return whether it is done with: shown, or refused for good."""
        try:
            self._unless_refused(show)
        except Exception as error:
            if is_unreachable(error):
                raise
            self._trouble = self._trouble or error
            return False
        return True
