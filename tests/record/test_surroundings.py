"""What was measured around an incident is in the run directory, for a person to open; and when each part of it was."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from guarded import REWIND, At, adamw, guarded, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient_train.adapters.guard import Guard
from resilient_train.errors import GaveUp
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.surroundings import AFTER, BEFORE, Phases, Point, Surroundings, around
from resilient_train.tracking.story import Chapter, Phase, read_story
from resilient_train.types import Anomaly, Cause, Decision, Diagnosis, Incident, Outcome, Signal, Vitals

pytestmark = pytest.mark.usefixtures("careless")


def vitals(tick: int, step: int | None = None, refused: Signal | None = None) -> Vitals:
    """What an update measures that is healthy, or was refused."""
    loss = math.nan if refused is Signal.NONFINITE_LOSS else 1 / tick
    return Vitals(tick, tick if step is None else step, refused is None, loss, 0.25 * tick, 1e-3, refused=refused)


def incident(number: int, tick: int) -> Incident:
    anomaly = Anomaly(Signal.NONFINITE_LOSS, tick, tick, tick - 1, "", landed=False)
    return Incident(number, anomaly, Diagnosis(Cause.UNKNOWN, ""), Decision())


def fed(surroundings: Surroundings, ticks: Iterable[int]) -> None:
    for tick in ticks:
        surroundings.add(vitals(tick))


def ticks(run_dir: Path, number: int) -> list[int]:
    return [point.tick for point in around(run_dir, number)]


def recovered(one: Incident) -> Incident:
    return dataclasses.replace(one, outcome=Outcome.RECOVERED)


# The table.


def test_a_person_can_read_the_table(tmp_path: Path) -> None:
    """A name for each column, a row for each attempt, and why one of them was refused."""
    surroundings = Surroundings(tmp_path)
    surroundings.add(vitals(1))
    surroundings.add(vitals(2, 1, Signal.NONFINITE_LOSS))
    surroundings.add(vitals(3, 1)._replace(accepted=False, overflowed=True, loss=1.5, grad_norm=math.inf))
    surroundings.begin(incident(3, 3))
    assert (tmp_path / "incidents" / "0003.csv").read_text() == (
        "tick,step,loss,grad_norm,lr,accepted,refused\n"
        "1,1,1,0.25,0.001,1,\n"
        "2,1,nan,0.5,0.001,0,nonfinite_loss\n"
        "3,1,1.5,inf,0.001,0,overflow\n"
    )
    healthy, _, overflowed = around(tmp_path, 3)
    assert healthy == Point(1, 1, 1.0, 0.25, 1e-3, True)
    assert overflowed == Point(3, 1, 1.5, math.inf, 1e-3, False, "overflow")


def test_a_hundred_updates_before_and_after_are_in_it(tmp_path: Path) -> None:
    """Those before at once, those after when there are a hundred of them; the memory of the rest is let go."""
    surroundings = Surroundings(tmp_path)
    fed(surroundings, range(1, 1001))
    surroundings.begin(incident(1, 1000))
    assert ticks(tmp_path, 1) == [*range(1000 - BEFORE, 1001)]
    fed(surroundings, range(1001, 1000 + AFTER))
    assert ticks(tmp_path, 1) == [*range(1000 - BEFORE, 1001)]
    fed(surroundings, range(1000 + AFTER, 3000))
    assert ticks(tmp_path, 1) == [*range(1000 - BEFORE, 1001 + AFTER)]
    assert len(surroundings._points) == BEFORE + 1 + AFTER


def test_what_followed_is_written_when_no_more_will_come(tmp_path: Path) -> None:
    """At the outcome, the next incident or the end, whatever comes first; from then on the table stays as it is."""
    ends: dict[str, Callable[[Surroundings], None]] = {
        "its outcome is known": lambda one: one.end(recovered(incident(1, 50))),
        "the run ends": lambda one: one.write_last(),
        "another incident": lambda one: one.begin(incident(2, 70)),
    }
    for name, end in ends.items():
        (run_dir := tmp_path / name).mkdir()
        surroundings = Surroundings(run_dir)
        fed(surroundings, range(1, 51))
        surroundings.begin(incident(1, 50))
        fed(surroundings, range(51, 71))
        assert ticks(run_dir, 1) == [*range(1, 51)]
        end(surroundings)
        assert ticks(run_dir, 1) == [*range(1, 71)]
        surroundings.end(recovered(incident(1, 50)))  # of the older one, it ends nothing of the newest
        fed(surroundings, range(71, 500))
        assert ticks(run_dir, 1) == [*range(1, 71)]
    assert ticks(tmp_path / "another incident", 2) == [*range(1, 71 + AFTER)]


def test_a_resumed_run_goes_on_with_the_table(tmp_path: Path) -> None:
    """The process before has left it in the middle; what nobody wrote down is lacking, and nothing is there twice."""
    before = Surroundings(tmp_path)
    fed(before, range(1, 51))
    before.begin(incident(1, 50))
    fed(before, range(51, 61))
    before.write_last()
    (tmp_path / "incidents" / ".0001.csv.resilient-tmp").write_text("of a kill")
    after = Surroundings(tmp_path, [incident(1, 50)])
    fed(after, range(65, 200))
    assert ticks(tmp_path, 1) == [*range(1, 61), *range(65, 51 + AFTER)]
    assert [file.name for file in (tmp_path / "incidents").iterdir()] == ["0001.csv"]


def test_a_table_of_a_closed_incident_is_not_gone_on_with(tmp_path: Path) -> None:
    """But what it holds lies before the next incident, too."""
    before = Surroundings(tmp_path)
    fed(before, range(1, 51))
    before.begin(incident(1, 50))
    after = Surroundings(tmp_path, [recovered(incident(1, 50))])
    fed(after, range(51, 56))
    assert ticks(tmp_path, 1) == [*range(1, 51)]
    after.begin(incident(2, 55))
    assert ticks(tmp_path, 2) == [*range(1, 56)]


def test_nothing_is_written_where_nothing_was_measured(tmp_path: Path) -> None:
    """An incident before the first update has no table until something follows it; other ranks have none at all."""
    surroundings = Surroundings(tmp_path)
    surroundings.begin(incident(1, 0))
    assert around(tmp_path, 1) == ()
    assert list(tmp_path.iterdir()) == []
    fed(surroundings, [1, 2])
    surroundings.write_last()
    assert ticks(tmp_path, 1) == [1, 2]
    elsewhere = Surroundings(None)
    fed(elsewhere, range(1, 300))
    elsewhere.begin(incident(1, 250))
    elsewhere.write_last()


def test_a_disk_that_does_not_take_it_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on; once there is room the next table is written again."""
    (tmp_path / "incidents").write_text("in the way")
    surroundings = Surroundings(tmp_path)
    fed(surroundings, range(1, 51))
    for number in (1, 2, 3):
        surroundings.begin(incident(number, 50))
    assert len(caplog.messages) == 1
    assert "incident 1" in caplog.messages[0]
    (tmp_path / "incidents").unlink()
    surroundings.write_last()
    assert ticks(tmp_path, 3) == [*range(1, 51)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_of_a_damaged_table_what_can_be_read_is_read(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happened to some of its bytes, wherever it was cut: rows in order, at most three of them lost."""
    surroundings = Surroundings(tmp_path)
    fed(surroundings, range(1, 51))
    surroundings.begin(incident(1, 50))
    file = tmp_path / "incidents" / "0001.csv"
    whole, content = around(tmp_path, 1), bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        assert whole[: len(around(tmp_path, 1))] == around(tmp_path, 1)
        return
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    read = around(tmp_path, 1)
    assert [point.tick for point in read] == sorted({point.tick for point in read})
    assert len(set(whole) & set(read)) >= 1


def test_what_is_no_table_holds_nothing(tmp_path: Path) -> None:
    """A directory in its place, nothing, a flood of bytes, rows that are none."""
    file = tmp_path / "incidents" / "0001.csv"
    file.mkdir(parents=True)
    assert around(tmp_path, 1) == ()
    file.rmdir()
    for content in (b"", b"\xff" * 2**21, b"1,1,1,1,1,2,\n1,x,1,1,1,1,\n,,,,,,\n" + b"9" * 9999):
        file.write_bytes(content)
        assert around(tmp_path, 1) == ()


# Parts and their times.


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


# Real runs.


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


def test_a_rewind_is_in_the_table_and_has_its_times(tmp_path: Path) -> None:
    """Ticks go on, steps go back, the refused update is there; and each part of the treatment follows the last one."""
    started = time.time_ns() // 1_000_000
    guard = run(tmp_path, Slow("loss", 60), REWIND, 100)
    guard.close()
    (one,) = guard.incidents
    assert one.rewound_to == 25
    points = around(tmp_path, 1)
    assert [point.tick for point in points] == [*range(1, 136)], "to the end: it counts from where the run had been"
    assert [point.step for point in points] == [*range(1, 60), 59, *range(26, 101)]
    (refused,) = [point for point in points if not point.accepted]
    assert (refused.tick, refused.refused) == (60, "nonfinite_loss")
    assert math.isinf(refused.loss)
    assert all(math.isfinite(point.loss) and point.lr > 0 for point in points if point.accepted)

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


def test_other_remedies_are_a_part_of_their_own(tmp_path: Path) -> None:
    """All of them together; and of two incidents soon after one another each has its own table and its own resume."""
    ladder = {"ladders": {"default": [{"do": ["tighten_clip", "rewind", "lower_lr", "skip"], "strikes": None}]}}
    guard = run(tmp_path, At("loss", 40, 70), ladder, 80)
    guard.close()
    first, second = chapters(tmp_path)
    for chapter in (first, second):
        assert [phase.name for phase in chapter.phases] == [
            *("detect", "diagnose", "decide", "rewind", "remedy", "resume"),
        ]
    ticks_of = [one.anomaly.tick for one in guard.incidents]
    assert around(tmp_path, 1)[-1].tick == ticks_of[1], "what followed the first is known up to the second"
    assert around(tmp_path, 2)[0].tick == max(1, ticks_of[1] - BEFORE)


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
    assert [point.accepted for point in around(tmp_path, 1)] == [True] * 29 + [False]


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
    found = [point.tick for point in around(tmp_path, 1)]
    assert found == [*range(1, found[-1] + 1)]
    assert found[-1] > 60
