"""The run of a sweep in MLflow: it holds the jobs, and says how they fared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient_train.tracking.connection import KEY, Connection, is_there, sweep_key, tag_batches, with_note
from resilient_train.tracking.report import link, table, text
from resilient_train.tracking.store import run_page
from resilient_train.wording import counted

if TYPE_CHECKING:
    from mlflow.entities import Run

PARENT = "mlflow.parentRunId"

LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000
_WELL = ("clean", "recovered", "observed")
_STATUSES = (*_WELL, "recovering", "preempted", "no_progress", "unrecovered", "refused", "failed", "gave_up")
_WORDS = {"unrecovered": "not recovered", "no_progress": "the loss did not fall", "preempted": "stopped on request"}
_WORDS |= {"gave_up": "gave up"}
_TITLES = ("job", "status", "incidents", "causes", "step", "loss", "evaluation loss")
_METRICS = ("train/step", "train/loss", "validation/loss")
_MOST_NAMED, _MOST_JOBS, _ATTEMPTS = 3, 1_000, 3


@dataclass(frozen=True)
class _Job:
    """A job of the sweep, as its run in MLflow has it."""

    name: str
    status: str  # resilience.status, or refused
    is_running: bool = False
    incidents: int = 0
    causes: str = ""
    drills: str = ""
    last_incident: str = ""
    page: str | None = None
    metrics: tuple[float | None, ...] = (None,) * len(_METRICS)
    ended_ms: int = 0

    @property
    def is_well(self) -> bool:
        return self.status in _WELL or (self.is_running and self.status == "recovering")


def show_sweep(connection: Connection, began: Mapping[str, object], refused: Sequence[str] = ()) -> str | None:
    """Show in the run of the sweep how its jobs fared; return the run's id. None if the run is of no sweep.

    `refused` names jobs that ended before they had a run. Several jobs may end at once: what is shown is read again
    until it is that of all of them.
    """
    client, experiment_id = connection.client, connection.experiment_id
    parent = client.get_run(connection.run_id).data.tags.get(PARENT)
    if parent is None or not is_there(client, parent):
        return None
    if client.get_run(parent).data.tags.get(KEY) != sweep_key(began):  # a person has put it below another run
        return None
    shown: list[_Job] = []
    for _ in range(_ATTEMPTS):
        of_parent = f"tags.`{PARENT}` = '{parent}'"
        runs = client.search_runs([experiment_id], of_parent, order_by=["start_time"], max_results=_MOST_JOBS)
        jobs = [*map(_job, runs), *(_Job(name, "refused") for name in refused)]
        if jobs == shown:
            break
        shown = jobs
        said = with_note(client.get_run(parent).data.tags, _note(jobs)) | _tags(jobs)
        for batch in tag_batches(said):
            client.log_batch(parent, *batch)
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


def _job(run: Run) -> _Job:
    tags, info = run.data.tags, run.info
    status = tags.get("resilience.status", "clean")
    if info.status not in ("RUNNING", "FINISHED") and status in (*_WELL, "recovering"):
        status = "failed"  # killed, perhaps with its uploader
    counted_as = tags.get("resilience.incidents", "")
    return _Job(
        name=str(info.run_name),
        status=status,
        is_running=info.status == "RUNNING",
        incidents=int(counted_as) if counted_as.isdecimal() else 0,
        causes=tags.get("resilience.cause", ""),
        drills=tags.get("resilience.drill", ""),
        last_incident=tags.get("resilience.last_incident", ""),
        page=run_page(info.experiment_id, info.run_id),
        metrics=tuple(run.data.metrics.get(name) for name in _METRICS),
        ended_ms=info.end_time or 0,
    )


def _worst(jobs: Sequence[_Job]) -> _Job:
    """Return the first of the jobs that fared worst."""
    return max(jobs, key=lambda one: _STATUSES.index(one.status) if one.status in _STATUSES else 0)


def _tags(jobs: Sequence[_Job]) -> dict[str, str]:
    """Return the tags that the list of runs shows: the worst status, all incidents, and the last one of the worst."""
    worst = _worst(jobs)
    status = "failed" if worst.status == "refused" else worst.status
    found = {"resilience.status": status, "resilience.incidents": str(sum(one.incidents for one in jobs))}
    for name, lists in (("cause", [one.causes for one in jobs]), ("drill", [one.drills for one in jobs])):
        if words := dict.fromkeys(word for some in lists for word in some.split(", ") if word):
            found[f"resilience.{name}"] = ", ".join(words)
    if (of := worst if worst.last_incident else next((one for one in jobs if one.last_incident), None)) is not None:
        found["resilience.last_incident"] = f"{of.name}: {of.last_incident}"
    return found


def _verdict(jobs: Sequence[_Job]) -> str:
    """Say in a few words whether all jobs fared well."""
    so_far = " so far" if any(one.is_running for one in jobs) else ""
    if ill := sum(not one.is_well for one in jobs):
        return f"{ill:,} of {counted(len(jobs), 'job')} {'needs' if ill == 1 else 'need'} attention{so_far}"
    words = {1: "the only job", 2: "both jobs"}.get(len(jobs), f"all {len(jobs):,} jobs")
    return f"{words} fared well{so_far}"


def _note(jobs: Sequence[_Job]) -> str:
    """Return the description: whether all jobs fared well, which of them to look at, and a table of all."""
    ill = [one for one in jobs if not one.is_well]
    incidents = sum(one.incidents for one in jobs)
    met = f"{counted(incidents, 'incident')} in all" if incidents else "no incidents"
    if ill:
        named = [f"{link(one.name, one.page, 400)} ({_status(one)})" for one in ill[:_MOST_NAMED]]
        more = f" and {len(ill) - _MOST_NAMED:,} more" if len(ill) > _MOST_NAMED else ""
        do = f"**Do:** look at {', '.join(named)}{more}"
    else:
        do = "Nothing to change"
    verdict = _verdict(jobs)
    first = f"**{verdict[:1].upper()}{verdict[1:]}.** {do}; {met}."
    last = "A name leads to the page of the job, whose description begins with its verdict."
    if any(one.status == "refused" for one in jobs):
        last += " A job that was refused has none: the output of the sweep says why."
    rows: list[Sequence[str]] = []
    order = [*ill, *(one for one in jobs if one.is_well)]
    for one in order:
        rows.append([*_row(one)])
        if len(first + last + table(_TITLES, rows)) + 60 > LIMIT:
            del rows[-1]
            break
    more = f" And {len(jobs) - len(rows):,} more, in the list of runs." if len(rows) < len(jobs) else ""
    return f"{first}\n\n{table(_TITLES, rows)}\n\n{last}{more}\n"


def _row(job: _Job) -> Iterator[str]:
    yield link(job.name, job.page, 200)
    yield _status(job) if job.is_well else f"**{_status(job)}**"
    yield f"{job.incidents:,}" if job.status != "refused" else ""
    yield text(job.causes, 80)
    for name, value in zip(_METRICS, job.metrics, strict=True):
        yield "" if value is None else f"{value:,.0f}" if name.endswith("/step") else f"{value:.4g}"


def _status(job: _Job) -> str:
    words = _WORDS.get(job.status, job.status)
    return text(f"{words} so far" if job.is_running else words)
