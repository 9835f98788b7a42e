"""Two losses, two optimizers: how a GAN goes under a guard.

    python examples/gan.py             # both below, one after the other
    python examples/gan.py in_turn     # as tutorials write it: the guard says at the first batch that it cannot
    python examples/gan.py together    # both losses added, one guard with both optimizers: it trains

A guard makes one update of a batch, which lands as a whole or not at all. So a loop that steps the discriminator, and
then the generator against the discriminator that it has just changed, is not supported. What is: compute both losses
with the same weights, cut each off from the weights that it is not for, add them up, and let both optimizers step
together ("simultaneous" instead of "alternating" gradient steps).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import Dataset

from resilient_train import Guard

STEPS, BATCH_SIZE, NOISE = 800, 64, 4


class Ring(Dataset[Tensor]):
    """Points around a circle; two are rotten."""

    def __init__(self, rows: int = 32768) -> None:
        numbers = torch.Generator().manual_seed(0)
        angle = 2 * torch.pi * torch.rand(rows, generator=numbers)
        self.points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(rows, 2, generator=numbers)
        self.points[[7, 2048]] = torch.nan

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, row: int) -> Tensor:
        return self.points[row]


class Gan(nn.Module):
    """Both networks as one module: what is guarded, and what rewinds, is the weights of one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.critic.append(nn.Linear(64, 1))

    def forward(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each network, each with a gradient for its own weights only."""
        fake = self.generator(torch.randn(len(real), NOISE, device=real.device))
        loss_of_critic = softplus(-self.critic(real)).mean() + softplus(self.critic(fake.detach())).mean()
        as_it_is = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        loss_of_generator = softplus(-functional_call(self.critic, as_it_is, fake)).mean()
        return loss_of_critic, loss_of_generator


def build(accelerator: Accelerator) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Build the model and an optimizer for each half of it."""
    torch.manual_seed(0)
    model = Gan()
    halves = (model.generator, model.critic)
    optimizers = [torch.optim.Adam(half.parameters(), lr=1e-3, betas=(0.5, 0.999)) for half in halves]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    return model, optimizers


def in_turn(run_dir: Path) -> None:
    """Hand over one loss after the other: refused with a clear line."""
    accelerator = Accelerator(cpu=True)
    model, optimizers = build(accelerator)
    guard = Guard(accelerator, model, optimizers, data=Ring(), batch_size=BATCH_SIZE, steps=STEPS, run_dir=run_dir)
    for real in guard.batches():
        loss_of_critic, _ = model(real)
        accelerator.backward(loss_of_critic)
        guard.update(loss_of_critic)
        _, loss_of_generator = model(real)
        accelerator.backward(loss_of_generator)
        guard.update(loss_of_generator)


def together(run_dir: Path) -> Any:
    """Add the losses: one update, which both optimizers make or neither."""
    accelerator = Accelerator(cpu=True)
    model, optimizers = build(accelerator)
    guard = Guard(
        accelerator,
        model,
        optimizers,
        data=Ring(),
        batch_size=BATCH_SIZE,
        steps=STEPS,
        objective=lambda model, real: sum(model(real)),
        run_dir=run_dir,
    )
    for real in guard.batches():
        guard.step(real)
    return accelerator.unwrap_model(model)


@torch.no_grad()
def distance(model: nn.Module) -> float:
    """Measure how far generated points lie from the circle, on average; untrained ones lie about 1 away."""
    torch.manual_seed(1)
    points: Tensor = model.get_submodule("generator")(torch.randn(2000, NOISE))
    return float((points.norm(dim=1) - 1).abs().mean())


def main(names: list[str]) -> None:
    """Run what is named."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ["in_turn", "together"]:
            print(f"\n{name}", flush=True)
            if name == "in_turn":
                try:
                    in_turn(Path(folder) / name)
                except Exception as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
            else:
                model = together(Path(folder) / name)
                assert all(bool(weight.isfinite().all()) for weight in model.parameters())
                print(f"{name}: weights finite, points lie {distance(model):.3f} from the circle", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
