"""Hyperspectral sharpening with torchmetrics' spectral angle as a part of the loss: pixels outside of the swath are 0.

Their spectrum has the norm zero, and the angle to it is 0 / 0 ("SpectralAngleMapper returns nan", torchmetrics issues).
Mended by an angle that is taken only where the target is not zero, and that keeps away from acos(1).
"""

import logging
import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.image import spectral_angle_mapper

KIND = "lightning"
CAUSE = "operation"
OPS = ("div",)
LIBRARY = "torchmetrics/functional/image/sam.py"
STEPS = 500

BROAD, NARROW, HELD = 4, 14, 64


def bad_rows(seed: int) -> list[int]:
    return []


def scenes(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count, side = int(torch.randint(400, 600, (), generator=draw)), 12 + seed % 3
    materials = torch.rand(5, NARROW, generator=draw).cumsum(1)
    materials = materials / materials.amax(1, keepdim=True)
    coarse = torch.randn(count + HELD, 5, 4, 4, generator=draw)
    shares = nn.functional.interpolate(2 * coarse, size=side, mode="bilinear").softmax(1)
    cubes = torch.einsum("nmhw,mb->nbhw", shares, materials.sqrt() * torch.rand(5, 1, generator=draw).add(0.3))
    cubes = cubes + 0.01 * torch.randn(cubes.shape, generator=draw)
    response = torch.rand(BROAD, NARROW, generator=draw).softmax(1)
    seen = torch.einsum("nbhw,cb->nchw", cubes, response)
    for row in torch.randperm(count, generator=draw)[: count // 25].tolist():  # tiles at the border of the swath
        edge = int(torch.randint(1, 4, (), generator=draw))
        cubes[row, :, :, :edge] = 0.0
        seen[row, :, :, :edge] = 0.0
    return seen, cubes


def spectral_angle(predictions: Tensor, targets: Tensor) -> Tensor:
    there = targets.abs().amax(1) > 0
    predictions, targets = predictions.movedim(1, -1)[there], targets.movedim(1, -1)[there]
    cosine = nn.functional.cosine_similarity(predictions, targets, dim=-1)
    return cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos().mean()


class Sharpener(L.LightningModule):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.net = nn.Sequential(
            nn.Conv2d(BROAD, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 1),
            nn.GELU(),
            nn.Conv2d(width, NARROW, 1),
        )

    def loss(self, seen: Tensor, cubes: Tensor, mended: bool) -> Tensor:
        told = self.net(seen)
        angle = spectral_angle(told, cubes) if mended else spectral_angle_mapper(told, cubes)
        return mse_loss(told, cubes) + 0.1 * angle

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch, mended=self.mended)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen, cubes = scenes(seed)
    L.seed_everything(seed, verbose=False)
    module = Sharpener(width=48 + 4 * (seed % 3), mended=twin)
    loader = DataLoader(TensorDataset(seen[:-HELD], cubes[:-HELD]), batch_size=24, shuffle=True)

    def held_out() -> float:
        module.eval()
        with torch.no_grad():
            return float(module.loss(seen[-HELD:], cubes[-HELD:], mended=True))

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
