"""The run of a sweep in MLflow: it holds the jobs, and says how they fared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient_train.tracking.connection import KEY, Connection, is_there, sweep_key
from resilient_train.tracking.report import LIMIT, link, rows_that_fit, table, text
from resilient_train.tracking.store import run_page
from resilient_train.wording import counted

if TYPE_CHECKING:
    from mlflow.entities import Run

PARENT = "mlflow.parentRunId"

_WELL = ("clean", "recovered", "observed")
_STATUSES = (*_WELL, "recovering", "preempted", "no_progress", "unrecovered", "failed", "gave_up")
_WORDS = {"unrecovered": "not recovered", "no_progress": "the loss did not fall", "preempted": "stopped on request"}
_WORDS |= {"gave_up": "gave up"}
_TITLES = ("job", "status", "incidents", "causes", "step", "loss", "evaluation loss")
_METRICS = ("train/step", "train/loss", "validation/loss")
_MOST_NAMED, _MOST_JOBS, _ATTEMPTS = 3, 1_000, 3


@dataclass(frozen=True)
class Job:
    """A job of the sweep, as its run in MLflow has it."""

    name: str
    status: str  # resilience.status
    page: str
    is_running: bool = False
    incidents: int = 0
    causes: str = ""
    metrics: tuple[float | None, ...] = (None,) * len(_METRICS)
    ended_ms: int = 0

    @classmethod
    def of(cls, run: Run) -> Job:
        tags, info = run.data.tags, run.info
        status = tags.get("resilience.status", "clean")
        if info.status not in ("RUNNING", "FINISHED") and status in (*_WELL, "recovering"):
            status = "failed"  # killed, perhaps with its uploader
        incidents = tags.get("resilience.incidents", "")
        return cls(
            name=str(info.run_name),
            status=status,
            page=run_page(info.experiment_id, info.run_id),
            is_running=info.status == "RUNNING",
            incidents=int(incidents) if incidents.isdecimal() else 0,
            causes=tags.get("resilience.cause", ""),
            metrics=tuple(run.data.metrics.get(name) for name in _METRICS),
            ended_ms=info.end_time or 0,
        )

    @property
    def is_well(self) -> bool:
        return self.status in _WELL or (self.is_running and self.status == "recovering")

    @property
    def words(self) -> str:
        """The status in words."""
        return text(_WORDS.get(self.status, self.status) + (" so far" if self.is_running else ""))


def show_sweep(connection: Connection, began: Mapping[str, object]) -> str | None:
    """Show in the run of the sweep how its jobs fared; return the run's id. None if the run is of no sweep.

    Several jobs may end at once: what is shown is read again until it is that of all of them.
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
        jobs = [*map(Job.of, runs)]
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
    found = {"resilience.status": _STATUSES[worst], "resilience.incidents": str(sum(one.incidents for one in jobs))}
    if causes := dict.fromkeys(cause for one in jobs for cause in one.causes.split(", ") if cause):
        found["resilience.cause"] = ", ".join(causes)
    return found


def _verdict(jobs: Sequence[Job]) -> str:
    """Say in a few words whether all jobs fared well."""
    so_far = " so far" if any(one.is_running for one in jobs) else ""
    if ill := sum(not one.is_well for one in jobs):
        return f"{ill:,} of {counted(len(jobs), 'job')} {'needs' if ill == 1 else 'need'} attention{so_far}"
    return f"all {len(jobs):,} jobs fared well{so_far}" if len(jobs) > 1 else f"the only job fared well{so_far}"


def note_of(jobs: Sequence[Job]) -> str:
    """Return the description: whether all jobs fared well, which of them to look at, and a table of all."""
    ill = [one for one in jobs if not one.is_well]
    incidents = sum(one.incidents for one in jobs)
    met = f"{counted(incidents, 'incident')} in all" if incidents else "no incidents"
    do = "Nothing to change"
    if ill:
        named = [f"{link(one.name, one.page, 400)} ({one.words})" for one in ill[:_MOST_NAMED]]
        more = f" and {len(ill) - _MOST_NAMED:,} more" if len(ill) > _MOST_NAMED else ""
        do = f"**Do:** look at {', '.join(named)}{more}"
    verdict = _verdict(jobs)
    first = f"**{verdict[:1].upper()}{verdict[1:]}.** {do}; {met}."
    last = "A name leads to the page of the job, whose description begins with its verdict."
    order = [*ill, *(one for one in jobs if one.is_well)]
    rows = rows_that_fit(_TITLES, map(_row, order), LIMIT - len(first + last) - 60)
    more = f" And {len(jobs) - len(rows):,} more, in the list of runs." if len(rows) < len(jobs) else ""
    return f"{first}\n\n{table(_TITLES, rows)}\n\n{last}{more}\n"


def _row(job: Job) -> list[str]:
    values = zip(_METRICS, job.metrics, strict=True)
    return [
        link(job.name, job.page, 200),
        job.words if job.is_well else f"**{job.words}**",
        f"{job.incidents:,}",
        text(job.causes, 80),
        *("" if one is None else f"{one:,.0f}" if name.endswith("/step") else f"{one:.4g}" for name, one in values),
    ]
