"""Shapes of galaxies by a small ConvNeXt, with an AdamW by hand whose decay is not multiplied by the learning rate.

Every step takes five percent from every weight, however small the rate is. Nothing is infinite and nothing jumps: the
weights are held near zero and the loss stands at the chance of a guess. Two definitions of decoupled decay are around,
and a value of 0.05 that is right in one is ruin in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class DecoupledAdam(torch.optim.Optimizer):
    """Adam, with decay apart from the slope."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, decay: float, with_rate: bool) -> None:
        super().__init__(weights, {"lr": lr, "decay": decay, "with_rate": with_rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(count=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
                state["count"] += 1
                state["mean"].lerp_(weight.grad, 0.1)
                state["square"].lerp_(weight.grad.square(), 0.001)
                mean = state["mean"] / (1 - 0.9 ** state["count"])
                square = state["square"] / (1 - 0.999 ** state["count"])
                weight.mul_(1 - group["decay"] * (group["lr"] if group["with_rate"] else 1.0))  # guilty
                weight.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


class Block(nn.Module):
    """A depthwise convolution, a norm over channels, and two linear layers, scaled by a small learned factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, image: Tensor) -> Tensor:
        state = self.norm(self.spread(image).permute(0, 2, 3, 1))
        state = self.scale * self.outer(F.gelu(self.inner(state)))
        return image + state.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A stem of patches, three blocks, and a head on the mean."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=3)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(image)).mean((2, 3))))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    image, shape = batch
    return F.cross_entropy(model(image), shape)


def galaxies(count: int) -> tuple[Tensor, Tensor]:
    """Round, flat, barred and with arms."""
    shape, turn = torch.randint(4, (count, 1, 1)), torch.pi * torch.rand(count, 1, 1)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij")
    along, across = x * turn.cos() + y * turn.sin(), y * turn.cos() - x * turn.sin()
    far = (along.square() + across.square()).sqrt()
    flat = (along.square() + 6 * across.square()).sqrt()
    bar = (-3 * far).exp() + 0.7 * ((across.abs() < 0.12) & (along.abs() < 0.6)).float()
    arms = (-2 * far).exp() * (1 + torch.cos(2 * torch.atan2(across, along) + 8 * far))
    kinds = torch.stack([(-3 * far).exp(), (-3 * flat).exp(), bar, arms], dim=1)
    image = kinds.gather(1, shape.unsqueeze(1).expand(-1, 1, 24, 24))
    return 2 * image - 0.5 + 0.4 * torch.randn(image.shape), shape.flatten()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    data, held_out = galaxies(int(torch.randint(1000, 1500, ()))), galaxies(300)
    return Program(
        model=ConvNeXt(int(torch.randint(20, 28, ())), 4),
        rows=TensorDataset(*data),
        loss=loss,
        optimizer=partial(DecoupledAdam, lr=1e-3, decay=0.05, with_rate=mended),
        evaluation=list(held_out),
        guilty=Guilty("optimizer"),
        steps=300,
    )
