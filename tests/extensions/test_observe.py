"""recovery=observe: everything is checked, diagnosed and reported. In tests/core a run ends as a plain loop does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import SAVING, command
from guarded import is_finite, often
from kills import incidents as listed
from kills import kinds
from tasks import READ, Ends, Running, Scenario, Task, readings, squared

from resilient_train.command import incidents

ROW = 17


def with_nan() -> Any:
    data = readings()
    data.tensors[0][ROW, 0] = math.nan
    return data


def observed(
    run_dir: Path | None, task: Task, factor: Callable[[int], float] = lambda tick: 1.0, **more: Any
) -> Running:
    def spoil(run: Running, model: Any, batch: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * factor(run.guard.clock.tick + 1)

    return Running(Scenario(task, Ends(), spoil, guard={"recovery": "observe", **more}), run_dir).train()


def test_weights_with_nan_make_one_incident_and_no_replays(tmp_path: Path) -> None:
    """All losses are NaN from the first update of a bad row on: the others count into its incident."""
    calls = list[int]()

    def counted(model: Any, batch: Any) -> torch.Tensor:
        calls.append(1)
        return squared(model, batch)

    run = observed(tmp_path, READ._replace(steps=400, data=with_nan, loss=counted))
    [incident] = run.guard.incidents
    assert not is_finite(run.model)
    assert incident.diagnosis.rows == (ROW,)
    assert incident.further == 400 - incident.anomaly.step
    assert len(calls) < 400 + 100
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) < 60
    [told] = listed(tmp_path)
    assert [told[name] for name in ("outcome", "further", "actions")] == [
        "observed",
        incident.further,
        [{"remedy": "observe"}],
    ]


@pytest.mark.parametrize("checks", ["default", "off"])
def test_no_state_after_the_damage_is_verified(checks: str, tmp_path: Path) -> None:
    """The last one is a candidate, next to the newest that was verified before."""
    nan_at_40: Callable[[int], float] = lambda tick: math.nan if tick == 40 else 1.0  # noqa: E731
    observed(tmp_path, READ._replace(steps=120), nan_at_40, checks=checks, memory=often(5), disk=5, verify_after=5)
    assert kinds(tmp_path)[120] == "candidate"
    assert max(step for step, kind in kinds(tmp_path).items() if kind == "verified") < 40


def test_trouble_that_keeps_returning_is_one_incident_and_after_quiet_a_new_one() -> None:
    """Further anomalies count into the incident until 50 updates were healthy; then the next one is diagnosed."""
    often = [*range(30, 90, 10)]
    run = observed(None, READ._replace(steps=240), lambda tick: 1e6 if tick in (*often, 180) else 1.0)
    assert [(one.anomaly.step, one.further) for one in run.guard.incidents] == [(30, len(often) - 1), (180, 0)]
    assert all(one.anomaly.landed for one in run.guard.incidents)


def test_the_command_completes_and_says_that_it_only_observed(
    run_command: command, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 0 at the planned end, with weights of NaN, and says that it was only observed."""
    run = [*SAVING, "run.dir=run", "run.steps=60", "drill=nan_batch", "drill.at=[30]", "recovery=observe"]
    done = run_command(run)
    assert done.code == 0, done.stderr
    assert "incident 1: observed only; the same fault 30 more times" in done.stdout
    assert "1 incident (1 data), 1 observed only" in done.stdout
    assert "recovered" not in done.stdout
    written = done.summary("run")
    assert (written["status"], written["verdict"], written["steps"]) == ("completed", "observed", 60)
    assert incidents.main(["run"]) == 0
    assert "Observed only" in capsys.readouterr().out
