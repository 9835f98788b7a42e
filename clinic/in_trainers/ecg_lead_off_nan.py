"""Electrocardiograms read with wfdb: where a lead was off the reader gives NaN, and a few records have such gaps.

One of them in a batch is enough for the batch norm and then for all weights ("loss becomes nan after some batches",
asked for PTB-XL and for the PhysioNet challenges in Lightning's forum). Mended by leaving those records out.
"""

import logging
import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
CAUSE = "data"
OPS = ()
LIBRARY = None
STEPS = 500

RHYTHMS, LEADS, HELD = 4, 2, 160


def records(seed: int) -> tuple[Tensor, Tensor, list[int]]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(700, 1000, (), generator=draw)) + HELD
    length = int(torch.randint(160, 208, (), generator=draw))
    labels = torch.randint(RHYTHMS, (count,), generator=draw)
    time = torch.arange(length) / length
    rate = 3.0 + 1.5 * labels[:, None] + 0.5 * torch.randn(count, 1, generator=draw)
    phase = 6.3 * torch.rand(count, 1, generator=draw)
    beats = (6.3 * rate * time + phase).sin().clamp(min=0) ** 4
    gains = 0.6 + torch.rand(count, LEADS, 1, generator=draw)
    signals = gains * beats[:, None] + 0.3 * torch.randn(count, LEADS, length, generator=draw)
    bad = torch.randperm(count - HELD, generator=draw)[: int(torch.randint(3, 8, (), generator=draw))].tolist()
    for row in bad:
        start = int(torch.randint(length - 20, (), generator=draw))
        signals[row, int(torch.randint(LEADS, (), generator=draw)), start : start + 16] = float("nan")
    return signals, labels, sorted(bad)


def bad_rows(seed: int) -> list[int]:
    return records(seed)[2]


class RhythmNet(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(LEADS, width, 7, stride=2, padding=3),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 5, stride=2, padding=2),
            nn.BatchNorm1d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(8 * width, RHYTHMS),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signals, labels = batch
        return cross_entropy(self.net(signals), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    signals, labels, bad = records(seed)
    rows = [row for row in range(len(labels) - HELD) if not (twin and row in bad)]
    L.seed_everything(seed, verbose=False)
    module = RhythmNet(width=32 + 4 * (seed % 3))
    loader = DataLoader(
        TensorDataset(signals[rows], labels[rows]), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True
    )

    def held_out() -> float:
        module.eval()
        with torch.no_grad():
            return float(cross_entropy(module.net(signals[-HELD:]), labels[-HELD:]))

    before = held_out()
    module.train()
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
    return held_out(), before
