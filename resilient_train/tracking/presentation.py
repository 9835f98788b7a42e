"""The run as MLflow shows it, from the run directory. All of it may be uploaded again: it goes to the same place."""

from __future__ import annotations

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
from resilient_train.tracking.connection import (
    Connection,
    is_refusal,
    is_unreachable,
    root_cause,
    tag_batches,
    with_note,
)
from resilient_train.tracking.figure import draw_incident, draw_strip
from resilient_train.tracking.report import REPORT, code, note, report, text
from resilient_train.tracking.review import run_cost
from resilient_train.tracking.store import artifact_page, artifact_source, trace_page
from resilient_train.tracking.story import Chapter, Checkpoint, Story, StoryReader
from resilient_train.tracking.traces import Traces, trace_id_of
from resilient_train.wording import tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

KEY = "resilience"  # of the view, in its link
NAME = "How the runs fare"
LAST_GOOD, BEST = "last-good", "best"

_TAG = f"mlflow.sharedViewState.{KEY}"
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
_MOST, _MOST_METRICS = 7_900, 20  # characters of a tag, and how many


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
        tags = _tags(checkpoint)
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


def _tags(checkpoint: Checkpoint | None) -> dict[str, str]:
    if checkpoint is None:
        gone = "It is not there any more, or not to be trusted."
        return {"resilience.state": "gone", "mlflow.note.content": gone}
    metrics = {f"eval.{_UNFIT.sub('_', name)[:100]}": f"{value:.6g}" for name, value in checkpoint.metrics.items()}
    numbers = "".join(f", {text(name, 40)} {value:.4g}" for name, value in list(checkpoint.metrics.items())[:5])
    return {
        "resilience.step": str(checkpoint.step),
        "resilience.path": str(checkpoint.path)[:_MOST],
        "resilience.state": checkpoint.kind,
        # A model's page shows nothing else of its tags.
        "mlflow.note.content": f"Step {checkpoint.step:,}{numbers}, in {code(str(checkpoint.path), 1_000)}",
        **dict(list(metrics.items())[:_MOST_METRICS]),
    }


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
