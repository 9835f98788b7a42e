"""What a guarded Trainer of transformers evaluates, calls its best state, and logs, when it is struck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import hf_programs as programs
import torch
from kills import summary
from test_hf import Stream, incidents, of_a_stream, rows, trained, weights
from transformers import Trainer, TrainerCallback

import resilient_train

EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "per_device_eval_batch_size": 64,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # so that damage looks like the best state
}


def evaluations(trainer: Any) -> list[float]:
    return [row["eval_loss"] for row in rows(trainer) if "eval_loss" in row]


class Flip(TrainerCallback):  # type: ignore[misc]  # mypy runs without transformers
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == programs.AT:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e3


def test_damage_that_a_scan_finds_is_neither_evaluated_nor_saved(tmp_path: Path) -> None:
    """The weights change just before both: the metric and the checkpoint are those of a run in which they do not."""
    more = EVALUATED | {"eval_steps": programs.AT, "save_steps": programs.AT, "steps": programs.AT}
    healthy = trained("vit", tmp_path / "healthy", guarded=False, **more)
    struck = resilient_train.hf.guard(programs.trainer("vit", tmp_path / "struck", **more))
    struck.add_callback(Flip())
    struck.train()
    assert [incident["signal"] for incident in incidents(tmp_path / "struck")] == ["weights_jump"]
    assert evaluations(struck) == evaluations(healthy)
    assert struck.state.best_metric == healthy.state.best_metric
    file = f"checkpoint-{programs.AT}/model.safetensors"
    assert (tmp_path / "struck" / file).read_bytes() == (tmp_path / "healthy" / file).read_bytes()


def test_the_best_weights_at_the_end_leave_no_incident_open(tmp_path: Path) -> None:
    """A run that ends soon after an incident, and loads the weights of its best evaluation, says that it recovered."""
    more = EVALUATED | {"eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    trainer = trained("vit", tmp_path, "bad_rows", steps=24, **more)
    assert trainer.state.best_global_step == 4
    written = summary(tmp_path / "resilient_train")
    assert [incident["outcome"] for incident in incidents(tmp_path)] == ["recovered"] * 2
    assert written["incidents"]["recovered"] == written["incidents"]["total"] == 2
    assert written["eval"] == {"loss": pytest.approx(evaluations(trainer)[-1])}


def test_an_update_that_is_left_out_is_logged_with_0(tmp_path: Path) -> None:
    """Its NaN is in no row, nor in the sum that the rows after it are made of."""
    trainer = of_a_stream(tmp_path, Stream(bad=100), logging_steps=1, steps=15, save_strategy="no")
    trainer.train()
    losses = {row["step"]: row["loss"] for row in rows(trainer) if "loss" in row}
    assert [step for step, loss in losses.items() if loss == 0] == [13]  # the update that has the bad row
    assert all(0 <= loss < 5 for loss in losses.values())


class Norms(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.read: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.read.append(sum(float(weight.grad.norm()) for weight in model.parameters() if weight.grad is not None))


def test_a_callback_before_the_step_reads_the_gradients(tmp_path: Path) -> None:
    """Once for each step of the trainer, also if an update is refused and retried."""
    found: dict[bool, list[float]] = {}
    for is_guarded in (False, True):
        fault = "nan_grad" if is_guarded else ""
        trainer = programs.trainer("vit", tmp_path / f"{is_guarded}", fault, steps=programs.AT + 4)
        trainer.add_callback(norms := Norms())
        (resilient_train.hf.guard(trainer) if is_guarded else trainer).train()
        found[is_guarded] = norms.read
    refused = found[True].pop(programs.AT)
    assert refused != refused
    del found[False][programs.AT]
    assert found[True] == found[False]


class Counted(programs.Struck):
    def compute_loss(self, *given: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = Trainer.compute_loss(self, *given, **more)
        loss *= 1 + 0.01 * self.state.global_step + self.state.epoch
        return loss


def test_what_a_rewind_undoes_is_repeated_with_the_counts_of_its_time(tmp_path: Path) -> None:
    def trained(fault: str) -> Any:
        trainer = programs.trainer("vit", tmp_path / fault, fault, steps=40)
        trainer.__class__ = Counted
        resilient_train.hf.guard(trainer).train()
        return trainer

    struck = trained("bit_flip")
    [incident] = incidents(tmp_path / "bit_flip")
    assert incident["steps_lost"] > 5
    assert weights(struck) == weights(trained(""))
    assert struck.state.global_step == 40


class Fail(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("of mine")


def test_the_end_of_a_run_names_what_the_trainer_resumes_by(tmp_path: Path, info: pytest.LogCaptureFixture) -> None:
    """Its checkpoints are not the guard's: that there is none of those, and where a new run would go, helps nobody."""
    failing = resilient_train.hf.guard(programs.trainer("vit", tmp_path, steps=4, save_strategy="steps", save_steps=2))
    failing.add_callback(Fail())
    with pytest.raises(RuntimeError, match="of mine"):
        failing.train()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert any("by `resume_from_checkpoint=True`" in one for one in info.messages)
    assert not any("newest checkpoint" in one or "starts a new run" in one for one in info.messages)
