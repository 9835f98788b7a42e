"""Two tasks on one trunk; at updates 180 and 360 the rate restarts from averaged weights, shrunk and perturbed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 540
CHANGE = [180, 360]
DAMAGE = "rate"

BATCH_SIZE, INPUTS, CLASSES = 40, 12, 3
AVERAGED_UPDATES, SHRINK, PERTURB, CLIP = 30, 0.5, 0.02, 0.5


class TwoTasks(nn.Module):
    """A trunk, a class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(INPUTS, 80), nn.SiLU(), nn.Linear(80, 80), nn.SiLU())
        self.kind, self.number = nn.Linear(80, CLASSES), nn.Linear(80, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(x)
        return self.kind(shared), self.number(shared)[:, 0]


def loss_of(model: nn.Module, x: Tensor, kind: Tensor, number: Tensor) -> Tensor:
    """Add the losses of both tasks."""
    logits, guess = model(x)
    return F.cross_entropy(logits, kind) + F.huber_loss(guess, number)


@torch.no_grad()
def shrink_and_perturb(model: nn.Module, source: nn.Module) -> None:
    """Begin again near smaller copies of other weights."""
    for weight, other in zip(model.parameters(), source.parameters(), strict=True):
        weight.copy_(SHRINK * other + PERTURB * torch.randn_like(weight))


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the loss of held-out rows."""
    torch.manual_seed(seed)
    x = torch.randn(5000, INPUTS)
    kind = torch.stack([x[:, :4].square().sum(1), x[:, 4:8].square().sum(1), x[:, 8:].square().sum(1)], 1).argmax(1)
    number = 2 * torch.sin(x[:, 0] * x[:, 1]) + x[:, 5].abs() - x[:, 9] + 0.1 * torch.randn(5000)
    dataset, held_out = TensorDataset(x[500:], kind[500:], number[500:]), (x[:500], kind[:500], number[:500])
    model = TwoTasks()
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cycle = STEPS if twin else CHANGE[0]

    def rate(step: int) -> float:
        if twin and DAMAGE == "rate" and CHANGE[0] <= step + 1 < CHANGE[0] + 10:
            return 30.0
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * ((step + 1) % cycle) / cycle))

    def before(step: int) -> None:
        if not twin and step + 1 in CHANGE:
            shrink_and_perturb(model, averaged.module)
            averaged.n_averaged.zero_()

    def after(step: int) -> None:
        if (step + 1) % cycle >= cycle - AVERAGED_UPDATES:
            averaged.update_parameters(model)

    if guard is None:
        step = 0
        while step < STEPS:
            for x, kind, number in DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                before(step)
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * rate(step)
                loss = loss_of(model, x, kind, number)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                after(step)
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        guarded = Guard(
            None,
            model,
            optimizer,
            data=dataset,
            batch_size=BATCH_SIZE,
            steps=STEPS,
            schedule=rate,
            clip=CLIP,
            **options,
        )
        guarded.keep(averaged=averaged)
        for x, kind, number in guarded.batches():
            step = guarded.attempted_step
            before(step)
            loss = loss_of(model, x, kind, number)
            loss.backward()
            guarded.update(loss)
            after(step)
        guarded.close()
    with torch.no_grad():
        return float(loss_of(model, *held_out))
