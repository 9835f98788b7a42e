"""Species of birds by bilinear pooling over a small VGG, with the signed square root as a custom autograd function.

The products of rectified features are zero wherever a channel is silent all over a picture. The backward pass of the
root divides by twice the root: infinity there, and NaN in the next product. The mend in the known repositories is a
small number under the root.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class SignedRoot(torch.autograd.Function):
    """sign(x) * sqrt(abs(x)), which keeps the root alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: float) -> Tensor:
        root = x.abs().add(small).sqrt()
        ctx.save_for_backward(root)
        return x.sign() * root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (root,) = ctx.saved_tensors
        return grad / (2 * root), None  # guilty


class BilinearVGG(nn.Module):
    def __init__(self, widths: list[int], species: int, small: float) -> None:
        super().__init__()
        self.small = small
        layers: list[nn.Module] = []
        for inputs, outputs in zip([3, *widths], widths, strict=False):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers[:-1])
        self.classifier = nn.Linear(widths[-1] ** 2, species)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, picture: Tensor) -> Tensor:
        feature = self.features(picture).flatten(2)
        pooled = feature @ feature.transpose(1, 2) / feature.shape[-1]
        return self.classifier(F.normalize(SignedRoot.apply(pooled.flatten(1), self.small)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    picture, species = batch
    return F.cross_entropy(model(picture), species)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    species, side = int(torch.randint(4, 7, ())), int(torch.randint(16, 21, ()))
    rows, held_out = int(torch.randint(500, 800, ())), 160
    widths = [int(torch.randint(8, 13, ())), 16, int(torch.randint(16, 25, ()))]
    model = BilinearVGG(widths, species, small=1e-5 if mended else 0.0)
    kind = torch.randint(species, (rows + held_out,))
    plumage, texture = torch.randn(species, 3), torch.randn(species, 3, 5, 5)
    noise = F.pad(torch.randn(rows + held_out, 3, side, side), (2, 2, 2, 2))
    pattern = torch.cat([F.conv2d(noise[i : i + 1], texture[k][:, None], groups=3) for i, k in enumerate(kind)]) / 5
    picture = pattern + 0.5 * plumage[kind][:, :, None, None] + 0.3 * torch.randn(rows + held_out, 3, side, side)
    return Program(
        model=model,
        rows=TensorDataset(picture[:rows], kind[:rows]),
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=5e-4),
        evaluation=[picture[rows:], kind[rows:]],
        guilty=Guilty("operation", ops=("div",)),
        batch_size=32,
        steps=240,
    )
