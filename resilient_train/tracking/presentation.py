"""The run as MLflow shows it. All of it may be uploaded again: it goes to the same place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from resilient_train.record.endings import CHECKPOINTS, SUMMARY, ended_as
from resilient_train.record.journal import JOURNAL
from resilient_train.record.surroundings import around
from resilient_train.tracking.connection import Connection, is_unreachable, run_page
from resilient_train.tracking.figure import draw_incident, draw_strip
from resilient_train.tracking.report import (
    LIMIT,
    REPORT,
    code,
    note,
    report,
    text,
)
from resilient_train.tracking.review import run_cost
from resilient_train.tracking.story import Chapter, Checkpoint, Story, StoryReader
from resilient_train.tracking.traces import Traces, trace_id_of
from resilient_train.wording import tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

VIEW = "resilience"  # the key of the view, in its link
NAME = "How the runs fare"
LAST_GOOD, BEST = "last-good", "best"

_TAG = f"mlflow.sharedViewState.{VIEW}"
_MADE_MS = 1_735_689_600_000  # always the same, so that a view that a person saved is recognized by its time
_COLUMNS = {  # and their widths
    "tags.`resilience.status`": 130,
    "tags.`resilience.incidents`": 145,
    "tags.`resilience.cause`": 180,
    "metrics.`train/step`": 90,
    "metrics.`train/loss`": 110,
    "metrics.`validation/loss`": 110,
    "tags.`resilience.last_incident`": 600,
}
_TRANSIENT = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
_UNFIT = re.compile(r"[^-.\w ]")  # for the name of a tag
_MOST_METRICS = 20


def prepare_run_list(client: MlflowClient, experiment_id: str) -> None:
    """Prepare a view of an experiment's runs, unless a person has made another one of it.

    A store that does not know or allow this is left without. A server that cannot be reached raises.
    """
    from mlflow.exceptions import MlflowException

    # Newer pages read a view with a name, older ones the bare state.
    state = {"selectedColumns": [*_COLUMNS], "columnOrder": [*_COLUMNS], "columnWidths": _COLUMNS}
    view = {"name": NAME, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": json.dumps(state)}
    wanted = json.dumps(state | view)
    try:
        there = client.get_experiment(experiment_id).tags.get(_TAG)
        if there is None or (there != wanted and f'"updatedAt": {_MADE_MS}' in there):
            client.set_experiment_tag(experiment_id, _TAG, wanted)
    except MlflowException as error:
        if error.error_code in _TRANSIENT:
            raise


def show_models(client: MlflowClient, experiment_id: str, run_id: str, story: Story) -> None:
    """Show the last good and the best checkpoint as MLflow's logged models of the run, one of each.

    Nothing is uploaded: a checkpoint stays on the disk of the run, and its model has the step and the path.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    there: dict[str, list[LoggedModel]] = {}
    for one in client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'"):
        there.setdefault(one.name, []).append(one)
    outputs = client.get_run(run_id).outputs
    linked = {one.model_id for one in outputs.model_outputs} if outputs else set()
    for name, checkpoint in ((LAST_GOOD, story.last_good), (BEST, story.best)):
        found = sorted(there.get(name, []), key=lambda one: (one.creation_timestamp, one.model_id))
        for one in found[1:]:  # MLflow's answer was lost, and it was created again
            client.delete_logged_model(one.model_id)
        first = found[0] if found else None
        tags = _model_tags(checkpoint)
        if first is None and checkpoint is not None:
            first = client.create_logged_model(experiment_id, name, run_id, tags, model_type="checkpoint")
        if first is None:
            continue
        if tags.items() - first.tags.items():
            client.set_logged_model_tags(first.model_id, tags)
        if first.status != LoggedModelStatus.READY:
            client.finalize_logged_model(first.model_id, LoggedModelStatus.READY)
        if first.model_id not in linked:
            client.log_outputs(run_id, [LoggedModelOutput(first.model_id, step=0)])


def _model_tags(checkpoint: Checkpoint | None) -> dict[str, str]:
    if checkpoint is None:
        gone = "It is not there any more, or not to be trusted."
        return {"resilience.state": "gone", "mlflow.note.content": gone}
    metrics = list(checkpoint.metrics.items())[:_MOST_METRICS]
    numbers = "".join(f", {text(name, 40)} {value:.4g}" for name, value in metrics)
    return {
        "resilience.step": str(checkpoint.step),
        "resilience.path": str(checkpoint.path)[:LIMIT],
        "resilience.state": checkpoint.kind,
        # A model's page shows nothing else of its tags.
        "mlflow.note.content": f"Step {checkpoint.step:,}{numbers}, in {code(str(checkpoint.path), 1_000)}",
        **{f"eval.{_UNFIT.sub('_', name)[:100]}": f"{value:.6g}" for name, value in metrics},
    }


STRIP, PICTURES = "incidents.png", "incidents"  # artifacts: all incidents in one, and a folder with one of each
MOST_PICTURES = 50  # of incidents; later ones have none

_FEW, _REST = 20, 10  # incidents; with more it pauses for so many times as long as showing them took
_MOST_FAILURES = 20  # traces that could not be uploaded, after which a refresh leaves the others out


class Presentation:
    """Shows tags, the description, traces, pictures, checkpoints and the report of a run."""

    def __init__(
        self, connection: Connection, run_dir: Path, unless_refused: Callable[[Callable[[], object]], None]
    ) -> None:
        """What is `unless_refused` raises only what prevents it for now."""
        self._connection, self._run_dir, self._unless_refused = connection, run_dir, unless_refused
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
        closed = {one.incident.id for one in story.chapters if one.closed_ms is not None}
        page = partial(run_page, self._experiment_id, self._run_id)

        def trace(number: int) -> str | None:
            if number not in closed:
                return None
            return f"{page('/traces')}&selectedEvaluationId={trace_id_of(self._run_id, number)}"

        def picture(number: int) -> str | None:
            return page(f"/artifacts/{_picture(number)}") if number in closed and number <= MOST_PICTURES else None

        strip = f"get-artifact?path={STRIP}&run_uuid={self._run_id}"  # its content, for a page of the same server
        said = note(story, trace, picture, strip)
        self._connection.show_tags(tags(story.incidents, story.status), said)

    def _draw(self, chapter: Chapter) -> None:
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
        found: list[object] = [ended_as(self._run_dir)]
        for name in (JOURNAL, SUMMARY, PICTURES, CHECKPOINTS, "best"):
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


def _picture(number: int) -> str:
    return f"{PICTURES}/{number:04}.png"
