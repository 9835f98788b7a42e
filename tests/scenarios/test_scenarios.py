"""A new scenario is one more row of the table in tasks.py.

What it comes to is compared with a twin in which nothing strikes. Where an update only has to leave nothing behind,
tests/core/test_guard.py has the row.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from guarded import accused
from kills import kinds, summary
from safetensors.torch import load_file
from tasks import SCENARIOS, Running, plain_loss, twin

from resilient_train.data.trees import weights_sha256
from resilient_train.ground.errors import GaveUp
from resilient_train.ground.wording import say


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_ends_as_the_table_says(name: str, tmp_path: Path) -> None:
    """Each column of `Ends` is one fact about its incidents, what was done, or what the run has learned."""
    row = SCENARIOS[name]
    task, ends = row.task, row.ends
    run = Running(row, tmp_path / "run")
    guard, first = run.guard, run.final_loss() if ends.first is not None else 0.0
    if ends.exit_code:
        with pytest.raises(GaveUp):
            run.train()
        guard.close()
    else:
        run.train()
        assert guard.clock.step == task.steps
    met = [one for one in guard.incidents if one.diagnosis.cause != "process"]
    assert ends.causes is None or {str(one.diagnosis.cause) for one in met} == {*ends.causes.split()}
    assert ends.signals is None or {str(one.anomaly.signal) for one in met} == {*ends.signals.split()}
    done = {action.remedy for one in met for action in one.decision.actions}
    assert ends.remedies is None or done == {*ends.remedies.split()}
    assert {str(one.outcome) for one in met} <= {*ends.outcomes.split()}
    assert ends.op is None or ends.op in {one.diagnosis.culprit.op for one in met if one.diagnosis.culprit}
    if ends.rows is not None:
        rows = {*accused(met)}
        assert rows <= ends.rows
        assert len(rows) >= len(ends.rows) - len(ends.rows) // 6
    for one in met[:1]:
        assert ends.says in say(one.anomaly.evidence) + say(one.diagnosis.advice)
    assert ends.rewinds is None or sum(one.rewound_to is not None for one in met) <= ends.rewinds
    knobs = guard._controls.knobs
    assert not ends.is_accepted or all(one.is_accepted for one in met)
    assert ends.is_touched or (guard.samples.skipped, knobs.rate, knobs.clip) == ([], 1.0, 1.0)
    written = summary(tmp_path / "run")
    assert ends.verdict in (None, written["verdict"])
    assert written["exit_code"] == ends.exit_code
    assert ends.kind in (None, kinds(tmp_path / "run").get(task.steps))
    assert ends.first is None or run.final_loss() < ends.first * first
    if ends.loss is not None:
        weights, loss = twin(row.twin or task, row.hands_over, guard.clock.step)
        if ends.loss == 0:
            assert weights_sha256(guard.state) == weights
        else:
            assert run.final_loss() < ends.loss * loss
    assert "expect" not in (row.guard or {}) or guard.clock.tick <= task.steps + 1
    if ends.breaks:
        assert not math.isfinite(plain_loss(task))
        assert done & {"limit_update", "tighten_clip"}
        assert row.hands_over or knobs.rate == 1.0
        assert guard.clock.tick < 1.5 * task.steps
    if ends.exit_code and ends.loss == 0:  # the state that it has returned to is the one on disk
        assert guard.clock.step < 150
        (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
        on_disk = load_file(kept / "weights.safetensors")
        assert all(torch.equal(on_disk[name], weight) for name, weight in run.model.named_parameters())
