"""A minimal GRU as a parallel scan: h = cumprod(a) * cumsum(b / cumprod(a)), as the recurrence is unrolled on paper.

The product of the gates over a recording shrinks with every step. While the gates are near what they are drawn with
the quotient is harmless; loud recordings, and gates that learn to forget, bring the product below 1e-19, and the slope
of the quotient, which has its square below the line, runs over (the loss itself is still finite). The authors therefore
give a scan in logarithms; the short formula is what circulates.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class MinGRU(nn.Module):
    def __init__(self, channels: int, width: int, classes: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.gate, self.candidate = nn.Linear(channels, width), nn.Linear(channels, width)
        nn.init.constant_(self.gate.bias, -2.5)  # to remember at first
        self.head = nn.Linear(width, classes)

    def scan(self, keep: Tensor, fresh: Tensor) -> Tensor:
        if self.mended:
            state, states = torch.zeros_like(fresh[:, 0]), []
            for t in range(keep.shape[1]):
                state = keep[:, t] * state + fresh[:, t]
                states.append(state)
            return torch.stack(states, 1)
        kept = torch.cumprod(keep, 1)  # guilty
        return kept * torch.cumsum(torch.div(fresh, kept), 1)  # guilty

    def forward(self, signal: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(signal))
        states = self.scan(1 - gate, gate * torch.tanh(self.candidate(signal)))
        return self.head(states.mean(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    signal, fault = batch
    return F.cross_entropy(model(signal), fault)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, channels, length = int(torch.randint(3, 5, ())), 4, int(torch.randint(68, 76, ()))
    rows, held_out = 800, 128
    fault = torch.randint(classes, (rows + held_out,))
    speed = 0.15 + 0.25 * torch.arange(classes)[fault].view(-1, 1, 1)
    phase = 6.28 * torch.rand(rows + held_out, 1, channels)
    offset = 0.6 * torch.randn(classes, 1, channels)[fault]
    wave = offset + torch.sin(speed * torch.arange(length).view(1, -1, 1) + phase)
    loud = torch.exp(0.3 * torch.randn(rows + held_out, 1, 1))
    signal = loud * (wave + 0.4 * torch.randn(rows + held_out, length, channels))
    return Program(
        model=MinGRU(channels, int(torch.randint(20, 29, ())), classes, mended),
        rows=TensorDataset(signal[:rows], fault[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        evaluation=[signal[rows:], fault[rows:]],
        guilty=Guilty("overflow", ops=("div", "cumprod")),
        steps=200,
    )
