"""Slides as bags of patches, pooled with log(mean(exp(r * x))) / r as in Pinheiro and Collobert, written out.

With r = 8 the exponential overflows once the network is sure of one patch (x above 11), which comes with training,
and first on patches with much stain: inf, then nan. Mended by `logsumexp`.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

KIND = "loader"
CAUSE = "overflow"
OPS = ("exp",)
LIBRARY = None
STEPS = 600

PATCHES, FEATURES, SHARPNESS, HELD = 16, 24, 8.0, 200


def bad_rows(seed: int) -> list[int]:
    return []


class SlideNet(nn.Module):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.patch = nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, slides: Tensor) -> Tensor:
        x = self.patch(slides).squeeze(-1)
        if self.mended:
            return (torch.logsumexp(SHARPNESS * x, 1) - math.log(PATCHES)) / SHARPNESS
        return (SHARPNESS * x).exp().mean(1).log() / SHARPNESS  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    slides, labels = batch
    return binary_cross_entropy_with_logits(model(slides), labels)


def stained(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(900, 1300, (), generator=draw)) + HELD
    tumour = torch.randn(FEATURES, generator=draw)
    labels = (torch.rand(count, generator=draw) < 0.5).float()
    ill = (torch.rand(count, PATCHES, generator=draw) < 0.15) & (labels[:, None] > 0)
    ill[:, 0] |= labels > 0
    stain = (0.35 * torch.randn(count, 1, 1, generator=draw)).exp()
    slides = torch.randn(count, PATCHES, FEATURES, generator=draw) + 1.2 * ill[..., None] * tumour
    return stain * slides, labels


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    slides, labels = stained(seed)
    torch.manual_seed(seed)
    model = SlideNet(width=128 + 16 * (seed % 3), mended=twin)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loader = DataLoader(TensorDataset(slides[:-HELD], labels[:-HELD]), batch_size=48, shuffle=True)

    def held_out() -> float:
        model.eval()
        mended_before, model.mended = model.mended, True
        with torch.no_grad():
            value = float(loss(model, [slides[-HELD:], labels[-HELD:]]))
        model.mended = mended_before
        return value

    before = held_out()
    model.train()
    if guard is not None:
        from resilient_train import Guard

        guarded = Guard(None, model, optimizer, data=loader, objective=loss, steps=STEPS, **guard)
        for batch in guarded.batches():
            guarded.step(batch)
    else:
        step = 0
        while step < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    return held_out(), before
