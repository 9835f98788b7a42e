"""Small modules of Lightning, and faults that strike them: what tests and benchmarks of `Guarded` train with."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from resilient_train import lightning

AT = 60  # the step of a fault, of 96
BATCH = 8
WARNINGS = [  # of Lightning, that tests ignore
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:.training_step. returned .None",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Be aware that when using",
]

for _name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rows: int = 256, bad: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(0)
        self.y = torch.randint(0, 4, (rows,), generator=generator)
        self.x = torch.randn(rows, 16, generator=generator) + 2 * nn.functional.one_hot(self.y, 16)
        self.x[[*bad], 0] = math.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[row], self.y[row]


class Recorder(Logger):  # type: ignore[misc]
    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *given: Any, **more: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Net(L.LightningModule):  # type: ignore[misc]
    """A small classifier with everything that has a state of its own: running statistics, dropout."""

    def __init__(self, fault: str = "", schedule: Any = None, at: int = AT) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(
            *(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)),
        )
        self.fault, self.schedule, self.at, self.was_struck = fault, schedule, at, False
        self.struck: Any = self.net[4]

    @property
    def is_time(self) -> bool:
        return bool(self.trainer.global_step == self.at)

    def strikes(self, fault: str) -> bool:
        """Of several ranks the last one is struck."""
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if self.fault != fault or not self.is_time or self.was_struck or not is_last:
            return False
        self.was_struck = True
        return True

    def spoiled(self, x: torch.Tensor) -> torch.Tensor:
        if self.strikes("bit_flip"):
            with torch.no_grad():
                self.struck.weight.view(-1)[7] -= 2.0**60
        return x * math.nan if self.strikes("nan_batch") else x

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits, y)
        if self.fault == "operation":
            rest = 1.0 - torch.softmax(8 * logits.float(), -1).amax(-1)
            loss = loss + 0.01 * torch.sqrt(rest).mean()  # infinite slope where the model is sure
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(self.spoiled(x))
        loss = self.loss(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.fault == "none" and batch_idx % 5 == 2:
            return None
        return {"loss": loss, "batch": batch_idx}

    def on_after_backward(self) -> None:
        if self.strikes("nan_gradient"):
            grads = [one.grad for one in self.parameters() if one.requires_grad]
            next(one for one in grads if one is not None).view(-1)[3] = math.nan
        if self.fault == "raises" and self.trainer.global_step == AT:
            raise ZeroDivisionError("of the user")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [one.grad.norm() for one in self.parameters() if one.grad is not None]
        if norms:
            self.log("norm", torch.stack(norms).norm())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        schedule = self.schedule
        if self.fault == "rate":
            schedule = lambda one: LambdaLR(one, lambda step: 300.0 if AT <= step < AT + 10 else 1.0)  # noqa: E731
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}


def trainer_of(place: Path, *, guarded: bool, callbacks: tuple[Any, ...] = (), **more: Any) -> Any:
    options = {name: more.pop(name) for name in ("recovery", "tracking") if name in more}
    usual = {"max_epochs": 3, "enable_checkpointing": False, "logger": Recorder(), "log_every_n_steps": 2}
    return L.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, *([lightning.Guarded(**options)] if guarded else [])],
        default_root_dir=place,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **usual, **more},
    )


def loader(bad: tuple[int, ...] = (), workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Rows(bad=bad), BATCH, shuffle=True, num_workers=workers)
