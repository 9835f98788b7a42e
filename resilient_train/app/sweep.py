"""The jobs of a sweep: a table of them when all have ended, and where MLflow shows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_train.app.terminal import Page
from resilient_train.errors import ConfigError
from resilient_train.record.endings import SUMMARY, read_ending
from resilient_train.record.outbox import OUTBOX
from resilient_train.tracking.review import where_to_look
from resilient_train.tracking.store import UploadCursor, ui_command
from resilient_train.tracking.tracker import TrackingConfig, note_refused_jobs


@dataclass(frozen=True)
class Job:
    """A job of a sweep that has ended."""

    name: str
    exit_code: int
    directory: Path | None  # None if it was refused before it had one
    tracking: TrackingConfig | None = None  # None if its configuration was refused


def show_end(jobs: Sequence[Job], home: Path) -> None:
    """Print a table of the jobs and where MLflow shows the sweep; `home` holds its database if no store is named."""
    print_table(jobs)
    tracked = [one for one in jobs if one.tracking and one.directory and (one.directory / OUTBOX).is_file()]
    if not tracked:
        return
    last = tracked[-1]
    assert last.directory is not None
    assert last.tracking is not None
    if refused := [one.name for one in jobs if _summary_of(one) is None]:
        note_refused_jobs(last.tracking, last.directory, home, refused)
    cursor = UploadCursor(last.directory)
    where, page = cursor.where(), Page()
    if where is not None and cursor.sweep_url is not None:
        for lines in where_to_look(ui_command(where[0]), cursor.sweep_url):
            for line in lines.splitlines():
                page.line(line.strip(), indent=2 * line.startswith(" "))


def print_table(jobs: Sequence[Job]) -> None:
    """Print how each job ended, with its loss and its incidents."""
    rows = [("job", "status", "loss", "incidents", "directory")]
    for job in jobs:
        summary = _summary_of(job)
        if summary is None:
            status = "refused" if job.exit_code == ConfigError.exit_code else "failed"
            rows.append((job.name, f"{status} ({job.exit_code})", "", "", ""))
            continue
        evaluated, incidents = summary.get("eval") or {}, summary.get("incidents") or {}
        loss = evaluated.get("loss", summary.get("final_loss"))
        total, cured = incidents.get("total", 0), incidents.get("recovered", 0)
        counts = f"{total} ({cured} recovered)" if total else "0"
        status = str(summary.get("verdict") or summary.get("status"))
        status += f" ({job.exit_code})" if job.exit_code else ""
        shown = f"{loss:.4g}" if isinstance(loss, float) else ""
        rows.append((job.name, status, shown, counts, os.path.relpath(str(job.directory))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    page = Page()
    page.line("the sweep has ended:")
    for row in rows:
        page.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), indent=2)


def _summary_of(job: Job) -> dict[str, Any] | None:
    return read_ending(job.directory, SUMMARY) if job.directory is not None else None
