"""VICReg by Lightning, with the base rate of the paper (0.3 for LARS) handed to plain SGD with momentum.

Its terms are weighted by 25 and grow with the square and the fourth power of the embeddings: "VICReg loss explodes" and
"all embeddings equal" are answered with LARS, or with a rate a hundred times lower and a clip.
"""

import logging
import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, relu
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
CAUSE = "explosion"
OPS = ()
LIBRARY = None
STEPS = 600

FEATURES, HELD = 32, 256


def bad_rows(seed: int) -> list[int]:
    return []


def variance_and_covariance(z: Tensor) -> tuple[Tensor, Tensor]:
    z = z - z.mean(0)
    spread = (z.var(0) + 1e-4).sqrt()
    covariance = z.T @ z / (len(z) - 1)
    covariance = covariance - torch.diag(covariance.diagonal())
    return relu(1 - spread).mean(), covariance.square().sum() / z.shape[1]


class VICReg(L.LightningModule):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width))
        self.expander = nn.Sequential(nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 48))

    def loss(self, one: Tensor, other: Tensor) -> Tensor:
        a, b = self.expander(self.encoder(one)), self.expander(self.encoder(other))
        (variance_a, covariance_a), (variance_b, covariance_b) = variance_and_covariance(a), variance_and_covariance(b)
        return 25 * mse_loss(a, b) + 25 * (variance_a + variance_b) / 2 + covariance_a + covariance_b

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9, weight_decay=1e-6)


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1200, 1800, (), generator=draw)) + HELD
    kinds = 2 * torch.randn(12, FEATURES, generator=draw)
    things = kinds[torch.randint(12, (count,), generator=draw)] + torch.randn(count, FEATURES, generator=draw)
    one = things + 0.3 * torch.randn(things.shape, generator=draw)
    other = things + 0.3 * torch.randn(things.shape, generator=draw)
    L.seed_everything(seed, verbose=False)
    module = VICReg(width=160 + 32 * (seed % 3), rate=2e-3 if twin else 0.3)
    loader = DataLoader(TensorDataset(one[:-HELD], other[:-HELD]), batch_size=128, shuffle=True, drop_last=True)

    def held_out() -> float:
        module.eval()
        with torch.no_grad():
            return float(module.loss(one[-HELD:], other[-HELD:]))

    before = held_out()
    module.train()
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
    return held_out(), before
