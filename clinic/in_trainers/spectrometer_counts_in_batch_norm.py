"""Spectra between 0 and 1, and a few rows of the table in raw counts of the detector (up to 65535), among batch norms.

The training loss hardly shows them, as each batch is normalized by itself, but the running variance keeps them:
"my model works in train() and is at chance in eval()". Mended by leaving those rows out.
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
STEPS = 600

MINERALS, HELD = 6, 240


def spectra(seed: int) -> tuple[Tensor, Tensor, list[int]]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(800, 1200, (), generator=draw)) + HELD
    channels = int(torch.randint(64, 128, (), generator=draw))
    places = torch.rand(MINERALS, 4, 1, generator=draw)
    lines = torch.exp(-((torch.arange(channels) / channels - places) ** 2) / 0.002)
    labels = torch.randint(MINERALS, (count,), generator=draw)
    heights = torch.rand(count, 4, 1, generator=draw)
    x = (heights * lines[labels]).sum(1) * 0.3 + 0.2 + 0.1 * torch.rand(count, channels, generator=draw)
    x = x.clamp(0, 1)
    bad = torch.randperm(count - HELD, generator=draw)[: int(torch.randint(3, 7, (), generator=draw))].tolist()
    x[bad] = (x[bad] * 65535).round()
    return x, labels, sorted(bad)


def bad_rows(seed: int) -> list[int]:
    return spectra(seed)[2]


class SpectrumNet(L.LightningModule):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm1d(channels),
            nn.Linear(channels, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, MINERALS),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        return cross_entropy(self.net(x), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, labels = batch
        self.log("val_loss", cross_entropy(self.net(x), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    x, labels, bad = spectra(seed)
    rows = [row for row in range(len(labels) - HELD) if not (twin and row in bad)]
    L.seed_everything(seed, verbose=False)
    module = SpectrumNet(x.shape[1], width=448 + 32 * (seed % 3))
    loader = DataLoader(TensorDataset(x[rows], labels[rows]), batch_size=48, shuffle=True)
    validation = DataLoader(TensorDataset(x[-HELD:], labels[-HELD:]), batch_size=120)

    def held_out() -> float:
        module.eval()
        with torch.no_grad():
            return float(cross_entropy(module.net(x[-HELD:]), labels[-HELD:]))

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
        trainer.fit(module, loader, validation)
    return held_out(), before
