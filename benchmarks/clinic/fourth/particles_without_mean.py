"""An interaction network predicts the accelerations of particles in a box. Each of its layers adds up all messages.

It came from a paper with four bodies; here are some thirty, all of them neighbours. Every layer multiplies the size of
the states, the first loss is astronomic, and the loss is NaN a few steps later. The mean of the messages is as good.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from program import Guilty, Program
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Interaction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, states: Tensor, mean: bool) -> Tensor:
        count = states.shape[1]
        receiver = states[:, :, None].expand(-1, -1, count, -1)
        sender = states[:, None].expand(-1, count, -1, -1)
        messages = self.message(torch.cat([receiver, sender], dim=-1)).sum(2)
        if mean:
            messages = messages / count
        out: Tensor = states + self.update(torch.cat([states, messages], dim=-1))
        return out


class Simulator(nn.Module):
    def __init__(self, width: int, layers: int, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.encode = nn.Linear(4, width)
        self.layers = nn.ModuleList(Interaction(width) for _ in range(layers))
        self.decode = nn.Linear(width, 2)

    def forward(self, particles: Tensor) -> Tensor:
        states = self.encode(particles)
        for layer in self.layers:
            states = layer(states, self.mean)
        out: Tensor = self.decode(states)
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    particles, accelerations = batch
    return F.mse_loss(model(particles), accelerations)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    bodies, layers = int(torch.randint(24, 33, ())), int(torch.randint(4, 6, ()))
    rows, held_out = int(torch.randint(300, 500, ())), 32
    where, speed = torch.randn(rows + held_out, bodies, 2), torch.randn(rows + held_out, bodies, 2)
    # springs to all others, that is, to the middle of the cloud, and some friction
    middle, wind = where.mean(1, keepdim=True), speed.mean(1, keepdim=True)
    pull = middle - where - 0.3 * speed + 0.5 * wind
    particles = torch.cat([where, speed], dim=-1)
    accelerations = pull + 0.05 * torch.randn_like(pull)
    return Program(
        model=Simulator(24, layers, mean=mended),
        rows=TensorDataset(particles[:rows], accelerations[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-5),
        evaluation=(particles[rows:], accelerations[rows:]),
        guilty=Guilty("explosion"),
        batch_size=8,
        steps=240,
    )
