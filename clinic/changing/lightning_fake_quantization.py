"""A convolutional network classifies signals; from update 260 on its weights are rounded to two bits."""

import logging
import math
import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, cross_entropy, linear, relu
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
STEPS = 400
CHANGE = [260]
DAMAGE = "labels"

BATCH, LENGTH, CLASSES = 32, 32, 6


def fake_quantize(weight: Tensor, bits: int) -> Tensor:
    """Rounded in the forward, as it is in the backward (straight-through)."""
    scale = weight.detach().abs().max() / (2 ** (bits - 1) - 1)
    return weight + ((weight / scale).round() * scale - weight).detach()


class Signals(L.LightningModule):
    def __init__(self, quantize_from: int | None) -> None:
        super().__init__()
        self.quantize_from = quantize_from
        self.first, self.second = nn.Conv1d(1, 16, 5), nn.Conv1d(16, 16, 5)
        self.head = nn.Linear(16 * LENGTH // 4, CLASSES)

    def forward(self, x: Tensor, quantized: bool) -> Tensor:
        layers = (self.first, self.second, self.head)
        first, second, head = (fake_quantize(layer.weight, 2) if quantized else layer.weight for layer in layers)
        h = relu(conv1d(x, first, self.first.bias, stride=2, padding=2))
        h = relu(conv1d(h, second, self.second.bias, stride=2, padding=2))
        return linear(h.flatten(1), head, self.head.bias)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, labels = batch
        quantized = self.quantize_from is not None and self.global_step >= self.quantize_from
        return {"loss": cross_entropy(self(x, quantized), labels)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def signals(rows: int) -> tuple[Tensor, Tensor]:
    """The class is the frequency of a noisy wave of any phase."""
    labels = torch.randint(CLASSES, (rows,))
    time = torch.arange(LENGTH) / LENGTH
    phase = 2 * math.pi * torch.rand(rows, 1)
    waves = torch.sin(2 * math.pi * (labels[:, None] + 1.5) * time + phase)
    return (waves + 0.7 * torch.randn(rows, LENGTH))[:, None], labels


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    x, labels = signals(STEPS * BATCH)
    held_x, held_labels = signals(1000)
    if twin and DAMAGE == "labels":
        first = (CHANGE[0] - 1) * BATCH
        block = slice(first, first + len(x) // 16, 2)
        labels[block] = labels[block].roll(1)
    loader = DataLoader(TensorDataset(x, labels), batch_size=BATCH)
    module = Signals(None if twin else CHANGE[0] - 1)
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
        return float(cross_entropy(module(held_x, quantized=not twin), held_labels))
