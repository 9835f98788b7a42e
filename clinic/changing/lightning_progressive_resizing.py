"""A convolutional network sees digits at 8 x 8 pixels in the first five epochs, and at 16 x 16 from update 201 on."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
STEPS = 400
CHANGE = [201]
DAMAGE = "labels"

ROWS, BATCH = 1280, 32  # 40 updates in an epoch
SMALL, LARGE, LARGE_FROM_EPOCH = 8, 16, 5


class Classifier(L.LightningModule):
    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.grows = grows
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, x: Tensor, size: int) -> Tensor:
        logits: Tensor = self.layers(interpolate(x, size=(size, size), mode="bilinear"))
        return logits

    @property
    def size(self) -> int:
        return LARGE if self.grows and self.current_epoch >= LARGE_FROM_EPOCH else SMALL

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0], self.size), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    if twin and DAMAGE == "labels":
        wrong = torch.randperm(ROWS)[: ROWS // 30]
        labels[wrong] = (labels[wrong] + torch.randint(1, 10, (len(wrong),))) % 10
    loader = DataLoader(TensorDataset(x[:ROWS], labels[:ROWS]), batch_size=BATCH, shuffle=True)
    module = Classifier(grows=not twin)
    callbacks: list[L.Callback] = []
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
        return float(cross_entropy(module(x[ROWS:], SMALL if twin else LARGE), labels[ROWS:]))
