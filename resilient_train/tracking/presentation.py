"""The run as MLflow shows it, from the run directory. All of it may be uploaded again: it goes to the same place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from resilient_train.record.endings import CHECKPOINTS, SUMMARY, ended_as
from resilient_train.record.journal import JOURNAL
from resilient_train.record.surroundings import around
from resilient_train.tracking.connection import (
    Connection,
    is_refusal,
    is_unreachable,
    root_cause,
    tag_batches,
    with_note,
)
from resilient_train.tracking.figure import draw_incident, draw_strip
from resilient_train.tracking.report import REPORT, note, report
from resilient_train.tracking.run_cost import run_cost
from resilient_train.tracking.store import artifact_page, artifact_source, trace_page
from resilient_train.tracking.story import Chapter, Story, StoryReader
from resilient_train.tracking.traces import Traces, trace_id_of
from resilient_train.tracking.views import prepare_run_list, show_models
from resilient_train.wording import tags

STRIP, PICTURES = "incidents.png", "incidents"  # artifacts: all incidents in one, and a folder with one of each
MOST_PICTURES = 50  # of incidents; later ones have none

_FEW, _REST = 20, 10  # incidents; with more it pauses for so many times as long as showing them took
_MOST_FAILURES = 20  # traces that could not be uploaded, after which a refresh leaves the others out


class Presentation:
    """Shows tags, the description, traces, pictures, checkpoints and the report of a run."""

    def __init__(self, connection: Connection, run_dir: Path, refuse: Callable[[str], None]) -> None:
        self._connection, self._run_dir, self._refuse = connection, run_dir, refuse
        self._client, self._experiment_id, self._run_id = connection.client, connection.experiment_id, connection.run_id
        self._traces = Traces(connection.client, connection.uri, connection.experiment_id, connection.run_id)
        self._story = StoryReader(run_dir)
        self._shown: set[int] = set()  # incidents with a trace and a picture, where they get one
        self._drawn: set[str] | None = None  # pictures that MLflow has
        self._seen: object = None
        self._trouble: Exception | None = None
        self._rests_until = 0.0
        prepare_run_list(connection.client, connection.experiment_id)

    def refresh(self, *, is_last: bool = False) -> Exception | None:
        """Show what has changed, the words first; return what prevented some of it. Raises if MLflow does not answer.

        An incident gets its trace and picture once its outcome is known, and the report is uploaded at the end: so
        uploads grow with the number of incidents, and not with its square. Words and the strip are made of all
        incidents; if there are many, that takes at most a tenth of the time.
        """
        state, began = self._state(), time.monotonic()
        if not is_last and (began < self._rests_until or (state == self._seen and self._trouble is None)):
            return None
        self._trouble = None
        story = self._story.read()
        self._attempt(lambda: self._describe(story))
        failures, described = 0, time.monotonic()
        for chapter in story.chapters:
            if chapter.closed_ms is not None and chapter.incident.id not in self._shown and failures < _MOST_FAILURES:
                is_traced = self._attempt(partial(self._traces.upload, chapter))
                failures += not is_traced
                if self._attempt(partial(self._draw, chapter)) and is_traced:
                    self._shown.add(chapter.incident.id)
        began += time.monotonic() - described  # what is shown of each incident is shown once
        self._attempt(lambda: show_models(self._client, self._experiment_id, self._run_id, story))
        if story.chapters:
            self._attempt(lambda: self._attach(STRIP, draw_strip(story)))
        if is_last:
            self._attempt(lambda: self._attach(REPORT, report(story).encode()))
            self._attempt(lambda: self._show_cost(story))
        self._seen = state
        if len(story.chapters) > _FEW:
            self._rests_until = time.monotonic() + _REST * (time.monotonic() - began)
        return self._trouble

    def _describe(self, story: Story) -> None:
        """Set the tags and the description, unless a person has written another one."""
        closed = {one.incident.id for one in story.chapters if one.closed_ms is not None}

        def trace(number: int) -> str | None:
            trace_id = trace_id_of(self._run_id, number)
            return trace_page(self._experiment_id, self._run_id, trace_id) if number in closed else None

        def picture(number: int) -> str | None:
            is_drawn = number in closed and number <= MOST_PICTURES
            return artifact_page(self._experiment_id, self._run_id, _picture(number)) if is_drawn else None

        said = tags([one.incident for one in story.chapters], story.status)
        there = self._client.get_run(self._run_id).data.tags
        said |= with_note(there, note(story, trace, picture, artifact_source(self._run_id, STRIP)))
        for batch in tag_batches(said):
            self._client.log_batch(self._run_id, *batch)

    def _draw(self, chapter: Chapter) -> None:
        """Upload the picture of an incident, unless MLflow has it."""
        number = chapter.incident.id
        if number > MOST_PICTURES:
            return
        if self._drawn is None:
            self._drawn = {one.path for one in self._client.list_artifacts(self._run_id, PICTURES)}
        if _picture(number) not in self._drawn:
            self._attach(_picture(number), draw_incident(chapter, around(self._run_dir, number)))
            self._drawn.add(_picture(number))

    def _show_cost(self, story: Story) -> None:
        from mlflow.entities import Metric

        costs, at_ms = run_cost(self._run_dir, story)
        if costs:
            rows = [Metric(name, value, at_ms, story.tick) for name, value in costs.items()]
            self._client.log_batch(self._run_id, rows, (), ())

    def _attach(self, path: str, content: bytes) -> None:
        folder, _, name = path.rpartition("/")
        with TemporaryDirectory() as place:
            file = Path(place, name)
            file.write_bytes(content)
            self._client.log_artifact(self._run_id, str(file), folder or None)

    def _state(self) -> object:
        """Return what differs when something has changed, at the cost of a few looks at files."""
        names = (JOURNAL, SUMMARY, PICTURES, CHECKPOINTS, "best")
        return [_stat(self._run_dir / name) for name in names], ended_as(self._run_dir)

    def _attempt(self, show: Callable[[], object]) -> bool:
        """Do it; return whether it is done with: shown, or refused for good."""
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


def _picture(number: int) -> str:
    return f"{PICTURES}/{number:04}.png"


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
