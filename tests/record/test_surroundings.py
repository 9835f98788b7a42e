"""When each part of an incident was is in the journal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from guarded import REWIND, At, adamw, guarded, trained

from resilient_train.adapters.guard import Guard
from resilient_train.errors import GaveUp
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.surroundings import Phases
from resilient_train.tracking.story import Chapter, Phase, read_story

pytestmark = pytest.mark.usefixtures("careless")


def test_parts_follow_one_another() -> None:
    """Two remedies in a row are one part; what is not over yet is drawn out; the update that began before is detect."""
    began = time.monotonic() - 2.0
    phases = Phases(began)
    for name in ("diagnose", "remedy", "remedy", "rewind"):
        phases.ended(name)
    time.sleep(0.01)
    phases.extend_last()
    names, begins, ends = zip(*phases.timed, strict=True)
    assert names == ("detect", "diagnose", "remedy", "rewind")
    assert begins[1:] == ends[:-1]
    assert ends[0] - begins[0] >= 2000
    assert ends[-1] - begins[-1] >= 9
    assert abs(ends[-1] / 1000 - time.time()) < 60
    assert Phases().timed == []


class Slow(At):
    """Its update takes a while before it is spoiled."""

    def __call__(self, model: Any, batch: Any) -> Any:
        if self.count + 1 in self.calls:
            time.sleep(0.05)
        return super().__call__(model, batch)


def chapters(run_dir: Path) -> tuple[Chapter, ...]:
    return read_story(run_dir).chapters


def length(phase: Phase) -> int:
    return phase.ended_ms - phase.began_ms


def run(run_dir: Path, objective: Any, recovery: Any, steps: int) -> Guard:
    return trained(guarded(adamw, objective, recovery=recovery, run_dir=run_dir), steps)


def test_a_rewind_has_its_times(tmp_path: Path) -> None:
    """Each part of the treatment follows the last one."""
    started = time.time_ns() // 1_000_000
    guard = run(tmp_path, Slow("loss", 60), REWIND, 100)
    guard.close()
    (one,) = guard.incidents
    assert one.rewound_to == 25
    (chapter,) = chapters(tmp_path)
    assert [phase.name for phase in chapter.phases] == ["detect", "diagnose", "decide", "rewind", "resume"]
    ends = [phase.ended_ms for phase in chapter.phases]
    assert ends == sorted(ends)
    detect, diagnose, *_, rewind, resume = chapter.phases
    assert started <= detect.began_ms
    assert length(detect) >= 49, "the update that gave it away is part of it"
    assert detect.ended_ms == diagnose.began_ms
    assert chapter.treated_ms is not None
    assert rewind.ended_ms <= chapter.treated_ms + 5, "two clocks"
    assert resume.began_ms == chapter.treated_ms
    assert chapter.closed_ms is not None
    assert resume.ended_ms <= chapter.closed_ms


def test_giving_up_has_its_times_too(tmp_path: Path) -> None:
    """It is never treated: its closing tells the parts there were, and going back to what is left is the last one."""
    guard = guarded(adamw, At("loss", 30), recovery="off", run_dir=tmp_path)
    with pytest.raises(GaveUp):
        trained(guard, 60)
    guard.ended()
    (chapter,) = chapters(tmp_path)
    assert chapter.treated_ms is None
    assert chapter.closed_ms is not None
    assert [phase.name for phase in chapter.phases] == ["detect", "diagnose", "decide", "rewind"]


def test_the_start_that_follows_tells_when_the_run_went_on(tmp_path: Path) -> None:
    """Nobody saw an update accepted after the incident: the resume is as long as nothing went on."""
    guard = guarded(adamw, At("loss", 30), incidents=IncidentLog(tmp_path), resume=True)
    for batch in guard.batches(100):
        guard.step(batch)
        if guard.incidents:
            break
    guard.leave()
    guard.let_go()
    (chapter,) = chapters(tmp_path)
    assert [phase.name for phase in chapter.phases] == ["detect", "diagnose", "decide", "remedy"]
    time.sleep(0.1)
    again = trained(guarded(adamw, At("loss"), incidents=IncidentLog(tmp_path), resume=True), 100)
    again.close()
    (chapter,) = chapters(tmp_path)
    resume = chapter.phases[-1]
    assert (resume.name, resume.began_ms) == ("resume", chapter.treated_ms)
    assert length(resume) >= 99
