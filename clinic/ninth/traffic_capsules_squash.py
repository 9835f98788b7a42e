"""Traffic signs by a small CapsNet: the squash takes a capsule's length by hand, and a dropped one has length 0.

Against overfitting whole primary capsules are dropped, as channels are elsewhere. The length of nothing is right, but
the slope of its root is infinite, and NaN times the mask of the dropout is NaN. Géron's explanation of the CapsNet has
a `safe_norm` for capsules of zero; asked many times as "CapsNet loss becomes NaN".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


def squash(capsules: Tensor, epsilon: float) -> Tensor:
    """Scale the capsules to a length below one."""
    length = torch.sqrt(capsules.pow(2).sum(dim=-1, keepdim=True) + epsilon)  # guilty
    return capsules * length / (1 + length**2)


class CapsNet(nn.Module):
    """Primary capsules, and one capsule a class, with routing by agreement (Sabour et al., 2017)."""

    def __init__(self, channels: int, classes: int, epsilon: float, *, kinds: int = 4, size: int = 4) -> None:
        super().__init__()
        self.size, self.epsilon = size, epsilon
        self.features = nn.Sequential(nn.Conv2d(1, channels, 5), nn.ReLU())
        self.primary = nn.Conv2d(channels, kinds * size, 5, stride=2)
        self.dropped = nn.Dropout1d(0.1)
        self.votes = nn.Parameter(0.3 * torch.randn(kinds * 9, classes, 8, size))

    def forward(self, signs: Tensor) -> Tensor:
        """How long the capsule of each class is."""
        maps = self.primary(self.features(signs))
        primary = maps.unflatten(1, (-1, self.size)).permute(0, 1, 3, 4, 2).flatten(1, 3)
        primary = squash(self.dropped(primary), self.epsilon)
        votes = torch.einsum("pcij,bpj->bpci", self.votes, primary)
        logits = votes.new_zeros(votes.shape[:-1])
        for _ in range(2):
            shares = logits.softmax(dim=-1)
            parents = squash((shares.unsqueeze(-1) * votes.detach()).sum(dim=1), self.epsilon)
            logits = logits + (votes.detach() * parents.unsqueeze(1)).sum(dim=-1)
        parents = squash((logits.softmax(dim=-1).unsqueeze(-1) * votes).sum(dim=1), self.epsilon)
        return parents.norm(dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The margin loss of the paper."""
    signs, kinds = batch
    lengths = model(signs)
    present = nn.functional.one_hot(kinds, lengths.shape[-1])
    margins = present * (0.9 - lengths).relu() ** 2 + 0.5 * (1 - present) * (lengths - 0.1).relu() ** 2
    return margins.sum(dim=-1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    side, count = 13, 700
    down, across = torch.meshgrid(torch.arange(side) - side // 2, torch.arange(side) - side // 2, indexing="ij")
    radius = 3 + torch.randint(3, (count + 96, 1, 1))
    shapes = torch.stack([down**2 + across**2, torch.maximum(down.abs(), across.abs()) ** 2])
    shapes = torch.cat([shapes, torch.stack([(down.abs() + across.abs()) ** 2, torch.minimum(down**2, across**2) * 9])])
    classes = 3 + seed % 2
    kinds = torch.randint(classes, (count + 96,))
    inside = shapes[kinds] <= radius**2
    rim = inside & (shapes[kinds] > (radius - 2) ** 2)
    signs = (inside.float() - 0.5 * rim.float()).unsqueeze(1)
    signs = signs + (signs != 0) * 0.1 * torch.randn(signs.shape)
    return Program(
        model=CapsNet(int(torch.randint(10, 16, ())), classes, 1e-7 if mended else 0.0),
        rows=TensorDataset(signs[:count], kinds[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[signs[count:], kinds[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=220,
    )
