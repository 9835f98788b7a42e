"""The jobs of a sweep: their names, and a table of them when all have ended."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilient_train.app.page import Page
from resilient_train.errors import ConfigError
from resilient_train.record.endings import SUMMARY, read_ending
from resilient_train.secrets import masked_override


@dataclass(frozen=True)
class Job:
    """A job of a sweep that has ended."""

    name: str
    exit_code: int
    directory: Path | None  # None if it was refused before it had one


def name_of(overrides: Sequence[str]) -> str:
    """Name a job by what the sweep varies, such as `seed=1, lr=0.001`.

    Hydra passes all overrides to each job; those that the command line has literally are the same for all jobs. In a
    process of another launcher the command line is unknown, and all of them are named.
    """
    plain = [re.sub(r"\\(.)", r"\1", word) for word in overrides]  # Hydra has escaped them
    swept = [word for word in plain if word not in sys.argv] or plain
    pairs = [masked_override(word).partition("=") for word in swept]
    short = [key.rpartition(".")[2] for key, _, _ in pairs]
    keys = [last if short.count(last) == 1 else key for last, (key, _, _) in zip(short, pairs, strict=True)]
    return ", ".join(f"{key}={value}" for key, (_, _, value) in zip(keys, pairs, strict=True))


def print_table(jobs: Sequence[Job]) -> None:
    """Print how each job ended, with its loss and its incidents."""
    rows = [("job", "status", "loss", "incidents", "directory")]
    for job in jobs:
        summary = read_ending(job.directory, SUMMARY) if job.directory is not None else None
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
