"""The run, and that of its sweep, as MLflow shows them. All of it may be uploaded again: it goes to the same place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from resilient_train.record.endings import CHECKPOINTS, SUMMARY, ended_as, why_incomplete
from resilient_train.record.journal import JOURNAL, plain
from resilient_train.record.surroundings import around
from resilient_train.tracking.connection import KEY, Connection, cut, is_there, is_unreachable, run_page, sweep_key
from resilient_train.tracking.figure import draw_incident, draw_strip
from resilient_train.tracking.report import (
    LIMIT,
    REPORT,
    asked_of,
    code,
    link,
    note,
    report,
    rows_that_fit,
    table,
    text,
)
from resilient_train.tracking.review import run_cost
from resilient_train.tracking.story import Chapter, Checkpoint, Story, StoryReader
from resilient_train.tracking.traces import Traces, trace_id_of
from resilient_train.wording import counted, tags

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

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
        why = story.why or (story.status == "gave_up" and why_incomplete(self._run_dir, story.summary)) or ""
        loss = (story.summary or {}).get("final_loss")
        why = cut(why.partition("; the traceback is in ")[0], _LONGEST_WHY)
        brief = {"to_do": asked_of(story)[:_MOST_NAMED], "why": why, "loss": loss}
        shown = tags(story.incidents, story.status) | {_BRIEF: json.dumps(plain(brief))}
        self._connection.show_tags(self._run_id, shown, said)

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


# ---------------------------------------------------------------------------------------------------------- a sweep

PARENT = "mlflow.parentRunId"
_BRIEF = "mlflow.resilience.brief"  # what the sweep says of a job; MLflow shows no tag of such a name

_WELL = ("clean", "recovered", "observed")
_STATUSES = (*_WELL, "recovering", "preempted", "no_progress", "unrecovered", "refused", "failed", "gave_up")
_WORDS = {"unrecovered": "not recovered", "no_progress": "the loss did not fall", "preempted": "stopped on request"}
_WORDS |= {"gave_up": "gave up"}
_JOB_TITLES = ("job", "status", "incidents", "causes", "step", "recent loss", "evaluation loss", "reason")
_JOB_METRICS = ("train/step", "train/loss", "validation/loss")
_MOST_NAMED, _MOST_JOBS, _ATTEMPTS, _LONGEST_WHY = 3, 1_000, 3, 200


@dataclass(frozen=True)
class Job:
    """A job of the sweep, as its run in MLflow has it."""

    name: str
    status: str  # resilience.status; refused: it ended before it had a run
    page: str | None = None
    is_running: bool = False
    incidents: int = 0
    causes: str = ""
    metrics: tuple[float | None, ...] = (None,) * len(_JOB_METRICS)
    ended_ms: int = 0
    why: str = ""
    to_do: tuple[str, ...] = ()  # markdown

    @classmethod
    def of(cls, run: Run) -> Job:
        tags, info = run.data.tags, run.info
        status = tags.get("resilience.status", "clean")
        if info.status not in ("RUNNING", "FINISHED") and status in (*_WELL, "recovering"):
            status = "failed"  # killed, perhaps with its uploader
        incidents, brief = tags.get("resilience.incidents", ""), {}
        with contextlib.suppress(ValueError):
            brief = json.loads(tags.get(_BRIEF, "{}"))
        # The mean of the last losses, as everywhere else; while it runs, and if that is NaN, the last one.
        values = run.data.metrics | ({"train/loss": brief["loss"]} if type(brief.get("loss")) is float else {})
        return cls(
            name=str(info.run_name),
            status=status,
            page=run_page(info.experiment_id, info.run_id),
            is_running=info.status == "RUNNING",
            incidents=int(incidents) if incidents.isdecimal() else 0,
            causes=tags.get("resilience.cause", ""),
            metrics=tuple(values.get(name) for name in _JOB_METRICS),
            ended_ms=info.end_time or 0,
            why=brief.get("why", ""),
            to_do=tuple(brief.get("to_do", ())),
        )

    @property
    def is_well(self) -> bool:
        return self.status in _WELL or (self.is_running and self.status == "recovering")

    @property
    def words(self) -> str:
        """The status in words."""
        return text(_WORDS.get(self.status, self.status) + (" so far" if self.is_running else ""))


def show_sweep(connection: Connection, began: Mapping[str, object], refused: Sequence[Job]) -> str | None:
    """Show in the run of the sweep how its jobs fared; return the run's id. None if the run is of no sweep.

    `refused` are jobs that have no run. Several jobs may end at once: what is shown is read again until it is that of
    all of them.
    """
    client, experiment_id = connection.client, connection.experiment_id
    parent = client.get_run(connection.run_id).data.tags.get(PARENT)
    if parent is None or not is_there(client, parent):
        return None
    if client.get_run(parent).data.tags.get(KEY) != sweep_key(began):  # a person has put it below another run
        return None
    shown: list[Job] = []
    for _ in range(_ATTEMPTS):
        of_parent = f"tags.`{PARENT}` = '{parent}'"
        runs = client.search_runs([experiment_id], of_parent, order_by=["start_time"], max_results=_MOST_JOBS)
        jobs = [*map(Job.of, runs), *refused]
        if jobs == shown:
            break
        shown = jobs
        connection.show_tags(parent, tags_of(jobs), note_of(jobs))
        if any(one.is_running for one in jobs):
            client.update_run(parent, status="RUNNING")
        else:
            status = "FINISHED" if all(one.is_well for one in jobs) else "FAILED"
            client.set_terminated(parent, status, max(one.ended_ms for one in jobs) or None)
        ours = f"sweep {began['sweep']}"
        if str(client.get_run(parent).info.run_name).startswith(ours):  # else a person has renamed it
            # Below the child runs, which MLflow lists first, the description may be off the screen.
            client.update_run(parent, name=f"{ours}: {_verdict(jobs)}")
    return parent


def tags_of(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the tags that the list of runs shows: the worst status, all incidents and causes."""
    worst = max(_STATUSES.index(one.status) if one.status in _STATUSES else 0 for one in jobs)
    status = "failed" if _STATUSES[worst] == "refused" else _STATUSES[worst]
    found = {"resilience.status": status, "resilience.incidents": str(sum(one.incidents for one in jobs))}
    if causes := dict.fromkeys(cause for one in jobs for cause in one.causes.split(", ") if cause):
        found["resilience.cause"] = ", ".join(causes)
    return found


def _verdict(jobs: Sequence[Job]) -> str:
    so_far = " so far" if any(one.is_running for one in jobs) else ""
    if ill := sum(not one.is_well for one in jobs):
        return f"{ill:,} of {counted(len(jobs), 'job')} {'needs' if ill == 1 else 'need'} attention{so_far}"
    did = "recovered" if all(one.status == "recovered" for one in jobs) else "fared well"
    return f"all {len(jobs):,} jobs {did}{so_far}" if len(jobs) > 1 else f"the only job {did}{so_far}"


def note_of(jobs: Sequence[Job]) -> str:
    """Return the description: whether all jobs fared well, which of them to look at, and a table of all."""
    ill = [one for one in jobs if not one.is_well]
    incidents = sum(one.incidents for one in jobs)
    met = f"{counted(incidents, 'incident')} in all" if incidents else "no incidents"
    asked = Counter(thing for one in jobs for thing in one.to_do).most_common()
    do = "; ".join(thing + f" ({counted(n, 'job')})" * (len(jobs) > 1) for thing, n in asked[:_MOST_NAMED])
    do += f"; and {len(asked) - _MOST_NAMED:,} more" if len(asked) > _MOST_NAMED else ""
    if ill:
        named = [f"{link(one.name, one.page, 400)} ({one.words})" for one in ill[:_MOST_NAMED]]
        more = f" and {len(ill) - _MOST_NAMED:,} more" if len(ill) > _MOST_NAMED else ""
        do = f"look at {', '.join(named)}{more}{do and f'; {do}'}"
    verdict = _verdict(jobs)
    what = f"**Do:** {do}" if do else "Nothing to change"
    first = f"**{verdict[:1].upper()}{verdict[1:]}.** {what}; {met}."
    last = "A name leads to the page of the job, whose description begins with its verdict."
    order = [*ill, *(one for one in jobs if one.is_well)]
    titles = _JOB_TITLES if any(one.why for one in jobs) else _JOB_TITLES[:-1]
    cells = (_job_row(one)[: len(titles)] for one in order)
    rows = rows_that_fit(titles, cells, LIMIT - len(first + last) - 60)
    more = f" And {len(jobs) - len(rows):,} more, in the list of runs." if len(rows) < len(jobs) else ""
    return f"{first}\n\n{table(titles, rows)}\n\n{last}{more}\n"


def _job_row(job: Job) -> list[str]:
    values = zip(_JOB_METRICS, job.metrics, strict=True)
    return [
        link(job.name, job.page, 200),
        job.words if job.is_well else f"**{job.words}**",
        f"{job.incidents:,}",
        text(job.causes, 80),
        *("" if one is None else f"{one:,.0f}" if name.endswith("/step") else f"{one:.4g}" for name, one in values),
        text(job.why),
    ]
