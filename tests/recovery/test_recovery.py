"""What a drilled run of the command writes down, and rows that spoil an update again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command import command
from guarded import accused, trained
from kills import incidents

from resilient_train.loop.guard import Guard

# -------------------------------------------------------------------------------------------------------- the command

LEARN = ["model=mlp", "data=synthetic", "objective=classification", "accelerate.cpu=true", "tracking=none"]


@pytest.mark.usefixtures("here")
def test_a_drilled_run_writes_its_incidents_down(run_command: command) -> None:
    """Exit code 0, one line of incidents.jsonl, and the count in the summary."""
    outcome = run_command([*LEARN, "drill=nan_grad", "run.steps=100", "run.name=drilled"])
    assert outcome.code == 0, outcome.stderr
    (told,) = incidents(Path("runs/drilled"))
    assert (told["step"], told["tick"], told["signal"]) == (50, 50, "nonfinite_grad")
    assert (told["actions"], told["rewound_to"], told["steps_lost"]) == ([{"remedy": "repeat"}], None, 1)
    assert told["outcome"] == "recovered"
    summary = outcome.summary("runs/drilled")
    assert summary["incidents"] == {"total": 1, "recovered": 1, "by_cause": {told["cause"]: 1}}
    assert (summary["status"], summary["steps"], summary["ticks"], summary["steps_lost"]) == ("completed", 100, 101, 1)
    assert "nonfinite_grad" in outcome.stdout


def test_ordinary_rows_that_do_it_again_and_again_are_put_aside() -> None:
    """With each of them a whole batch was lost in every epoch, for the rest of the run. Not the first times."""
    bad, numbers = (40, 171), torch.Generator().manual_seed(1)
    x, groups = torch.randn(256, 4, generator=numbers), torch.randint(5, (256,), generator=numbers)
    groups[list(bad)] = 7  # no measure, and so not compared with that of other rows

    def objective(model: Any, batch: Any) -> torch.Tensor:
        weights = torch.where(batch[1] == 7, 1e6, 1.0)
        loss: torch.Tensor = (weights * (model(batch[0])[:, 0] - batch[2]).square()).mean()
        return loss

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    data = torch.utils.data.TensorDataset(x, groups, x.sum(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(None, model, optimizer, data=data, batch_size=16, steps=120, objective=objective)
    trained(guard).settle()
    quarantined = [one for one in guard.incidents if one.decision.actions[0].remedy == "quarantine"]
    assert {*accused(quarantined)} == set(bad)
    assert all(one.anomaly.step > 32 and one.diagnosis.advice[0]["fact"] == "rows_again" for one in quarantined)
    assert guard.clock.tick - guard.clock.step <= 4 * len(bad)
