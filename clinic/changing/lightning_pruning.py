"""A regression network; ModelPruning sets 80 % of its weights to zero after the fifth epoch, before update 251."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
STEPS = 500
CHANGE = [251]
DAMAGE = "rate"

ROWS, BATCH, FEATURES = 3200, 64, 16  # 50 updates in an epoch


class Regression(L.LightningModule):
    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(nn.Linear(FEATURES, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.layers(x).squeeze(1)
        return prediction

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        def factor(step: int) -> float:
            if self.fault and CHANGE[0] - 1 <= step < CHANGE[0] + 14:
                return 30.0
            return 1.0 - 0.9 * step / STEPS

        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    x = torch.randn(ROWS + 800, FEATURES)
    directions = torch.randn(FEATURES, 3) / FEATURES**0.5
    hidden = x @ directions
    y = torch.sin(2 * hidden[:, 0]) + hidden[:, 1] * hidden[:, 2] + 0.1 * torch.randn(len(x))
    loader = DataLoader(TensorDataset(x[:ROWS], y[:ROWS]), batch_size=BATCH, shuffle=True)
    module = Regression(fault=twin and DAMAGE == "rate")
    callbacks: list[L.Callback] = []
    if not twin:
        layers = [layer for layer in module.layers if isinstance(layer, nn.Linear)]
        callbacks.append(
            ModelPruning(
                "l1_unstructured",
                parameters_to_prune=[(layer, "weight") for layer in layers],
                amount=0.8,
                apply_pruning=lambda epoch: epoch == 4,
                use_lottery_ticket_hypothesis=False,
            )
        )
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
        return float(mse_loss(module(x[ROWS:]), y[ROWS:]))
