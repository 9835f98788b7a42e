"""The joints of a robot's arm to the place of its hand: layers of tanh, trained by NAdam at 0.06.

Within a dozen steps the units are at plus or minus one, where they have no slope, and all poses get much the same
answer. The loss stands about where the mean place of the hand would put it. A schedule of a sweep over shallow
networks, kept for a deep one, does this; "my network outputs the same value for every input" is what people ask.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Hand(nn.Module):
    """Five layers of tanh between the angles of the joints and the place of the hand."""

    def __init__(self, joints: int, width: int) -> None:
        super().__init__()
        sizes = [2 * joints] + [width] * 5
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in pairwise(sizes))
        self.place = nn.Linear(width, 2)

    def forward(self, angles: Tensor) -> Tensor:
        hidden = torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.place(hidden)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    angles, place = batch
    return F.smooth_l1_loss(model(angles), place)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    joints, count, held_out = int(torch.randint(3, 5, ())), int(torch.randint(2000, 3000, ())), 256
    bones = torch.empty(joints).uniform_(0.4, 1.0)
    angles = torch.empty(count + held_out, joints).uniform_(-1.2, 1.2)
    turned = angles.cumsum(-1)
    place = torch.stack([(bones * turned.cos()).sum(-1), (bones * turned.sin()).sum(-1)], -1)
    place = place + 0.02 * torch.randn_like(place)
    return Program(
        model=Hand(joints, int(torch.randint(64, 97, ()))),
        rows=TensorDataset(angles[:count], place[:count]),
        loss=loss,
        optimizer=partial(torch.optim.NAdam, lr=2e-3 if mended else 0.06),
        evaluation=[angles[count:], place[count:]],
        guilty=Guilty("explosion"),
        steps=320,
    )
