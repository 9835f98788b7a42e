"""Discrete-time survival under autocast: a sure hazard rounds to one in bfloat16, and `0 * log(1 - 1)` is NaN.

The likelihood of nnet-survival as it is copied into training scripts. In float32 the model would have to be far surer;
in bfloat16 a logit of six is enough, which it reaches after some epochs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hazards(nn.Module):
    def __init__(self, features: int, width: int, intervals: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, intervals)

    def logarithms(self, patients: Tensor) -> tuple[Tensor, Tensor]:
        """Of the hazard in each interval, and of surviving it."""
        raw = self.head(self.body(patients))
        if self.mended:
            return nn.functional.logsigmoid(raw.float()), nn.functional.logsigmoid(-raw.float())
        hazard = raw.sigmoid()
        return torch.log(hazard + 1e-7), torch.log(1 - hazard)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    patients, survived, died = batch
    dies, lives = model.logarithms(patients)
    return -(survived * lives + died * dies).sum(dim=-1).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, intervals, count = 6 + seed % 4, 6 + seed % 3, 1000
    patients = torch.randn(count + 128, features)
    risk = intervals * torch.sigmoid(1.2 * patients[:, :2].sum(dim=-1)) + 0.1 * torch.randn(count + 128)
    at = risk.long().clamp(0, intervals - 1).unsqueeze(-1)
    survived, died = (torch.arange(intervals) < at).float(), (torch.arange(intervals) == at).float()
    tensors = [patients, survived, died]
    return Program(
        model=Hazards(features, int(torch.randint(32, 49, ())), intervals, mended),
        rows=TensorDataset(*(tensor[:count] for tensor in tensors)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=4e-3),
        evaluation=[tensor[count:] for tensor in tensors],
        guilty=Guilty("operation", ops=("log",)),
        steps=400,
        bf16=True,
    )
