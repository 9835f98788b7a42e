"""Whole runs that meet trouble, of the kinds that a user's own code, data or machine makes, and how they end."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from command import command
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from resilient_train.adapters.guard import Guard
from resilient_train.errors import GaveUp
from resilient_train.types import Outcome
from resilient_train.zoo.data import synthetic
from resilient_train.zoo.models import MLP

STEPS, AT = 200, 100  # what happens at one attempt happens at the hundredth

Rows = list[tuple[Tensor, Tensor]]
Loss = Callable[[nn.Module, list[Tensor]], Tensor]


class Program:
    """A program as somebody writes it around the guard. What goes wrong in it is a method that a subclass overrides."""

    recovery: Any = "balanced"
    run_dir: Path | None = None

    def __init__(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        self.model = MLP(hidden=[32])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, fused=True)
        self.attempts = 0
        self.guard = Guard(
            accelerator,
            accelerator.prepare(self.model),
            self.optimizer,
            data=self.rows(),
            batch_size=32,
            schedule=self.rate,
            objective=self.loss,
            recovery=self.recovery,
            run_dir=self.run_dir,
            clip=1.0,
        )

    def rows(self) -> Rows:
        return list(zip(*synthetic(rows=1024).tensors, strict=True))

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.attempts += 1
        features, labels = batch
        return F.cross_entropy(model(features), labels)

    def between_updates(self) -> None: ...

    def trained(self) -> Program:
        self.guard.steps = STEPS
        for batch in self.guard.batches():
            self.guard.step(batch)
            with torch.no_grad():
                self.between_updates()
        return self

    @torch.no_grad()
    def evaluated(self) -> float:
        features, labels = synthetic(rows=1024, split="eval").tensors
        return F.cross_entropy(self.model(features), labels).item()


class LostMoments(Program):
    def between_updates(self) -> None:
        if self.attempts == AT:
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].zero_()


def test_lost_moments_are_got_over() -> None:
    """The run makes all its steps, and learns what it would have learnt with them."""
    healthy, run = Program().trained(), LostMoments().trained()
    assert not healthy.guard.incidents
    assert run.guard.clock.step == STEPS
    assert {one.outcome for one in run.guard.incidents} == {Outcome.RECOVERED}
    assert run.evaluated() < 1.25 * healthy.evaluated()


class Poison(Program):
    """From some attempt on every batch is poison."""

    since = 80

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        return loss * (math.nan if self.attempts > self.since else 1)


def test_a_run_that_cannot_be_saved_ends_soon_and_keeps_its_last_good_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where every batch is poison it gives up within a hundred attempts, says why, and leaves what was proven good."""
    Poison.run_dir = tmp_path
    run = Poison()
    with caplog.at_level(logging.INFO, "resilient_train"), pytest.raises(GaveUp) as ended:
        run.trained()
    assert ended.value.exit_code == 3
    assert run.guard.clock.tick <= Poison.since + 100
    kept = tmp_path / "checkpoints" / "step-00000050"
    assert [kept] == list((tmp_path / "checkpoints").iterdir())
    on_disk = load_file(kept / "weights.safetensors")
    for name, weight in run.model.named_parameters():
        assert torch.equal(on_disk[name], weight)
        assert bool(weight.isfinite().all())
    (farewell,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    for words in ("gave up at step", "nonfinite_loss", "what to try next", str(kept)):
        assert words in farewell
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert len(lines) == len(run.guard.incidents)
    assert lines[-1]["outcome"] == "gave_up"


# -------------------------------------------------------------------------------------------------------- the command

LEARN = ["model=mlp", "data=synthetic", "objective=classification", "accelerate.cpu=true", "tracking=none"]
KEYS = {"id", "step", "tick", "rank", "signal", "cause", "culprit", "rows", "advice", "actions", "rewound_to"}
KEYS |= {"steps_lost", "seconds", "outcome"}


def test_a_drilled_run_writes_its_incidents_down(
    run_command: command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0, one line of incidents.jsonl with what the contract names, and the count in the summary.

    recovery=off ends at the first incident with 3, keeps the last good state and says where it is.
    """
    monkeypatch.chdir(tmp_path)
    outcome = run_command([*LEARN, "drill=nan_grad", "run.steps=100", "run.name=drilled"])
    assert outcome.code == 0, outcome.stderr
    (line,) = Path("runs/drilled/incidents.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert set(told) >= KEYS
    assert (told["step"], told["tick"], told["signal"]) == (50, 50, "nonfinite_grad")
    assert (told["actions"], told["rewound_to"], told["steps_lost"]) == ([{"remedy": "repeat"}], None, 1)
    assert told["outcome"] == "recovered"
    summary = outcome.summary("runs/drilled")
    assert summary["incidents"] == {"total": 1, "recovered": 1, "by_cause": {told["cause"]: 1}}
    assert (summary["status"], summary["steps"], summary["ticks"], summary["steps_lost"]) == ("completed", 100, 101, 1)
    assert "nonfinite_grad" in outcome.stdout

    outcome = run_command([*LEARN, "drill=nan_grad", "recovery=off", "run.steps=100", "run.name=stopped"])
    assert outcome.code == 3
    summary = outcome.summary("runs/stopped")
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("gave_up", 3, 25)
    assert summary["incidents"]["total"] == 1
    said = outcome.stdout + outcome.stderr
    for words in ("gave up at step 50", "nonfinite_grad", "runs/stopped/checkpoints/step-00000025"):
        assert words in said


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
    for batch in guard.batches():
        guard.step(batch)
    guard.settle()
    quarantined = [one for one in guard.incidents if one.decision.actions[0].remedy == "quarantine"]
    assert {row for one in quarantined for row in one.diagnosis.rows} == set(bad)
    assert all(one.anomaly.step > 32 and "in earlier updates" in one.diagnosis.advice for one in quarantined)
    assert guard.clock.tick - guard.clock.step <= 4 * len(bad)
