"""Intervals of snapshots and checkpoints that follow from their cost."""

from __future__ import annotations

import logging

import pytest

from resilient_train.intervals import AUTO, Interval, Intervals

STEP = 0.1  # seconds of an ordinary update


class Run:
    """A run with a clock of its own, in which snapshots and checkpoints cost what the test says."""

    def __init__(self, memory: int | str, disk: int | str, *, copy: float, save: float, writes: int = 3) -> None:
        self.time, self.tick, self.saving = 0.0, 0, 0
        self.copy, self.save, self.writes = copy, save, writes
        self.noted: list[tuple[int, int, int]] = []
        self.memory = Interval("checkpoint.memory.every", memory, begins_at=25, least=5, most=1_000)
        self.disk = Interval("checkpoint.disk.every", disk, begins_at=200, least=50, most=20_000)
        self.intervals = Intervals(*(self.memory, self.disk, lambda choose: choose(), self.note), now=lambda: self.time)

    def note(self, *what: int) -> None:
        self.noted.append(what)  # type: ignore[arg-type]

    def go(self, updates: int) -> None:
        for _ in range(updates):
            self.tick += 1
            has_copied = self.memory.steps > 0 and self.tick % self.memory.steps == 0
            self.time += STEP + self.copy * has_copied + (self.save / self.writes) * (self.saving > 0)
            self.saving = max(0, self.saving - 1)
            if self.disk.steps and self.tick % self.disk.steps == 0:
                self.saving = self.writes
            self.intervals.updated(self.tick, has_copied=has_copied, is_saving=self.saving > 0)


@pytest.mark.parametrize(("copy", "steps"), [(0.0, 5), (0.02, 20), (0.025, 25), (0.4, 400), (30.0, 1_000)])
def test_snapshots_come_as_often_as_one_percent_of_the_time_allows(copy: float, steps: int) -> None:
    """Within the bounds, and with a note of tick and interval wherever they change."""
    run = Run(AUTO, 0, copy=copy, save=0.0)
    run.go(12_000)
    assert run.memory.steps == pytest.approx(steps, rel=0.25)
    assert run.disk.steps == 0
    noted = [memory for _, memory, _ in run.noted]
    assert noted[-1:] == [run.memory.steps][: len(noted)]
    assert all(new <= 2 * old for old, new in zip([25, *noted], noted, strict=False)), "one measurement may mislead"


@pytest.mark.parametrize(("save", "steps"), [(0.03, 50), (1.2, 1_200)])
def test_checkpoints_come_as_often_as_one_percent_of_the_time_allows(save: float, steps: int) -> None:
    """What counts is what the updates during a save take longer, not how long the disk takes."""
    run = Run(25, AUTO, copy=0.001, save=save)
    run.go(20_000)
    assert run.disk.steps == pytest.approx(steps, rel=0.25)
    assert run.memory.steps == 25


def test_an_interval_of_a_number_stays_what_it_is() -> None:
    """Nothing is agreed on or noted."""
    run = Run(25, 200, copy=0.4, save=2.0)
    run.go(3_000)
    assert (run.memory.steps, run.disk.steps, run.noted) == (25, 200, [])


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_dear_interval_is_said_once_with_a_number_that_is_not(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Only where it has cost so much that it matters."""
    run = Run(25, 200, copy=0.4 if kind == "memory" else 0.0, save=2.0 if kind == "disk" else 0.0)
    with caplog.at_level(logging.WARNING, "resilient_train"):
        run.go(500)
        assert not caplog.messages
        run.go(8_000)
    said = {"memory": "checkpoint.memory.every=25 costs 14 % of the time; 400 would cost 1 %"}
    said["disk"] = "checkpoint.disk.every=200 costs 9 % of the time; 2000 would cost 1 %"
    assert caplog.messages == [said[kind]]


def test_what_an_incident_takes_is_no_cost_of_a_copy() -> None:
    """An update after one that was not healthy is not measured."""
    run = Run(AUTO, 0, copy=0.025, save=0.0)
    for _ in range(40):
        run.go(24)
        run.tick += 1
        run.time += 60.0
    assert run.memory.steps == 25
