"""A run that does not go on: its process ends in time, says where it stood, and the same command goes on."""

from __future__ import annotations

import ctypes
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from kills import Nursery, Started, in_journal, incidents, left_overs, stand, summary, taken_up_at
from torch import Tensor, nn

from resilient_train.zoo.data import digits

OWN = ["model=mlp", "data=custom", "objective=classification", "tracking=none", "run.log_every=100", "run.steps=90"]
OWN += ["checkpoint.disk.every=10", "checkpoint.memory.every=5", "checkpoint.verify_after=12", "data.shuffle=false"]
LIMIT_S = 2
OWN += [f"run.step_timeout={LIMIT_S}"]
HUNG = 3  # in the file `progress`

BAD = 1305  # a row of the 41st update
MARK = "hanging"  # a file that is there as soon as it hangs


class Endless:
    """Digits, of which one is never read: a file system that does not answer."""

    def __init__(self) -> None:
        self.rows: Any = digits("train")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            self.wait()
        return self.rows[index]

    def wait(self) -> None:
        Path(MARK).touch()
        time.sleep(3600)  # the line


class Greedy(Endless):
    """The same in C, by code that keeps Python's lock: no other thread has its turn any more."""

    def __getitem__(self, index: int) -> Any:
        if index % 32 == 0:
            time.sleep(0.03)  # so that the watchdog has looked at an update before
        return super().__getitem__(index)

    def wait(self) -> None:
        Path(MARK).touch()
        ctypes.PyDLL(None).sleep(3600)


class GreedySoon(Greedy):
    """In the second update already."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(BAD if index == 40 else index)


class EndlessAtOnce(Endless):
    """No row is ever read."""

    def __getitem__(self, index: int) -> Any:
        self.wait()


class Poles(Endless):
    """Pictures, of which one is black."""

    def __getitem__(self, index: int) -> Any:
        picture, label = self.rows[index]
        return (picture + 1.0) * (index != 40), label


_met: list[int] = []  # how often the black picture was there, and every batch since


def slow_to_diagnose(model: nn.Module, batch: Any) -> Tensor:
    """Has no value for a black picture; once it has met it, every replay takes a while."""
    pictures, labels = batch
    if _met or bool((pictures.flatten(1).sum(1) == 0).any()):
        _met.append(1)
        time.sleep(LIMIT_S / 6)
    brightness = pictures.flatten(1).sum(1).log()
    loss: Tensor = nn.functional.cross_entropy(model(pictures), labels) + (brightness - brightness.detach()).mean()
    return loss


def slow_to_evaluate(model: nn.Module, batch: Any) -> Tensor:
    """Every batch takes a while; all of them together take longer than an update may."""
    if not model.training:
        time.sleep(0.25)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def line_of(text: str) -> int:
    """The number of the line of this file that ends so."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(text)]
    return number


def hangs(nursery: Nursery, *arguments: str) -> Started:
    """Start it, and wait until it hangs."""
    mark = nursery.place / MARK
    mark.unlink(missing_ok=True)
    started = nursery.start(*arguments)
    assert started.until(mark.exists), started.output
    return started


def test_a_row_that_never_comes_ends_the_process(nursery: Nursery) -> None:
    """In time, with the user's line in an incident and all stacks in the log; what was proven is on disk."""
    run_dir = nursery.place / "endless"
    arguments = [*OWN, "data.train._target_=test_watchdog.Endless", "run.dir=endless"]
    place = f"{__file__}:{line_of('# the line')}"
    for times in (1, 2):
        started = hangs(nursery, *arguments)
        began = time.monotonic()
        assert started.wait() == 1, started.output
        assert time.monotonic() - began < LIMIT_S + 5
        assert stand(run_dir).doing == HUNG
        done = summary(run_dir)
        assert (done["status"], done["exit_code"]) == ("failed", 1)
        opened = [entry["incident"] for entry in in_journal(run_dir, "incident_opened")]
        found = [one for one in opened if one["signal"] == "hang"]
        assert len(found) == times
        assert f"{place}, in wait" in found[-1]["evidence"]
        assert f"{place}, in wait" in started.output
        log = (run_dir / "train.log").read_text()
        assert "thread MainThread" in log
        assert "time.sleep(3600)" in log
        assert "time.sleep(3600)" not in started.output, "stacks are for the file"
    (step,) = taken_up_at(run_dir)
    assert step >= 10


@pytest.mark.parametrize("kind", ["Endless"])
def test_samples_that_hang_twice_are_passed_over(kind: str, nursery: Nursery) -> None:
    """The third start leaves them out, names them, and is done; no other sample is lost."""
    run_dir = nursery.place / f"twice-{kind}"
    once = "run.steps=43"  # one epoch: in the next the row lies among others
    arguments = [*OWN, once, f"data.train._target_=test_watchdog.{kind}", f"run.dir={run_dir.name}"]
    for _ in range(2):
        assert hangs(nursery, *arguments).wait() == 1
    last = nursery.run(*arguments)
    named = [one["incident"] for one in in_journal(run_dir, "incident_opened") if one["incident"]["rows"]]
    assert [BAD in one["rows"] for one in named] == [True]
    assert last.code == 0, last.output
    done = summary(run_dir)
    assert (done["status"], done["steps"]) == ("completed", 43)
    assert [one["outcome"] for one in incidents(run_dir) if one["signal"] == "hang"] != []
    assert left_overs(run_dir) == []


def test_code_that_keeps_pythons_lock_is_ended_from_c(nursery: Nursery) -> None:
    """No Python runs any more; the stack of the main thread is in the log all the same."""
    run_dir, arguments = nursery.place / "greedy", [*OWN, "data.train._target_=test_watchdog.Greedy", "run.dir=greedy"]
    started = hangs(nursery, *arguments)
    began = time.monotonic()
    assert started.wait() == 1, started.output
    assert time.monotonic() - began < LIMIT_S + 5
    log = (run_dir / "train.log").read_text()
    assert re.search(rf'File "{re.escape(__file__)}", line {line_of("sleep(3600)")} in wait', log)


def test_also_right_behind_the_first_update(nursery: Nursery) -> None:
    """From where on the limit is that of an update."""
    started = hangs(nursery, *OWN, "data.train._target_=test_watchdog.GreedySoon", "run.dir=soon")
    assert started.has_ended(LIMIT_S + 8)


def test_the_start_has_a_limit_of_its_own(nursery: Nursery) -> None:
    """It lasts until the first update is through: to compile takes minutes, where an update takes seconds."""
    arguments = [*OWN, "data.train._target_=test_watchdog.EndlessAtOnce", "run.dir=at_once"]
    started = hangs(nursery, *arguments, "run.start_timeout=5", "run.step_timeout=1")
    began = time.monotonic()
    assert started.wait() == 1, started.output
    assert 2.5 < time.monotonic() - began < 5 + 5
    assert "no start was finished for" in started.output


def test_a_request_to_stop_ends_a_hang_after_the_grace(nursery: Nursery) -> None:
    """With 75, long before the limit of an update."""
    run_dir = nursery.place / "asked"
    arguments = [*OWN, "data.train._target_=test_watchdog.Endless", "run.dir=asked", "run.grace=1"]
    started = hangs(nursery, *arguments, "run.step_timeout=600")
    began = time.monotonic()
    started.strike(signal.SIGTERM)
    assert started.wait() == 75, started.output
    assert time.monotonic() - began < 1 + 5
    done = summary(run_dir)
    assert (done["status"], done["exit_code"]) == ("preempted", 75)
    assert "it was asked to stop, and no step was finished" in started.output
    assert [entry for entry in in_journal(run_dir, "incident_opened") if entry["incident"]["signal"] == "hang"] == []


def test_what_gets_on_slowly_does_not_hang(nursery: Nursery) -> None:
    """An evaluation of many batches is longer than the limit; each of them is not."""
    arguments = ["model=mlp", "data=digits", "objective=custom", "tracking=none", "run.steps=5", "run.dir=slow"]
    arguments += ["objective._target_=test_watchdog.slow_to_evaluate", "run.step_timeout=2"]
    done = nursery.run(*arguments)
    assert done.code == 0, done.output


def test_a_diagnosis_may_take_longer_than_an_update(nursery: Nursery) -> None:
    """A dozen replays find the row; each of them is within the limit, and the run goes on."""
    arguments = [*OWN, "objective=custom", "objective._target_=test_watchdog.slow_to_diagnose", "run.steps=4"]
    done = nursery.run(*arguments, "data.train._target_=test_watchdog.Poles", "run.dir=diagnosed")
    assert done.code == 0, done.output
    (found,) = incidents(nursery.place / "diagnosed")
    assert (found["cause"], found["culprit"]["op"]) == ("operation", "log")
    assert "Row 40 of the data" in found["advice"]
    assert found["seconds"] > LIMIT_S


def test_without_limits_nothing_is_ended(nursery: Nursery) -> None:
    """0 is no limit."""
    arguments = [*OWN, "data.train._target_=test_watchdog.Endless", "run.dir=unlimited", "run.step_timeout=0"]
    started = hangs(nursery, *arguments)
    assert not started.has_ended(3.0)
    started.strike(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
