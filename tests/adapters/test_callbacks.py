"""Callbacks of a user under the guard: what they set, read and change is as without it, and so is an earlier error."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from guarded import is_finite
from kills import incidents, summary
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

import resilient_train
from resilient_train import Guard
from resilient_train.data.trees import sha256

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]
USUAL: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Rows(Dataset[Any]):
    scale = 1.0

    def __init__(self, *, is_named: bool, bad: int | None = None) -> None:
        self.is_named, self.values = is_named, torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
        if bad is not None:
            self.values[bad, 2] = math.nan

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Any:
        made = self.values[row] * self.scale, self.values[row].sum()
        return dict(zip(("x", "labels"), made, strict=True)) if self.is_named else made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.line = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.line(self.norm(x)).squeeze(-1) - labels).square().mean()}


class Module(lightning.LightningModule):  # type: ignore[misc]  # nor with Lightning
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss: Tensor = self.net(*batch)["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Curriculum(TrainerCallback):  # type: ignore[misc]  # mypy runs without transformers
    """Looks at the first batch, and changes the data set in each epoch, through the loader."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **more: Any) -> None:
        assert next(iter(train_dataloader))["x"].shape == (4, 4)
        train_dataloader.dataset.scale = 1.0 + round(state.epoch or 0)


class LightningsCurriculum(lightning.Callback):  # type: ignore[misc]
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        values, sums = next(iter(trainer.train_dataloader))
        assert (values.shape, sums.shape) == ((4, 4), (4,))
        trainer.train_dataloader.dataset.scale = 1.0 + trainer.current_epoch


def by_transformers(output: Path, *callbacks: Any, guarded: bool, bad: int | None = None, **more: Any) -> Any:
    args = TrainingArguments(str(output), per_device_train_batch_size=4, learning_rate=1e-2, **USUAL, **more)
    data = Rows(is_named=True, bad=bad)
    trainer = Trainer(Net(), args, train_dataset=data, callbacks=[one() for one in callbacks])
    if guarded:
        resilient_train.hf.guard(trainer)
    trainer.train()
    return trainer


def by_lightning(output: Path, *callbacks: lightning.Callback, guarded: bool, **more: Any) -> Module:
    guard = [resilient_train.lightning.Guarded()] if guarded else []
    quiet = {**QUIET, "default_root_dir": output, "accelerator": "cpu", "enable_checkpointing": False}
    torch.manual_seed(1)
    module = Module()
    trainer = lightning.Trainer(callbacks=[*callbacks, *guard], **quiet, **more)
    trainer.fit(module, DataLoader(Rows(is_named=False), batch_size=4))
    return module


def digest(module: nn.Module) -> str:
    return sha256(dict(module.named_parameters()))


def told(output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return summary(output / "resilient_train"), incidents(output / "resilient_train")


def test_what_a_callback_reads_and_sets_through_the_loader_is_the_users(tmp_path: Path) -> None:
    plain = by_transformers(tmp_path / "plain", Curriculum, guarded=False, num_train_epochs=3)
    guarded = by_transformers(tmp_path / "guarded", Curriculum, guarded=True, num_train_epochs=3)
    assert guarded.train_dataset.scale == plain.train_dataset.scale == 3.0
    assert digest(guarded.model) == digest(plain.model)
    assert next(iter(guarded.get_train_dataloader()))["x"].shape == (4, 4)  # outside of `train`, too
    modules = [
        by_lightning(tmp_path / str(is_guarded), LightningsCurriculum(), guarded=is_guarded, max_epochs=3)
        for is_guarded in (False, True)
    ]
    assert digest(modules[0]) == digest(modules[1])


class EndsEpoch(TrainerCallback):  # type: ignore[misc]
    """Ends the first epoch within an accumulation: the trainer has fetched the rest of the update."""

    calls = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls += 1
        control.should_epoch_stop = control.should_epoch_stop or self.calls == 5


def test_an_epoch_that_ends_within_an_accumulation_is_carried_on(tmp_path: Path) -> None:
    more = {"num_train_epochs": 2, "gradient_accumulation_steps": 4}
    plain = by_transformers(tmp_path / "plain", EndsEpoch, guarded=False, **more)
    guarded = by_transformers(tmp_path / "guarded", EndsEpoch, guarded=True, **more)
    assert guarded.state.global_step == plain.state.global_step == 5
    assert digest(guarded.model) == digest(plain.model)


BAD = 41  # a row that the first epoch meets


class Averaging(TrainerCallback):  # type: ignore[misc]
    """An average of the whole `state_dict`, as users write it; it also spoils a gradient that was clipped already."""

    average: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == 30:
            model.line.weight.grad[0, 0] = math.nan

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.average = self.average or copy.deepcopy(model)
        for mine, its in zip(self.average.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(0.9 * mine + 0.1 * its)


def test_neither_a_nan_row_nor_a_spoiled_gradient_leaves_a_trace_in_an_average(tmp_path: Path) -> None:
    """Neither in the weights nor in the average of them, which is no part of the run."""
    callback = Averaging()
    trainer = by_transformers(tmp_path, lambda: callback, guarded=True, bad=BAD, max_steps=80)
    written, met = told(tmp_path)
    assert [one["signal"] for one in met] == ["nonfinite_batch", "nonfinite_grad"]
    assert (met[0]["rows"], met[1]["step"], met[1]["steps_lost"]) == ([BAD], 31, 1)
    assert is_finite(trainer.model)
    assert is_finite(callback.average)
    assert (trainer.state.global_step, written["status"]) == (80, "completed")


class Flips(lightning.Callback):  # type: ignore[misc]
    is_due = True

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if self.is_due and trainer.global_step == 45:
            self.is_due = False
            with torch.no_grad():
                module.net.line.weight[0, 0] *= 2.0**100


def test_an_average_of_weights_rewinds(tmp_path: Path) -> None:
    """The final weights are the average: nothing of the damage is in them."""
    module = by_lightning(tmp_path, EMAWeightAveraging(decay=0.9), Flips(), guarded=True, max_steps=70)
    _, [incident] = told(tmp_path)
    assert (incident["signal"], incident["outcome"]) == ("weights_jump", "recovered")
    assert incident["steps_lost"] > 5
    assert module.net.line.weight.abs().max() < 10


def test_a_run_within_a_handler_of_an_earlier_error_completes(tmp_path: Path) -> None:
    try:
        raise ValueError("no checkpoint")
    except ValueError:
        by_transformers(tmp_path, guarded=True, max_steps=6)
    written, _ = told(tmp_path)
    assert (written["status"], written["verdict"]) == ("completed", "well")


def test_an_error_right_after_a_rewind_leaves_the_incident_open(tmp_path: Path) -> None:
    """Nothing has shown that the run recovered; the process that resumes goes on with it."""
    net, data = Net(), Rows(is_named=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    given: dict[str, Any] = {"batch_size": 8, "steps": 90, "run_dir": tmp_path / "resilient_train"}
    guard = Guard(None, net, optimizer, data=data, objective=lambda model, batch: model(**batch)["loss"], **given)
    with pytest.raises(RuntimeError, match="right after"):  # noqa: PT012
        try:
            for number, batch in enumerate(guard.batches()):
                guard.step(batch)
                if number == 60:
                    net.line.weight.data[0, 0] = 1e30
                if guard.incidents:
                    raise RuntimeError("right after the rewind")
        finally:
            guard.close()
    written, closed = told(tmp_path)
    assert (written["status"], written["incidents"]["total"], written["incidents"]["recovered"]) == ("failed", 1, 0)
    assert closed == []
