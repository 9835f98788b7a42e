"""What a drilled run of the command writes down."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import command
from kills import incidents

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
