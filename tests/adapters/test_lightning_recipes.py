"""What Lightning's own recipes do under `Guarded`: they end as without it, and a bad row costs them nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from guarded import sums
from kills import incidents
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, LearningRateFinder
from lightning_programs import WARNINGS
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from resilient_train import lightning

pytestmark = [pytest.mark.filterwarnings(one) for one in WARNINGS]
ROWS, BATCH = 64, 8  # eight updates an epoch


class Recipe(L.LightningModule):  # type: ignore[misc]  # mypy skips Lightning
    def __init__(self, *, one_cycle: bool = False, struck_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one_cycle, self.struck_at, self.lr = one_cycle, struck_at, 1e-2
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
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], self.lr)
        if not self.one_cycle:
            return optimizer
        cycle = OneCycleLR(optimizer, 1e-2, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def fitted(place: Path, module: Recipe, *callbacks: Any, epochs: int = 2, bad: tuple[int, ...] = ()) -> Recipe:
    torch.manual_seed(1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=[*callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    trainer.fit(module, DataLoader(sums(ROWS, 8, bad=bad), BATCH, shuffle=True))
    return module


def weights(module: Recipe) -> list[Any]:
    return [one.tolist() for one in module.parameters()]


def test_a_schedule_made_for_the_estimated_steps_leaves_rows_their_names(tmp_path: Path) -> None:
    """`estimated_stepping_batches` makes the loader before the training begins: the bad row is named all the same."""
    fitted(tmp_path, Recipe(one_cycle=True), lightning.Guarded(), bad=(10,))
    assert incidents(tmp_path / "resilient_train")[0]["rows"] == [10]


@pytest.mark.parametrize("is_first", [False, True])
def test_a_search_of_the_learning_rate_runs_as_without_the_guard(tmp_path: Path, is_first: bool) -> None:
    """Whether the guard comes before it or after it among the callbacks."""
    plain, guarded = (LearningRateFinder(num_training_steps=8) for _ in range(2))
    expected = fitted(tmp_path, Recipe(), plain, epochs=1)
    callbacks = [lightning.Guarded(), guarded] if is_first else [guarded, lightning.Guarded()]
    assert weights(fitted(tmp_path, Recipe(), *callbacks, epochs=1)) == weights(expected)


def test_a_list_of_outputs_has_each_batch_once(tmp_path: Path) -> None:
    """A mean over the losses of an epoch has no NaN of a refused update, so what stops at a NaN does not."""
    module = fitted(tmp_path, Recipe(), lightning.Guarded(), EarlyStopping("mean"), epochs=3, bad=(10,))
    assert len(module.means) == 3
    assert all(map(math.isfinite, module.means))


@pytest.mark.parametrize("struck_at", [-1, 12])
def test_a_backbone_that_is_unfrozen_is_trained(tmp_path: Path, struck_at: int) -> None:
    """As without the guard, and also where a rewind goes back to before that."""

    def unfrozen() -> BackboneFinetuning:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)

    expected = fitted(tmp_path, Recipe(), unfrozen(), epochs=3)
    module = fitted(tmp_path, Recipe(struck_at=struck_at), unfrozen(), lightning.Guarded(), epochs=3)
    assert (weights(module) == weights(expected)) == (struck_at < 0)
    assert [one["outcome"] for one in incidents(tmp_path / "resilient_train")] == ["recovered"] * (struck_at >= 0)
    assert len(module.trainer.optimizers[0].param_groups) == 2
    assert module.means[-1] < 1.5 * expected.means[-1]
