"""Averages of the weights that trainers and their callbacks keep: one NaN row, a kill and a resume leave no trace."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from group import alone
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

import resilient_train

ROWS, BATCH, BAD = 96, 8, 41
STEPS, SAVED, KILLED = 36, 24, 28  # the row is met, then a checkpoint after two epochs, then the kill
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Rows(Dataset[Any]):
    def __init__(self, *, is_named: bool, bad: int | None = None) -> None:
        self.is_named, self.x = is_named, torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.sum(1) > 0).long()
        if bad is not None:
            self.x[bad, 2] = math.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return {"x": self.x[row], "labels": self.y[row]} if self.is_named else (self.x[row], self.y[row])


class Net(nn.Module):
    """Neither dropout nor shuffling: after a resume both trainers draw other numbers than without a kill."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layers(x), labels)}


def numbers(*modules: Any) -> list[float]:
    return [
        value for module in modules for one in module.state_dict().values() for value in one.double().flatten().tolist()
    ]


def is_killed(step: int, killed_at: int) -> None:
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)


class Averaging(TrainerCallback):  # type: ignore[misc]  # mypy runs without transformers
    """As users write it: the whole `state_dict`, after each step, saved beside each checkpoint."""

    def __init__(self, model: nn.Module, killed_at: int) -> None:
        self.average, self.killed_at = copy.deepcopy(model), killed_at

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        is_killed(state.global_step, self.killed_at)
        for mine, its in zip(self.average.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(0.9 * mine + 0.1 * its)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        torch.save(self.average.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / "average.pt")

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step:
            saved = torch.load(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "average.pt")
            self.average.load_state_dict(saved)


def hugging_face(place: Path, quarantine: Path | None = None, killed_at: int = -1, resumes: bool = False) -> Any:
    model = Net()
    callback = Averaging(model, killed_at)
    args = TrainingArguments(
        *(str(place),),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16=True,
        max_steps=STEPS,
        seed=1,
        save_steps=SAVED,
        eval_strategy="epoch",
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
    )
    data, evaluation = Rows(is_named=True, bad=BAD), Rows(is_named=True)
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=evaluation, callbacks=[callback])
    resilient_train.hf.guard(trainer, run_dir=place / "incidents", quarantine=quarantine)
    trainer.train(resume_from_checkpoint=resumes)
    return numbers(model, callback.average), trainer.state.global_step


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, killed_at: int) -> None:
        super().__init__()
        self.net, self.killed_at = Net(), killed_at

    def training_step(self, batch: Any, number: int) -> Tensor:
        is_killed(self.trainer.global_step, self.killed_at)
        loss: Tensor = self.net(*batch)["loss"]
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", self.net(*batch)["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watched(EMAWeightAveraging):  # type: ignore[misc]
    """Shows the average, and the weights before it takes their place at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = numbers(pl_module, self._average_model)
        super().on_train_end(trainer, pl_module)


def of_lightning(place: Path, quarantine: Path | None = None, killed_at: int = -1, resumes: bool = False) -> Any:
    lightning.seed_everything(1, verbose=False)
    average = Watched(decay=0.9)
    saver = ModelCheckpoint(place / "files", save_top_k=-1, filename="{step}")
    guarded = resilient_train.lightning.Guarded(run_dir=place / "incidents", quarantine=quarantine)
    trainer = lightning.Trainer(
        **{"max_steps": STEPS, "callbacks": [average, saver, guarded], "default_root_dir": place, **QUIET},
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
    )
    data = DataLoader(Rows(is_named=False, bad=BAD), BATCH)
    path = place / "files" / f"step={SAVED}.ckpt" if resumes else None
    trainer.fit(Module(killed_at), data, DataLoader(Rows(is_named=False), 32), ckpt_path=path)
    return average.seen, trainer.global_step


@pytest.mark.parametrize("program", [hugging_face, of_lightning])
def test_a_nan_row_and_a_kill_leave_no_trace_in_an_average(program: Any, tmp_path: Path) -> None:
    """Weights and average are bit for bit those of the same run with that row in quarantine from the start."""
    assert alone(program, tmp_path / "mine", None, KILLED)[0] == -signal.SIGKILL
    quarantine = tmp_path / "mine/incidents/quarantine.json"
    assert [one["row"] for one in json.loads(quarantine.read_text())["rows"]] == [BAD]
    code, (resumed, step) = alone(program, tmp_path / "mine", None, -1, True)
    assert (code, step) == (0, STEPS)
    code, (control, step) = alone(program, tmp_path / "control", quarantine)
    assert (code, step) == (0, STEPS)
    assert all(map(math.isfinite, control))
    assert resumed == control
