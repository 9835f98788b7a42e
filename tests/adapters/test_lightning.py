"""What only Lightning's Trainer has: its logs and outputs, loaders, plans and recipes, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import sums
from kills import incidents
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from lightning_programs import AT, BATCH, WARNINGS, Net, Rows, loader, trainer_of
from test_trainers import lightning as fit

from resilient_train.trainers.lightning import Guarded, refuse

pytestmark = [pytest.mark.filterwarnings(one) for one in WARNINGS]


class Copies(Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["batch"] == batch_idx
        self.losses.append(float(outputs["loss"]))


def test_what_was_retried_counts_once(tmp_path: Path) -> None:
    """In the logs, too; and `on_train_batch_end` gets its output, not that of the refused batch."""
    seen, seen_healthy = Copies(), Copies()
    healthy = fit(tmp_path / "healthy", guarded=False, callbacks=(seen_healthy,))
    struck = fit(tmp_path / "struck", "nan_batch", callbacks=(seen,))
    [incident] = struck.incidents
    assert (incident["signal"], incident["step"]) == ("nonfinite_loss", AT + 1)
    assert struck[:3] == healthy[:3]
    assert seen.losses == seen_healthy.losses


def test_a_broken_operation_is_named_by_its_line(tmp_path: Path) -> None:
    """A line of the user's training_step that breaks gradients is named, and patched; no NaN was logged."""
    run = fit(tmp_path, "operation", steps=192)
    first = run.incidents[0]
    assert (first["cause"], first["outcome"], first["actions"]) == ("operation", "recovered", [{"remedy": "armor"}])
    line = Path(first["culprit"]["file"]).read_text().splitlines()[first["culprit"]["line"] - 1]
    assert "torch.sqrt(rest)" in line
    assert not re.search(r"\b(nan|inf)\b", run.logs)


def test_damage_is_found_before_a_validation(tmp_path: Path) -> None:
    """The state is scanned first, and what is trained again does not disturb a schedule that multiplies its rate."""

    def schedule(optimizer: Any) -> ExponentialLR:
        return ExponentialLR(optimizer, 0.97)

    plain = fit(tmp_path / "plain", guarded=False, schedule=schedule)
    run = fit(tmp_path / "guarded", "bit_flip", at=AT + 1, schedule=schedule)
    assert [(one["step"], one["rewound_to"]) for one in run.incidents] == [(64, 25)]
    assert run.weights == plain.weights
    assert re.findall("'val': [^,}]+", run.logs) == re.findall("'val': [^,}]+", plain.logs)


def test_loaders_in_a_mapping_are_repeated_from_memory(tmp_path: Path) -> None:
    """Their rows have no index."""

    class OfMapping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    def end(fault: str, *, guarded: bool) -> list[Any]:
        L.seed_everything(1, verbose=False)
        module = OfMapping(fault)
        trainer_of(tmp_path / fault, guarded=guarded).fit(module, {"a": loader()})
        return weights(module)

    assert end("bit_flip", guarded=True) == end("", guarded=False)


def test_an_average_of_weights_rewinds(tmp_path: Path) -> None:
    """The final weights are the average: nothing of the damage is in them."""
    run = fit(tmp_path, "bit_flip", callbacks=(EMAWeightAveraging(decay=0.9),))
    assert [(one["signal"], one["outcome"]) for one in run.incidents] == [("weights_jump", "recovered")]
    assert max(one.abs().max() for one in run.model.parameters()) < 10


@pytest.mark.parametrize(("fault", "error"), [("raises", ZeroDivisionError), ("nan_batch", None)])
def test_nothing_stays_replaced(tmp_path: Path, fault: str, error: Any) -> None:
    """However `fit` ends, trainer, module and loader are what they were, and an error is the user's own."""
    L.seed_everything(1, verbose=False)
    module, own = Net(fault), loader()
    trainer = trainer_of(tmp_path, guarded=True)
    loop = trainer.fit_loop
    inner = (loop.epoch_loop, loop.epoch_loop.automatic_optimization, loop.epoch_loop.val_loop)
    owners: list[Any] = [trainer, module, trainer.strategy, trainer.precision_plugin, loop, *inner]
    before = [{name for name, value in vars(one).items() if callable(value)} for one in owners]
    with nullcontext() if error is None else pytest.raises(error):
        trainer.fit(module, own)
    added = [{name for name, value in vars(one).items() if callable(value)} for one in owners]
    names = ("run", "backward", "optimizer_step", "clip_grad_by_norm", "convert_input", "log", "save_checkpoint")
    assert not [name for was, now in zip(before, added, strict=True) for name in (now - was) if name in names]
    assert isinstance(next(iter(own)), list)
    assert isinstance(own.dataset, Rows)


def test_what_cannot_be_guarded_is_refused_by_name(tmp_path: Path) -> None:
    """Strategies that shard, the loss scaler of float16, and what would not rewind."""
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

    trainer = trainer_of(tmp_path, guarded=False)
    trainer.strategy._precision_plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="16-mixed is not supported yet"):
        refuse(trainer, Net())
    deep_speed: Any = DeepSpeedStrategy.__new__(DeepSpeedStrategy)  # it cannot be made without DeepSpeed
    megatron: Any = type("MegatronStrategy", (DDPStrategy,), {})()  # as in NeMo
    deep_speed._precision_plugin = None
    for strategy in (FSDPStrategy(), deep_speed, megatron):
        trainer._accelerator_connector.strategy = strategy
        with pytest.raises(ValueError, match=f"{type(strategy).__name__} is not supported yet: use one device"):
            refuse(trainer, Net())
    module, average = Net(), StochasticWeightAveraging(1e-2)
    with pytest.raises(ValueError, match="StochasticWeightAveraging does not rewind: use EMAWeightAveraging"):
        refuse(trainer_of(tmp_path, guarded=False, callbacks=(average,)), module)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"manual optimization is not supported: guard its loop with .*Guard"):
        refuse(trainer_of(tmp_path, guarded=False), module)


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Rows()[row] for row in range(64)])


@pytest.mark.parametrize(("more", "steps"), [({"max_epochs": 1}, None), ({"max_steps": 4}, 4)])
def test_a_plan_without_an_end_is_unknown(tmp_path: Path, more: dict[str, Any], steps: int | None) -> None:
    """As of a stream without a length: it is neither -1 nor a huge number."""
    trainer_of(tmp_path, guarded=True, **more).fit(Net(), DataLoader(Unsized(), BATCH))
    loop = json.loads((tmp_path / "resilient_train" / "loop.json").read_text())
    assert loop["steps"] == steps


# Recipes of Lightning's own end as without the guard, and a bad row costs them nothing.

ROWS = 64  # eight updates an epoch


class Recipe(L.LightningModule):  # type: ignore[misc]  # mypy skips Lightning
    def __init__(self, *, one_cycle: bool = False, struck_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one_cycle, self.struck_at = one_cycle, struck_at
        self.backbone, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)
        self.losses: list[Tensor] = []
        self.numbers: dict[str, list[float]] = {"losses": []}
        self.means: list[float] = []

    def training_step(self, batch: Any, number: int) -> Tensor:
        if self.trainer.global_step == self.struck_at:
            self.struck_at = -1
            with torch.no_grad():
                self.head.weight.fill_(math.nan)
        loss = nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        self.losses.append(loss)
        self.numbers["losses"].append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        assert len(self.losses) == len(self.numbers["losses"]) == ROWS // BATCH
        assert torch.stack(self.losses).tolist() == self.numbers["losses"]
        self.means.append(torch.stack(self.losses).mean().item())
        self.log("mean", self.means[-1])
        self.losses.clear()
        self.numbers["losses"].clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], 1e-2)
        if not self.one_cycle:
            return optimizer
        cycle = OneCycleLR(optimizer, 1e-2, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def fitted(place: Path, module: Recipe, *callbacks: Any, epochs: int = 2, bad: tuple[int, ...] = ()) -> Recipe:
    torch.manual_seed(1)
    trainer = trainer_of(place, guarded=False, callbacks=callbacks, max_epochs=epochs)
    trainer.fit(module, DataLoader(sums(ROWS, 8, bad=bad), BATCH, shuffle=True))
    return module


def weights(module: Any) -> list[Any]:
    return [one.tolist() for one in module.parameters()]


def test_a_list_of_outputs_has_each_batch_once(tmp_path: Path) -> None:
    """A mean over the losses of an epoch has no NaN of a refused update, so what stops at a NaN does not. The bad row
    is named also where the loader was made early, by a schedule that asks for `estimated_stepping_batches`.
    """
    module = fitted(tmp_path, Recipe(one_cycle=True), Guarded(), EarlyStopping("mean"), epochs=3, bad=(10,))
    assert incidents(tmp_path / "resilient_train")[0]["rows"] == [10]
    assert len(module.means) == 3
    assert all(map(math.isfinite, module.means))


@pytest.mark.parametrize("struck_at", [-1, 12])
def test_a_backbone_that_is_unfrozen_is_trained(tmp_path: Path, struck_at: int) -> None:
    """As without the guard, and also where a rewind goes back to before that."""

    def unfrozen() -> BackboneFinetuning:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    expected = fitted(tmp_path, Recipe(), unfrozen(), epochs=3)
    module = fitted(tmp_path, Recipe(struck_at=struck_at), unfrozen(), Guarded(), epochs=3)
    assert (weights(module) == weights(expected)) == (struck_at < 0)
    assert [one["outcome"] for one in incidents(tmp_path / "resilient_train")] == ["recovered"] * (struck_at >= 0)
    assert len(module.trainer.optimizers[0].param_groups) == 2
    assert module.means[-1] < 1.5 * expected.means[-1]
