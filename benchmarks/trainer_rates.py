"""A learning rate a hundred times too high in the trainers of others: plain, guarded, and with a good rate.

A small regression without noise: the loss at the end is over all rows. AdamW, 400 updates of 32 rows.

    python benchmarks/trainer_rates.py
"""

from __future__ import annotations

import logging
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import resilient_train

STEPS, BATCH, GOOD, HOT = 400, 32, 0.003, 0.3


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(7)
        self.x = torch.randn(2000, 20, generator=dice)
        inner, outer = torch.randn(20, 16, generator=dice) / 4, torch.randn(16, 1, generator=dice) / 4
        self.labels = torch.tanh(self.x @ inner) @ outer

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "labels": self.labels[row]}


class Net(lightning.LightningModule):  # type: ignore[misc]  # mypy runs without Lightning
    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate = rate
        self.net = nn.Sequential(
            *(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
            nn.Linear(64, 1),
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return self(**batch)["loss"]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.rate)


def hugging_face(net: Net, place: str, *, guarded: bool) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": BATCH, "lr_scheduler_type": "constant", "use_cpu": True}
    settings |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 10**6}
    trainer = Trainer(net, TrainingArguments(place, max_steps=STEPS, learning_rate=net.rate, **settings), None, Rows())
    (resilient_train.hf.guard(trainer) if guarded else trainer).train()


def with_lightning(net: Net, place: str, *, guarded: bool) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    callbacks = [resilient_train.lightning.Guarded()] if guarded else []
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, default_root_dir=place, callbacks=callbacks, **quiet
    )
    trainer.fit(net, DataLoader(Rows(), BATCH, shuffle=True))


def main() -> None:
    """Print a row for each trainer."""
    logging.disable(logging.WARNING)
    rows = Rows()
    print("| trainer | good rate | hot, plain | hot, guarded |\n|---|---|---|---|")
    for name, train in {"Hugging Face": hugging_face, "Lightning": with_lightning}.items():
        losses = []
        for rate, guarded in ((GOOD, False), (HOT, False), (HOT, True)):
            net = Net(rate)
            with TemporaryDirectory() as place:
                train(net, place, guarded=guarded)
            with torch.no_grad():
                losses.append(f"{float(net(rows.x, rows.labels)['loss']):.3g}")
        print(f"| {name} | {' | '.join(losses)} |")


if __name__ == "__main__":
    main()
