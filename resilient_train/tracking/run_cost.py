"""What a run has cost: the share of time that made progress, and what the rest went into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from resilient_train.record.outbox import BEGAN, METRICS, OUTBOX, entries
from resilient_train.tracking.story import Story

PARTS_S = {"detect": "diagnosis_s", "diagnose": "diagnosis_s", "decide": "diagnosis_s", "rewind": "rewinds_s"}


def run_cost(run_dir: Path, story: Story) -> tuple[dict[str, float], int]:
    """Return the cost as metrics, and when it was known, from the outbox and the journal; none without timed updates.

    A step makes progress once: to make it again after a rewind or a restart does not count. Processes are timed from
    their first update on. `rest_s` went into saving, evaluation, waiting for data, and steps that were lost.
    """
    progress_s = wall_s = 0.0
    furthest, began, last = 0.0, None, 0
    for entry, _ in entries(run_dir / OUTBOX):
        if entry is None:
            continue
        if entry["kind"] == BEGAN:
            began = last = entry["at"]
        if began is not None:
            wall_s += max(0, entry["at"] - last) / 1000
            last = entry["at"]
        values = entry.get("values") if entry["kind"] == METRICS else None
        if isinstance(values, Mapping) and _is_number(values.get("step")) and values["step"] > furthest:
            if _is_number(values.get("step_ms")):
                progress_s += (values["step"] - furthest) * values["step_ms"] / 1000
            furthest = values["step"]
    if not progress_s or not wall_s:
        return {}, last
    spent = {"diagnosis_s": 0.0, "rewinds_s": 0.0}
    for phase in (phase for chapter in story.chapters for phase in chapter.phases):
        if (part := PARTS_S.get(phase.name)) is not None:
            spent[part] += (phase.ended_ms - phase.began_ms) / 1000
    progress_s = min(progress_s, wall_s)
    spent["rest_s"] = max(0.0, wall_s - progress_s - sum(spent.values()))
    costs = {"progress_share": progress_s / wall_s, "total_s": wall_s, "steps_lost": story.tick - story.step, **spent}
    return {f"wall_time/{name}": value for name, value in costs.items()}, last


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
