"""A gated linear recurrence scales its input by sqrt(1 - decay^2), in bfloat16: a decay above 0.998 is rounded to one.

The root of zero has an infinite slope. Griffin and RecurrentGemma bound that derivative for this reason; people who
write the layer from the paper do not, and lose the run once a channel has learned to remember for long.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class GatedRecurrence(nn.Module):
    def __init__(self, features: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.enter = nn.Linear(features, width)
        self.input_gate = nn.Linear(features, width)
        self.decay_gate = nn.Linear(features, width)
        self.rate = nn.Parameter(torch.empty(width).uniform_(0.02, 0.2).expm1().log())
        self.head = nn.Linear(width, 1)

    def forward(self, series: Tensor) -> Tensor:
        entering = self.enter(series) * self.input_gate(series).sigmoid()
        log_decay = -nn.functional.softplus(self.rate) * self.decay_gate(series).sigmoid()
        if self.mended:
            decay = log_decay.float().exp()
            scale = (1 - decay.square()).clamp(min=1e-6).sqrt()
        else:
            decay = log_decay.exp().to(entering.dtype)
            scale = torch.sqrt(1 - decay * decay)  # guilty
        entering = scale * entering
        state = torch.zeros_like(entering[:, 0])
        for time in range(series.shape[1]):
            state = decay[:, time] * state + entering[:, time]
        return self.head(state).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    series, levels = batch
    return nn.functional.mse_loss(model(series).float(), levels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, length, count = 3 + seed % 3, 20 + 4 * (seed % 3), 800
    rain = torch.randn(count + 128, length, features)
    rain[..., 0] = (rain[..., 0] > 1).float() * 2
    levels = (rain[..., 0] * rain[..., 1]).sum(dim=1) / length**0.5
    return Program(
        model=GatedRecurrence(features, int(torch.randint(24, 40, ())), mended),
        rows=TensorDataset(rain[:count], levels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[rain[count:], levels[count:]],
        guilty=Guilty("operation", ops=("sqrt",)),
        steps=300,
        bf16=True,
    )
