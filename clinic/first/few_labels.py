"""Few rows have a label, and the mean of the loss over those that do is worked out by hand: over none it is 0 / 0.

verl-project/verl#782, "prevent NaN when all items are intentionally masked by adding epsilon to masked_mean".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class HalfSupervised(nn.Module):
    """Rebuilds all rows, and tells the class of those that have one."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.decoder = nn.Linear(width, features)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(inputs)
        return self.decoder(hidden), self.head(hidden)


def masked_mean(values: Tensor, mask: Tensor, mended: bool) -> Tensor:
    total = (values * mask).sum()
    return total / mask.sum().clamp(min=1) if mended else total / mask.sum()  # guilty


def loss(model: nn.Module, batch: list[Tensor], mended: bool) -> Tensor:
    inputs, labels, known = batch
    rebuilt, logits = model(inputs)
    errors = nn.functional.cross_entropy(logits, labels, reduction="none")
    return nn.functional.mse_loss(rebuilt, inputs) + masked_mean(errors, known, mended)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, classes, count = 9 + seed % 4, 3 + seed % 2, 1600
    centres = 2 * torch.randn(classes, features)
    labels = torch.randint(classes, (count + 96,))
    inputs = centres[labels] + 0.5 * torch.randn(count + 96, features)
    known = (torch.rand(count + 96) < 0.12 - 0.01 * (seed % 5)).float()
    known[count:] = 1.0
    tensors = [inputs, labels, known]
    return Program(
        model=HalfSupervised(features, int(torch.randint(16, 28, ())), classes),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.Adam, lr=8e-3),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("operation", ops=("div", "true_divide")),
        batch_size=24,
    )
