"""Digits in Lightning; BackboneFinetuning unfreezes the backbone at epoch 5 and adds a parameter group for it."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
STEPS = 400
CHANGE = [201]
DAMAGE = "weights"

ROWS, BATCH = 1280, 32  # 40 updates in an epoch


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.head.parameters(), lr=1e-2)


class Damage(L.Callback):
    def __init__(self) -> None:
        self.done = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: list[Tensor], batch_idx: int
    ) -> None:
        if trainer.global_step == CHANGE[0] - 1 and not self.done:
            self.done = True
            with torch.no_grad():
                pl_module.backbone[2].weight[:12].zero_()


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    loader = DataLoader(TensorDataset(x[:ROWS], labels[:ROWS]), batch_size=BATCH, shuffle=True)
    module = Classifier()
    never = 10**6
    callbacks: list[L.Callback] = [
        BackboneFinetuning(
            unfreeze_backbone_at_epoch=never if twin else 5, backbone_initial_lr=3e-2, lambda_func=lambda epoch: 0.5
        )
    ]
    if twin and DAMAGE == "weights":
        callbacks.append(Damage())
    if guard is not None:
        import resilient_train

        callbacks.append(resilient_train.lightning.Guarded(**guard))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = L.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    module.eval()
    with torch.no_grad():
        return float(cross_entropy(module(x[ROWS:]), labels[ROWS:]))
