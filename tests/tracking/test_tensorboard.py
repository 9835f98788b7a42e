"""A run in TensorBoard: its numbers as curves, its incidents as texts."""

from __future__ import annotations

from pathlib import Path

from command import command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_the_command_shows_a_run(run_command: command, here: Path) -> None:
    """Next to MLflow or without it; in the run directory."""
    learn = ["model=mlp", "data=synthetic", "objective=classification", "accelerate.cpu=true", "tracking=none"]
    words = [*learn, "drill=nan_grad", "run.steps=100", "run.name=shown", "tensorboard=true"]
    outcome = run_command(words)
    assert outcome.code == 0, outcome.stderr
    shown = EventAccumulator(str(here / "runs/shown/tensorboard")).Reload()
    tags = shown.Tags()
    assert {"loss", "grad_norm", "lr"} <= {*tags["scalars"]}
    losses = shown.Scalars("loss")
    assert [one.step for one in losses][:2] == [10, 20]
    assert losses[-1].value < losses[0].value
    assert {"incident 1 opened/text_summary", "incident 1 closed/text_summary"} <= {*tags["tensors"]}
