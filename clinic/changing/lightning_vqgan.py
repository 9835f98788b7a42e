"""A vector-quantized autoencoder, optimized by hand, whose discriminator and adversarial loss begin at update 150."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize, relu
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
STEPS = 300
CHANGE = [150]
DAMAGE = "weights"


class Codebook(nn.Module):
    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        nn.init.uniform_(self.embedding.weight, -0.5, 0.5)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        rows = normalize(z.permute(0, 2, 3, 1), dim=-1)  # codes of length one
        codes = normalize(self.embedding.weight, dim=-1)
        nearest = torch.cdist(rows.reshape(-1, rows.shape[-1]), codes).argmin(dim=1)
        chosen = codes[nearest].view(rows.shape)
        loss = mse_loss(chosen, rows.detach()) + 0.25 * mse_loss(rows, chosen.detach())
        return (rows + (chosen - rows).detach()).permute(0, 3, 1, 2), loss


class VQGAN(L.LightningModule):
    def __init__(self, disc_start: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.disc_start = disc_start
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.into = nn.Conv2d(16, 8, 1)
        self.codebook = Codebook(32, 8)
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1)
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 1, 3, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, codebook_loss = self.codebook(self.into(self.encoder(x)))
        return self.decoder(quantized), codebook_loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        generator_optimizer, discriminator_optimizer = self.optimizers()
        adversarial = self.disc_start is not None and self.global_step // 2 >= self.disc_start  # two steps each
        disc_factor = 1.0 if adversarial else 0.0

        fake, codebook_loss = self(x)
        loss = 10 * mse_loss(fake, x) + 0.1 * codebook_loss - 0.1 * disc_factor * self.discriminator(fake).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        generator_optimizer.step()

        hinge = relu(1 - self.discriminator(x)).mean() + relu(1 + self.discriminator(fake.detach())).mean()
        discriminator_loss = disc_factor * 0.5 * hinge
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        return (loss + discriminator_loss).detach()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        generator = [*self.encoder.parameters(), *self.into.parameters()]
        generator += [*self.codebook.parameters(), *self.decoder.parameters()]
        return [
            torch.optim.Adam(generator, lr=2e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        ]


class Damage(L.Callback):
    def __init__(self) -> None:
        self.done = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: list[Tensor], batch_idx: int
    ) -> None:
        if trainer.global_step // 2 == CHANGE[0] - 1 and not self.done:
            self.done = True
            with torch.no_grad():
                codes = pl_module.codebook.embedding.weight
                codes[3:] = codes[2].clone()


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    images = images[torch.randperm(len(images))]
    loader = DataLoader(TensorDataset(images[:1500]), batch_size=16, shuffle=True, drop_last=True)
    module = VQGAN(None if twin else CHANGE[0] - 1)
    callbacks: list[L.Callback] = []
    if twin and DAMAGE == "weights":
        callbacks.append(Damage())
    if guard is not None:
        import resilient_train

        callbacks.append(resilient_train.lightning.Guarded(**guard))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = L.Trainer(
            max_steps=2 * STEPS,  # each optimizer's step counts
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    module.eval()
    with torch.no_grad():
        return float(mse_loss(module(images[1500:])[0], images[1500:]))
