"""Metric learning with a contrastive loss; at update 280 weights and activations begin to be rounded to 3 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 560
CHANGE = [280]
DAMAGE = "labels"

BATCH_SIZE, KINDS, INPUTS = 48, 10, 16

Batch = list[Tensor]


def fake_quantize(x: Tensor, bits: int) -> Tensor:
    """Round to a grid, and let the gradient pass straight through."""
    scale = x.detach().abs().max().clamp(min=1e-8) / (2 ** (bits - 1) - 1)
    return x + ((x / scale).round() * scale - x).detach()


class QuantLinear(nn.Linear):
    """A linear layer that can pretend to be quantized."""

    bits: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.bits is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(fake_quantize(x, self.bits), fake_quantize(self.weight, self.bits), self.bias)


def set_bits(model: nn.Module, bits: int | None) -> None:
    """Switch the quantization of all layers."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.bits = bits


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Pull rows of one kind together, and push others away (supervised contrastive loss)."""
    x, kinds = batch
    z = F.normalize(model(x), dim=1)
    itself = torch.eye(len(x), dtype=torch.bool)
    similar = (z @ z.T / 0.2).masked_fill(itself, -1e9)
    positive = ((kinds[:, None] == kinds[None]) & ~itself).float()
    log_p = similar.log_softmax(1)
    has_partner = positive.sum(1) > 0
    return -((positive * log_p).sum(1) / positive.sum(1).clamp(min=1))[has_partner].mean()


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the contrastive loss of held-out rows, mean of batches."""
    torch.manual_seed(seed)
    kinds = torch.randint(KINDS, (5000,))
    hidden = torch.randn(KINDS, 6)[kinds] * 1.5 + 0.4 * torch.randn(5000, 6)
    x = torch.tanh(hidden @ torch.randn(6, 24) / 2) @ torch.randn(24, INPUTS) / 3 + 0.3 * torch.randn(5000, INPUTS)
    labels = kinds[480:].clone()
    if twin and DAMAGE == "labels":
        wrong = torch.randperm(len(labels))[: len(labels) // 25]
        labels[wrong] = (labels[wrong] + 1 + torch.randint(KINDS - 1, (len(wrong),))) % KINDS
    dataset = TensorDataset(x[480:], labels)
    model = nn.Sequential(QuantLinear(INPUTS, 64), nn.ReLU(), QuantLinear(64, 64), nn.ReLU(), QuantLinear(64, 12))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def before(step: int) -> None:
        set_bits(model, None if twin or step + 1 < CHANGE[0] else 3)

    if guard is None:
        step = 0
        while step < STEPS:
            for batch in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True):
                before(step)
                loss = contrastive(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(
            None, model, optimizer, data=dataset, batch_size=BATCH_SIZE, steps=STEPS, objective=contrastive, **options
        )
        for batch in guarded.batches():
            before(guarded.attempted_step)
            guarded.step(batch)
        guarded.close()
    with torch.no_grad():
        held_out = zip(x[:480].split(BATCH_SIZE), kinds[:480].split(BATCH_SIZE), strict=True)
        return float(torch.stack([contrastive(model, [rows, kind]) for rows, kind in held_out]).mean())
