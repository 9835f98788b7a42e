"""What snapshots and checkpoints cost."""

from __future__ import annotations

import logging

import pytest

from resilient_train.copy_costs import CopyCosts

STEP = 0.1  # seconds of an ordinary update


class Run:
    """A run with a clock of its own, in which snapshots and checkpoints cost what the test says."""

    def __init__(self, memory: int, disk: int, *, copy: float, save: float, writes: int = 3) -> None:
        self.time, self.tick, self.saving = 0.0, 0, 0
        self.memory, self.disk, self.copy, self.save, self.writes = memory, disk, copy, save, writes
        self.costs = CopyCosts(memory, disk, now=lambda: self.time)

    def go(self, updates: int) -> None:
        for _ in range(updates):
            self.tick += 1
            has_copied = self.tick % self.memory == 0
            self.time += STEP + self.copy * has_copied + (self.save / self.writes) * (self.saving > 0)
            self.saving = max(0, self.saving - 1)
            if self.tick % self.disk == 0:
                self.saving = self.writes
            self.costs.updated(self.tick, has_copied=has_copied, is_saving=self.saving > 0)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_dear_interval_is_said_once_with_a_number_that_is_not(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Only where it has cost so much that it matters."""
    run = Run(25, 200, copy=0.4 if kind == "memory" else 0.0, save=2.0 if kind == "disk" else 0.0)
    with caplog.at_level(logging.WARNING, "resilient_train"):
        run.go(500)
        assert not caplog.messages
        run.go(8_000)
    said = {"memory": "memory.every=25 costs 14 % of the time; 400 would cost 1 %"}
    said["disk"] = "disk.every=200 costs 9 % of the time; 2000 would cost 1 %"
    assert caplog.messages == [said[kind]]


def test_what_an_incident_takes_is_no_cost_of_a_copy(caplog: pytest.LogCaptureFixture) -> None:
    """An update after one that was not healthy is not measured."""
    run = Run(25, 10_000, copy=0.025, save=0.0)
    for _ in range(40):
        run.go(24)
        run.tick += 1
        run.time += 60.0
    assert not caplog.messages
