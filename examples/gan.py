"""Two losses, two optimizers: how a GAN goes under a guard.

    python examples/gan.py             # both below, one after the other
    python examples/gan.py in_turn     # as tutorials write it: one optimizer steps, then the other
    python examples/gan.py together    # both losses added: both optimizers step at once, and an update can be replayed

A guard makes one update of a batch, which lands as a whole or not at all, also where its optimizers step in turn. To
let them step together ("simultaneous" instead of "alternating" gradient steps), compute both losses with the same
weights, cut each off from the weights that it is not for, and add them up.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

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


def adam(network: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of one network."""
    return torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.999))


def in_turn(run_dir: Path) -> nn.Module:
    """Step the critic, and then the generator against the critic that has just changed."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    gan = Gan()
    generator, critic = accelerator.prepare(gan.generator, gan.critic)  # each alone: on several ranks a DDP for each
    of_generator, of_critic = adam(generator), adam(critic)
    guard = Guard(
        accelerator,
        nn.ModuleDict({"generator": generator, "critic": critic}),
        [of_generator, of_critic],
        data=Ring(),
        batch_size=BATCH_SIZE,
        steps=STEPS,
        run_dir=run_dir,
    )
    for real in guard.batches():
        fake = generator(torch.randn(len(real), NOISE, device=real.device))
        loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        accelerator.backward(loss)
        guard.update(loss, optimizer=of_critic)  # the critic has stepped when this returns
        loss = softplus(-critic(fake)).mean()
        accelerator.backward(loss)
        guard.update(loss, optimizer=of_generator)  # one update with the step before: it lands as a whole or not
    guard.close()  # reports how the run ended; without it, the exit of the program does
    return gan


def together(run_dir: Path) -> nn.Module:
    """Add the losses: one update, which both optimizers make or neither."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    gan = Gan()
    model, *optimizers = accelerator.prepare(gan, adam(gan.generator), adam(gan.critic))
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
    guard.close()
    return gan


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
            model = {"in_turn": in_turn, "together": together}[name](Path(folder) / name)
            assert all(bool(weight.isfinite().all()) for weight in model.parameters())
            print(f"{name}: weights finite, points lie {distance(model):.3f} from the circle", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
