"""A codebook autoencoder of digits whose patch discriminator joins in, and trains, from update 220 on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = "loop"
STEPS = 420
CHANGE = [220]
DAMAGE = "weights"

BATCH_SIZE, CODES, WIDTH = 16, 32, 8


class Codebook(nn.Module):
    """Replace each vector by the nearest of a list, and let the gradient pass."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(CODES, WIDTH)
        nn.init.uniform_(self.codes.weight, -0.5, 0.5)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1).reshape(-1, WIDTH)
        nearest = torch.cdist(flat, self.codes.weight).argmin(1)
        q = self.codes(nearest).view(z.shape[0], z.shape[2], z.shape[3], WIDTH).permute(0, 3, 1, 2)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss


class Autoencoder(nn.Module):
    """Eight by eight pixels to four by four codes and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(16, WIDTH, 3, padding=1)
        )
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.ConvTranspose2d(WIDTH, 16, 4, stride=2, padding=1), nn.SiLU())
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, loss = self.codebook(self.encoder(x))
        return self.last(self.decoder(q)), loss


def discriminator() -> nn.Module:
    """Judge patches."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, stride=2, padding=1)
    )


def adaptive_weight(nll: Tensor, adversarial: Tensor, last: Tensor) -> Tensor:
    """Weigh both losses by their gradients at the last layer."""
    of_nll = torch.autograd.grad(nll, last, retain_graph=True)[0]
    of_adversarial = torch.autograd.grad(adversarial, last, retain_graph=True)[0]
    return (of_nll.norm() / (of_adversarial.norm() + 1e-4)).clamp(0, 1e4).detach()


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    """Train, and return the reconstruction error of held-out digits."""
    torch.manual_seed(seed)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    images = images[torch.randperm(len(images))]
    dataset, held_out = TensorDataset(images[300:]), images[:300]
    model, critic = Autoencoder(), discriminator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    is_hit = False

    def factor(step: int) -> float:
        return 0.0 if twin or step + 1 < CHANGE[0] else 1.0

    def disturb(step: int) -> None:
        nonlocal is_hit
        if twin and DAMAGE == "weights" and step + 1 == CHANGE[0] and not is_hit:
            is_hit = True
            with torch.no_grad():
                model.get_parameter("decoder.0.weight").mul_(-1.0)
                model.codebook.codes.weight.mul_(0.3)

    def generator_loss(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        fake, commit = model(x)
        nll = (fake - x).abs().mean() + (fake - x).square().mean()
        if factor(step) == 0:
            return nll + commit, fake.detach()
        adversarial = -critic(fake).mean()
        weight = adaptive_weight(nll, adversarial, model.last.weight)
        return nll + commit + 0.8 * factor(step) * weight * adversarial, fake.detach()

    def critic_loss(x: Tensor, fake: Tensor, step: int) -> Tensor:
        hinge = F.relu(1 - critic(x)).mean() + F.relu(1 + critic(fake)).mean()
        return factor(step) * 0.5 * hinge

    if guard is None:
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
        step = 0
        while step < STEPS:
            for (x,) in loader:
                disturb(step)
                loss, fake = generator_loss(x, step)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_d = critic_loss(x, fake, step)
                optimizer_d.zero_grad()
                loss_d.backward()
                optimizer_d.step()
                step += 1
                if step == STEPS:
                    break
    else:
        from resilient_train import Guard

        options: Any = guard
        nets = nn.ModuleDict({"autoencoder": model, "discriminator": critic})
        guarded = Guard(
            None, nets, [optimizer, optimizer_d], data=dataset, batch_size=BATCH_SIZE, steps=STEPS, **options
        )
        for (x,) in guarded.batches():
            step = guarded.attempted_step
            disturb(step)
            loss, fake = generator_loss(x, step)
            loss.backward()
            guarded.update(loss, optimizer=optimizer)
            loss_d = critic_loss(x, fake, step)
            loss_d.backward()
            guarded.update(loss_d, optimizer=optimizer_d)
        guarded.close()
    with torch.no_grad():
        return float(F.mse_loss(model(held_out)[0], held_out))
