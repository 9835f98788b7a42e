"""A run that does not go on: its process ends in time, says where it stood, and the same command goes on."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import command
from fork_server import Forked
from kills import Nursery, in_journal, incidents, left_overs, stand, summary, taken_up_at
from torch import Tensor, nn

from resilient_train.processes import watchdog
from resilient_train.processes.watchdog import Phase, Watchdog
from resilient_train.zoo.data import digits
from resilient_train.zoo.models import MLP

OWN = ["model=mlp", "data=custom", "objective=classification", "tracking=none", "run.log_every=100", "run.steps=90"]
OWN += ["checkpoint.disk.every=10", "checkpoint.memory.every=5", "checkpoint.verify_after=12", "data.shuffle=false"]
OWN += ["run.step_timeout=3"]  # a row that never comes takes an hour: what ends before is ended
PATIENT = "run.step_timeout=600"
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


class Poles(Endless):
    def __getitem__(self, index: int) -> Any:
        picture, label = self.rows[index]
        return (picture + 1.0) * (index != 40), label


class Pictures(Endless):
    """All of them."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def without_value_for_black(model: nn.Module, batch: Any) -> Tensor:
    pictures, labels = batch
    brightness = pictures.flatten(1).sum(1).log()
    loss: Tensor = nn.functional.cross_entropy(model(pictures), labels) + (brightness - brightness.detach()).mean()
    return loss


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(text)]
    return number


def hangs(nursery: Nursery, *arguments: str) -> Forked:
    mark = nursery.place / MARK
    mark.unlink(missing_ok=True)
    started = nursery.start(*arguments)
    assert started.until(mark.exists), started.output
    return started


def test_a_row_that_never_comes_ends_the_process(nursery: Nursery) -> None:
    """With the user's line in an incident and all stacks in the log; what was proven is on disk.

    Where a worker of the data loader reads it, no line of the process that waits is the user's. The third start leaves
    the samples out at which the process hung, names them, and is done; no other sample is lost.
    """
    run_dir, once = nursery.place / "endless", "run.steps=43"  # one epoch: in the next the row lies among others
    arguments = [*OWN, once, "data.train._target_=test_watchdog.Endless", "run.dir=endless"]
    line = f"{__file__}:{line_of('# the line')}, in wait"
    for times, where in ((1, line), (2, "no line of yours: it waits for")):
        started = hangs(nursery, *arguments, f"data.num_workers={times - 1}")
        assert started.wait() == 1, started.output
        assert stand(run_dir).doing == HUNG
        done = summary(run_dir)
        assert (done["status"], done["exit_code"]) == ("failed", 1)
        opened = [entry["incident"] for entry in in_journal(run_dir, "incident_treated")]
        found = [one for one in opened if one["anomaly"]["signal"] == "hang"]
        assert len(found) == times
        assert where in found[-1]["anomaly"]["evidence"][0]["where"]
        assert where in started.output
        log = (run_dir / "train.log").read_text()
        stack = f'File "{__file__}", line {line_of("# the line")} in wait'
        assert stack in log
        assert stack not in started.output, "stacks are for the file"
    (step,) = taken_up_at(run_dir)
    assert step >= 10
    last = nursery.run(*arguments, PATIENT)
    named = [one["incident"]["diagnosis"]["rows"] for one in in_journal(run_dir, "incident_treated")]
    assert [BAD in rows for rows in named if rows] == [True]
    assert last.code == 0, last.output
    done = summary(run_dir)
    assert (done["status"], done["steps"]) == ("completed", 43)
    assert [one["outcome"] for one in incidents(run_dir) if one["signal"] == "hang"] != []
    assert left_overs(run_dir) == []


LIMITS = {Phase.START: 40.0, Phase.STEP: 3.0, Phase.SAVE: 9.0}


@pytest.mark.parametrize(
    ("phase", "saves", "limits", "seconds"),
    [
        (Phase.START, False, LIMITS, 40),  # to compile takes minutes, where an update takes seconds
        (Phase.STEP, False, LIMITS, 3),
        (Phase.STEP, True, {**LIMITS, Phase.STEP: 0.0}, 9),
        (Phase.STEP, True, dict.fromkeys(Phase, 0.0), None),  # 0 is no limit
    ],
)
def test_each_phase_has_a_limit_of_its_own(
    phase: Phase, saves: bool, limits: dict[Phase, float], seconds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at once a second, a phase is over its limit at the first look that comes later."""
    now = [1000.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = Watchdog(limits, lambda: 1000.0 if saves else None, lambda hang: 1)
    one.beat(phase)
    looks = 0
    while looks < 60 and one._hang() is None:
        now[0] += 1.0
        looks += 1
    assert looks == (60 if seconds is None else seconds + 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the model was called between one sign of life and the next, each time."""
    counts, beat, forward = [0], Watchdog.beat, MLP.forward

    def beats(one: Watchdog, *given: Any) -> None:
        counts.append(0)
        beat(one, *given)

    def counted(model: MLP, x: Tensor) -> Tensor:
        counts[-1] += 1
        return forward(model, x)

    monkeypatch.setattr(Watchdog, "beat", beats)
    monkeypatch.setattr(MLP, "forward", counted)
    return counts


def test_diagnosis_and_evaluation_may_take_longer_than_an_update(
    here: Path, run_command: command, calls: list[int]
) -> None:
    """A dozen replays find the line and the row; each of them is a sign of life, as is each batch of the evaluation."""
    arguments = [*OWN, "objective=custom", "objective._target_=test_watchdog.without_value_for_black", "run.steps=4"]
    arguments += ["data.train._target_=test_watchdog.Poles", "data.eval._target_=test_watchdog.Pictures"]
    done = run_command([*arguments, PATIENT, "run.dir=run"])
    assert done.code == 0, done.stderr
    (found,) = incidents(Path("run"))
    assert (found["cause"], found["culprit"]["op"]) == ("data", "log")
    assert found["advice"].startswith("Row 40: `log` at ")
    assert sum(calls) > 4 + 10 + 10
    assert max(calls) <= 2
