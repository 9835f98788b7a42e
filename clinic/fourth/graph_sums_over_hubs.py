"""A graph network that adds up what the neighbours say, on social graphs in which some people know half of the others.

Each layer multiplies by the degree, as does the sum at the end: after four layers the outputs, and soon after the
gradients, are in the millions, and plain SGD leaves for infinity with its first steps. The sum is what the paper
on isomorphism networks recommends, for molecules. The mend here is the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Layer(nn.Module):
    def __init__(self, inputs: int, width: int, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.net = nn.Sequential(nn.Linear(2 * inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, people: Tensor, knows: Tensor) -> Tensor:
        heard = knows @ people
        if self.mean:
            heard = heard / knows.sum(-1, keepdim=True).clamp(min=1)
        return self.net(torch.cat([people, heard], -1))


class Opinion(nn.Module):
    """What a whole group will decide."""

    def __init__(self, inputs: int, width: int, depth: int, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.layers = nn.ModuleList(Layer(width if i else inputs, width, mean) for i in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, people: Tensor, knows: Tensor) -> Tensor:
        for layer in self.layers:
            people = layer(people, knows)
        group = people.mean(1) if self.mean else people.sum(1)
        return self.head(group).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    people, knows, decided = batch
    return F.mse_loss(model(people, knows), decided)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    people, inputs = int(torch.randint(30, 51, ())), int(torch.randint(4, 9, ()))
    groups, held_out = int(torch.randint(500, 800, ())), 200
    model = Opinion(inputs, width=32, depth=int(torch.randint(3, 5, ())), mean=mended)

    count = groups + held_out
    sociable = torch.rand(count, people).pow(3)  # few hubs, many who know a handful
    chance = (0.05 + 1.2 * sociable[:, :, None] * sociable[:, None] + 0.3 * sociable.amax(1)[:, None, None] ** 8).clamp(
        max=0.95
    )
    knows = (torch.rand(count, people, people) < chance).float().triu(1)
    knows = knows + knows.transpose(1, 2)
    traits = torch.randn(count, people, inputs) + 0.8 * torch.randn(count, 1, inputs)
    influence = knows.sum(-1) / knows.sum((1, 2))[:, None]
    swayed = (influence[..., None] * traits).sum(1)
    decided = swayed @ torch.randn(inputs) + 0.5 * swayed[:, 0].abs()
    decided = (decided - decided.mean()) / decided.std() + 0.05 * torch.randn(count)
    return Program(
        model=model,
        rows=TensorDataset(traits[:groups], knows[:groups], decided[:groups]),
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
        evaluation=[traits[groups:], knows[groups:], decided[groups:]],
        guilty=Guilty("explosion"),
        batch_size=32,
        steps=240,
    )
