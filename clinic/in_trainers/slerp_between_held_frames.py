"""Poses between two key frames by spherical interpolation, and some clips hold still: both keys are the same.

The angle is acos of 1 (or of a hair more), and the weights of `slerp` are 0 / 0: "slerp is nan for equal quaternions"
is reported for most that are written by hand. Mended by a straight line where the angle is small.
"""

import logging
import tempfile
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

KIND = "lightning"
CAUSE = "operation"
OPS = ("acos", "div")
LIBRARY = None
STEPS = 500

MARKERS, HELD = 10, 256


def bad_rows(seed: int) -> list[int]:
    return []


def slerp(p: Tensor, q: Tensor, share: Tensor) -> Tensor:
    cosine = (p * q).sum(-1, keepdim=True)
    angle = torch.acos(cosine)  # guilty
    weight_p, weight_q = torch.sin((1 - share) * angle), torch.sin(share * angle)
    return (weight_p * p + weight_q * q) / torch.sin(angle)  # guilty


def safe_slerp(p: Tensor, q: Tensor, share: Tensor) -> Tensor:
    cosine = (p * q).sum(-1, keepdim=True)
    near = cosine.abs() > 0.9995
    angle = torch.acos(cosine.masked_fill(near, 0.0))
    curved = (torch.sin((1 - share) * angle) * p + torch.sin(share * angle) * q) / torch.sin(angle)
    return torch.where(near, normalize(p + share * (q - p), dim=-1), curved)


class InBetween(L.LightningModule):
    def __init__(self, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.pose = nn.Sequential(
            nn.Linear(3 * MARKERS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)
        )

    def forward(self, first: Tensor, last: Tensor, share: Tensor, mended: bool) -> Tensor:
        p, q = normalize(self.pose(first), dim=-1), normalize(self.pose(last), dim=-1)
        return (safe_slerp if mended else slerp)(p, q, share)

    def loss(self, batch: list[Tensor], mended: bool) -> Tensor:
        first, last, share, truth = batch
        told = self(first, last, share, mended)
        return (1 - (told * truth).sum(-1).square()).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, self.mended)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rotate(q: Tensor, points: Tensor) -> Tensor:
    real, vector = q[:, None, :1], q[:, None, 1:].expand(-1, len(points), -1)
    points = points.expand(len(q), -1, -1)
    across = torch.linalg.cross(vector, points)
    return points + 2 * real * across + 2 * torch.linalg.cross(vector, across)


def clips(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1200, 2000, (), generator=draw)) + HELD
    skeleton = torch.randn(MARKERS, 3, generator=draw)
    p = normalize(torch.tensor([1.0, 0, 0, 0]) + 0.4 * torch.randn(count, 4, generator=draw), dim=-1)
    q = normalize(p + 0.5 * torch.randn(count, 4, generator=draw), dim=-1)
    share = torch.rand(count, 1, generator=draw)
    first = rotate(p, skeleton) + 0.03 * torch.randn(count, MARKERS, 3, generator=draw)
    last = rotate(q, skeleton) + 0.03 * torch.randn(count, MARKERS, 3, generator=draw)
    still = torch.randperm(count - HELD, generator=draw)[: count // 30]
    q[still], last[still] = p[still], first[still]  # the animator holds the key
    return [first.flatten(1), last.flatten(1), share, safe_slerp(p, q, share)]


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    columns = clips(seed)
    L.seed_everything(seed, verbose=False)
    module = InBetween(width=256 + 32 * (seed % 3), mended=twin)
    loader = DataLoader(TensorDataset(*(column[:-HELD] for column in columns)), batch_size=96, shuffle=True)

    def held_out() -> float:
        module.eval()
        with torch.no_grad():
            return float(module.loss([column[-HELD:] for column in columns], mended=True))

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
