"""What the Trainer's own recipes do under the guard: rows without a label, and the best weights loaded at the end."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import resilient_train


class Rows(Dataset[Any]):
    def __init__(self, count: int = 16) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 6, 4, generator=generator)
        self.labels = self.x.argmax(-1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "labels": self.labels[row]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.line(x).flatten(0, 1), labels.flatten())}


def trained(
    output: Path, model: nn.Module, train: Any, evaluated: Any = None, *, guarded: bool = True, **more: Any
) -> Trainer:
    usual = {"learning_rate": 0.3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(output), **{**usual, **more})
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=evaluated)
    if guarded:
        resilient_train.hf.guard(trainer)
    trainer.train()
    return trainer


def weights(trainer: Trainer) -> list[Any]:
    return [one.tolist() for one in trainer.model.parameters()]


def told(output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary = json.loads((output / "resilient_train" / "summary.json").read_text())
    lines = (output / "resilient_train" / "incidents.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def test_a_row_without_a_label_accuses_no_line_of_the_caller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its loss is 0/0 in the library, its gradient 0: it passes, and the run has the bits of the unguarded one."""
    gc.unfreeze()  # frozen.py hides functions of libraries, and one is patched here
    tokens = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": one, "labels": one if row != 5 else one * 0 - 100} for row, one in enumerate(tokens)]
    found = []
    for guarded in (False, True):
        torch.manual_seed(0)
        size: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, **size))
        usual: dict[str, Any] = {"per_device_train_batch_size": 1, "num_train_epochs": 2, "learning_rate": 1e-3}
        found.append(weights(trained(tmp_path / str(guarded), model, rows, guarded=guarded, **usual)))
    assert found[0] == found[1]
    _, [incident] = told(tmp_path / "True")
    assert Path(incident["culprit"]["file"]).name == "loss_utils.py"
    assert incident["outcome"] == "recovered"
    assert Path(__file__).name not in caplog.text


def test_the_best_weights_at_the_end_leave_no_incident_open(tmp_path: Path) -> None:
    """A run that ends soon after an incident, and loads the weights of its best evaluation, says that it recovered."""
    rows, evaluated = Rows(32), Rows(8)
    rows.x[17] = math.nan
    evaluated.labels = 3 - evaluated.labels  # the best evaluation is the first
    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    usual: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 1, **often}
    trainer = trained(tmp_path, Net(), rows, evaluated, load_best_model_at_end=True, **usual)
    assert trainer.state.best_global_step == 2
    summary, [incident] = told(tmp_path)
    assert incident["outcome"] == "recovered"
    assert summary["incidents"]["recovered"] == summary["incidents"]["total"] == 1
