"""A set transformer with a pretrained backbone: only its new head learns until update 200, when the backbone joins."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 450
CHANGE = [200]
DAMAGE = "weights"

BATCH_SIZE, ITEMS, WIDTH = 32, 8, 24


class Backbone(nn.Module):
    """Encode a set of points as one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.layer(self.embed(x))
        return encoded.mean(1)


class Net(nn.Module):
    """A backbone with a head."""

    def __init__(self, backbone: Backbone, outputs: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.backbone(x))
        return y


def spread(x: Tensor) -> Tensor:
    """Return what is learned first: where the points lie and how far apart."""
    return torch.cat([x.mean(1), x.std(1)], 1)


def extent(x: Tensor) -> Tensor:
    """Return what is learned then: the area and the longest side of the box around the points."""
    sides = x.amax(1) - x.amin(1)
    return torch.stack([sides.prod(1), sides.amax(1)], 1)


def pretrained() -> Backbone:
    """Fit a backbone to the first problem."""
    net = Net(Backbone(), 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(120):
        x = torch.rand(32, ITEMS, 2)
        optimizer.zero_grad()
        F.mse_loss(net(x), spread(x)).backward()
        optimizer.step()
    return net.backbone


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the error on held-out sets."""
    torch.manual_seed(seed)
    model = Net(pretrained(), 2)
    x = torch.rand(4400, ITEMS, 2) * (0.3 + torch.rand(4400, 1, 2))
    y = extent(x) * 4
    dataset, held_out, targets = TensorDataset(x[400:], y[400:]), x[:400], y[:400]
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    is_hit = False

    def before(step: int) -> None:
        nonlocal is_hit
        if step + 1 < CHANGE[0]:
            return
        if not twin and len(optimizer.param_groups) == 1:
            for parameter in model.backbone.parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 1e-2})
        if twin and DAMAGE == "weights" and step + 1 == CHANGE[0] and not is_hit:
            is_hit = True
            with torch.no_grad():
                model.backbone.layer.linear2.weight.mul_(4.0)
                model.backbone.embed.weight.mul_(-1.0)

    if guard is None:
        step = 0
        while step < STEPS:
            for x, y in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                before(step)
                loss = F.smooth_l1_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(None, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS, **options)
        for x, y in guarded.batches():
            before(guarded.attempted_step)
            loss = F.smooth_l1_loss(model(x), y)
            loss.backward()
            guarded.update(loss)
        guarded.close()
    with torch.no_grad():
        return float(F.smooth_l1_loss(model(held_out), targets))
