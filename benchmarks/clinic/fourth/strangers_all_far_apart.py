"""A siamese network verifies speakers by a contrastive loss: root mean squares, so that both parts are distances.

Once it has learned well, a batch comes in which all strangers are farther apart than the margin. The second root is
then the root of exactly 0. The loss is finite, and its gradient is not: the known trap of "RMSE as a loss".
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Pairs = tuple[Tensor, Tensor, Tensor]


class SpeakerEncoder(nn.Module):
    """A time delay network with pooling over time."""

    def __init__(self, bins: int, width: int) -> None:
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv1d(bins, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=2, dilation=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, 12)

    def forward(self, utterance: Tensor) -> Tensor:
        embedding: Tensor = self.head(self.frames(utterance).mean(-1))
        return embedding


def distances(model: nn.Module, batch: Pairs) -> Tensor:
    one, other, _ = batch
    return F.pairwise_distance(model(one), model(other))


def loss(model: nn.Module, batch: Pairs, margin: float, floor: float) -> Tensor:
    apart, same = distances(model, batch), batch[2]
    pull, push = apart * same, F.relu(margin - apart) * ~same
    return root_mean_square(pull, floor) + root_mean_square(push, floor)


def root_mean_square(x: Tensor, floor: float) -> Tensor:
    return torch.sqrt(x.square().mean() + floor)  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    speakers, bins, frames = int(torch.randint(10, 16, ())), 16, 24
    rows, held_out = int(torch.randint(900, 1300, ())), 96
    voices = torch.randn(speakers, bins, 1)
    one, same = torch.randint(speakers, (rows + held_out,)), torch.rand(rows + held_out) < 0.5
    other = torch.where(same, one, (one + torch.randint(1, speakers, one.shape)) % speakers)
    speech = torch.randn(2, rows + held_out, bins, frames)
    first, second = voices[one] + 0.9 * speech[0], voices[other] + 0.9 * speech[1]
    margin = float(0.5 + 0.5 * torch.rand(()))
    return Program(
        model=SpeakerEncoder(bins, int(torch.randint(24, 41, ()))),
        rows=TensorDataset(first[:rows], second[:rows], same[:rows]),
        loss=partial(loss, margin=margin, floor=1e-6 if mended else 0.0),
        optimizer=partial(torch.optim.Adam, lr=7e-4),
        evaluation=(first[rows:], second[rows:], same[rows:]),
        guilty=Guilty("operation", ops=("sqrt",)),
        batch_size=16,
        steps=320,
    )
