"""Lightning with manual optimization under guard: one call of `training_step` is one update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

L = pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

import lightning_programs  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning_programs import AT, WARNINGS, WAYS, Fitted, Manual, loader, trainer_of  # noqa: E402

pytestmark = [pytest.mark.filterwarnings(one) for one in WARNINGS]


def fit(place: Path, how: str, fault: str = "", *, guarded: bool = True, schedule: Any = None, **more: Any) -> Fitted:
    L.seed_everything(1, verbose=False)
    ckpt_path, trainer = more.pop("ckpt_path", None), trainer_of(place, guarded=guarded, **more)
    module = Manual(how, fault, schedule=schedule)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return Fitted(trainer, module, trainer.logger.rows, place)


def decayed(optimizer: Any) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.99)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Fitted] = {}

    def run(how: str) -> Fitted:
        if how not in known:
            known[how] = fit(tmp_path_factory.mktemp("plain"), how, guarded=False, schedule=decayed)
        return known[how]

    return run


@pytest.mark.parametrize("how", WAYS)
def test_a_healthy_run_is_that_without_the_guard(tmp_path: Path, how: str, plain: Any) -> None:
    """However a module steps: the same rows reach the loggers, and weights and statistics are the same bits."""
    guarded = fit(tmp_path, how, schedule=decayed)
    assert guarded.weights == plain(how).weights
    assert guarded.rows == plain(how).rows
    assert guarded.trainer.global_step == plain(how).trainer.global_step
    assert not guarded.incidents


STRIKES = {
    "nan_batch": ("nonfinite_loss", "transient"),
    "nan_second": ("nonfinite_loss", "transient"),  # the critic has stepped when the generator's loss is NaN
    "bit_flip": ("weights_jump", "corruption"),
}


@pytest.mark.parametrize(
    ("how", "fault"),
    [("in turn", "nan_batch"), ("critic", "nan_second"), ("closure", "bit_flip"), ("accumulated", "bit_flip")],
)
def test_what_strikes_once_leaves_no_trace(tmp_path: Path, how: str, fault: str, plain: Any) -> None:
    """No network keeps half an update, a rewind restores both, and schedules and counts are those of a plain run."""
    run = fit(tmp_path, how, fault, schedule=decayed)
    [incident] = run.incidents
    assert (incident["signal"], incident["cause"], incident["outcome"]) == (*STRIKES[fault], "recovered")
    assert run.weights == plain(how).weights
    if (how, fault) != ("accumulated", "bit_flip"):  # where losses were logged before an update that could be judged
        assert run.rows == plain(how).rows
    assert run.trainer.global_step == plain(how).trainer.global_step


class Longer(Manual):
    def step_alone(self, x: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        super().step_alone(x, y, batch_idx)
        if self.total == AT:
            super().step_alone(x * (math.nan if self.strikes("nan_second") else 1.0), y, batch_idx)
        return torch.zeros(())


def test_a_call_with_more_steps_than_any_before_is_undone_as_a_whole(tmp_path: Path) -> None:
    """Its first step cannot know that another one follows, whose loss is NaN."""

    def ended(fault: str) -> Fitted:
        L.seed_everything(1, verbose=False)
        module, trainer = Longer("alone", fault), trainer_of(tmp_path / fault, guarded=True)
        trainer.fit(module, loader())
        return Fitted(trainer, module, [], tmp_path / fault)

    run = ended("nan_second")
    [incident] = run.incidents
    assert (incident["signal"], incident["outcome"]) == ("nonfinite_loss", "recovered")
    assert run.weights == ended("").weights


def test_a_broken_operation_is_named_by_its_line(tmp_path: Path) -> None:
    run = fit(tmp_path, "in turn", "operation", max_epochs=6)
    first = run.incidents[0]
    source = Path(str(lightning_programs.__file__)).read_text().splitlines()
    assert "torch.sqrt(" in source[first["culprit"]["line"] - 1]
    assert first["actions"] == [{"remedy": "armor"}]
    assert all(math.isfinite(value) for weights in run.weights for value in weights)


def test_a_run_resumes_from_a_checkpoint_of_lightning(tmp_path: Path, plain: Any) -> None:
    """One epoch, and two more from its checkpoint: the number of updates is not that of steps."""
    saver = ModelCheckpoint(tmp_path / "files", save_last=True)
    fit(tmp_path, "in turn", schedule=decayed, max_epochs=1, callbacks=(saver,), enable_checkpointing=True)
    path = tmp_path / "files" / "last.ckpt"
    [state] = [one for name, one in torch.load(path, weights_only=False)["callbacks"].items() if name == "Guarded"]
    assert state == {"run_dir": "resilient_train", "updates": 32}
    saver = ModelCheckpoint(tmp_path / "files", save_last=True)
    again: Any = {"ckpt_path": path, "callbacks": (saver,), "enable_checkpointing": True}
    run = fit(tmp_path, "in turn", "bit_flip", schedule=decayed, **again)
    assert [one["step"] for one in run.incidents] == [AT]
    assert run.trainer.global_step == 192
    assert run.rows[-1][1].keys() == plain("in turn").rows[-1][1].keys()
