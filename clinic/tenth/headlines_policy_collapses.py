"""Which headline a reader is shown, by policy gradients (REINFORCE) without a baseline, and Adam at 0.1.

The reward is minutes read, so whatever was drawn is made more likely. At this rate a few updates make the softmax sure
of one headline for everybody; its slope vanishes and nothing else is ever tried. No number looks broken. Asked as "my
policy always picks the same action", "entropy drops to zero at once".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Editor(nn.Module):
    """A distribution over headlines for every reader."""

    def __init__(self, features: int, width: int, headlines: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, headlines)
        )

    def forward(self, readers: Tensor) -> Categorical:
        return Categorical(logits=self.layers(readers))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    readers, minutes = batch
    policy = model(readers)
    if not model.training:  # all minutes are known there: what the policy earns on average
        return -(policy.probs * minutes).sum(dim=-1).mean()
    shown = policy.sample()
    earned = minutes.gather(1, shown.unsqueeze(1)).squeeze(1)
    return -(policy.log_prob(shown) * earned).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, headlines, count = 6 + seed % 4, 4 + seed % 3, 1600
    readers = torch.randn(count + 400, features)
    tastes = torch.randn(headlines, features)
    tastes = 2.5 * tastes / tastes.norm(dim=-1, keepdim=True)
    expected = 6 * torch.sigmoid(readers @ tastes.T - 1.5)
    minutes = expected * (0.5 + torch.rand(count + 400, headlines))
    return Program(
        model=Editor(features, 32, headlines),
        rows=TensorDataset(readers[:count], minutes[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3 if mended else 0.1),  # guilty
        evaluation=[readers[count:], minutes[count:]],
        guilty=Guilty("optimizer"),
        batch_size=64,
        steps=400,
    )
