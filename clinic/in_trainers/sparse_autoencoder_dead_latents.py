"""A sparse autoencoder of a model's activations, with Adam at a rate of 0.1: soon 99 in 100 latents never fire.

The loss falls at first and then stands still, and all is finite: "all features dead in my SAE", which guides on sparse
autoencoders answer with a lower rate (and a warm-up of the penalty).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.utils.data import DataLoader, TensorDataset

KIND = "loader"
CAUSE = "explosion"
OPS = ()
LIBRARY = None
STEPS = 600

HELD = 512


def bad_rows(seed: int) -> list[int]:
    return []


class SparseAutoencoder(nn.Module):
    def __init__(self, width: int, latents: int) -> None:
        super().__init__()
        self.encode = nn.Linear(width, latents)
        self.decode = nn.Linear(latents, width)
        nn.init.orthogonal_(self.decode.weight)
        nn.init.zeros_(self.encode.bias)
        nn.init.zeros_(self.decode.bias)
        self.encode.weight.data = 0.3 * self.decode.weight.data.T.clone()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latents = relu(self.encode(x - self.decode.bias))
        return self.decode(latents), latents


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (x,) = batch
    told, latents = model(x)
    return (told - x).square().sum(-1).mean() + 0.04 * latents.abs().sum(-1).mean()


def activations(seed: int) -> tuple[Tensor, int]:
    draw = torch.Generator().manual_seed(seed)
    width = int(torch.randint(40, 56, (), generator=draw))
    count = int(torch.randint(6000, 9000, (), generator=draw)) + HELD
    features = nn.functional.normalize(torch.randn(2 * width, width, generator=draw), dim=-1)
    on = torch.rand(count, 2 * width, generator=draw) < 0.03
    strength = torch.rand(count, 2 * width, generator=draw) + 0.5
    return (on * strength) @ features + 0.02 * torch.randn(count, width, generator=draw), width


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    x, width = activations(seed)
    torch.manual_seed(seed)
    model = SparseAutoencoder(width, latents=12 * width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if twin else 0.1)
    loader = DataLoader(TensorDataset(x[:-HELD]), batch_size=320, shuffle=True)

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(loss(model, [x[-HELD:]]))

    before = held_out()
    model.train()
    if guard is not None:
        from resilient_train import Guard

        guarded = Guard(None, model, optimizer, data=loader, steps=STEPS, **guard)
        for batch in guarded.batches():
            now = loss(model, batch)
            now.backward()
            guarded.update(now)
    else:
        step = 0
        while step < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    return held_out(), before
