"""A variational autoencoder of digits; the weight of the KL term is 0 until update 200, where it becomes 1."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
STEPS = 500
CHANGE = [200]
DAMAGE = "rate"


class VAE(L.LightningModule):
    def __init__(self, kl_from: int | None, fault: bool) -> None:
        super().__init__()
        self.kl_from, self.fault = kl_from, fault
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 2 * 8))
        self.decoder = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 64))

    def terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = binary_cross_entropy_with_logits(self.decoder(z), x, reduction="sum") / len(x)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum() / len(x)
        return reconstruction, kl

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        reconstruction, kl = self.terms(batch[0])
        kl_weight = 1.0 if self.kl_from is not None and self.global_step >= self.kl_from else 0.0
        return reconstruction + kl_weight * kl

    def configure_optimizers(self) -> OptimizerLRScheduler:
        def factor(step: int) -> float:
            return 100.0 if self.fault and CHANGE[0] - 1 <= step < CHANGE[0] + 9 else 1.0

        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(seed: int, guard: dict[str, object] | None = None, twin: bool = False) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(seed, verbose=False)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    x = x[torch.randperm(len(x))]
    loader = DataLoader(TensorDataset(x[:1500]), batch_size=50, shuffle=True)
    module = VAE(None if twin else CHANGE[0] - 1, fault=twin and DAMAGE == "rate")
    callbacks: list[L.Callback] = []
    if guard is not None:
        import resilient_train

        callbacks.append(resilient_train.lightning.Guarded(**guard))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = L.Trainer(
            max_steps=STEPS,
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
    torch.manual_seed(seed)
    with torch.no_grad():
        reconstruction, kl = module.terms(x[1500:])
    return float(reconstruction if twin else reconstruction + kl)  # what was trained last
