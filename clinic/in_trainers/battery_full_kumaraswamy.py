"""The state of charge of batteries under torch's Kumaraswamy distribution, and a charger keeps some at exactly 100 %.

The support includes 0 and 1, so nothing is refused, but the slope of a power of 0 is y / x = 0 / 0 in its transform
("log_prob of Kumaraswamy is nan at the boundary"). Mended by the density in logarithms, of shares kept below 1.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributions import Kumaraswamy
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

KIND = "loader"
CAUSE = "operation"
OPS = ("div",)
LIBRARY = "torch/distributions/transforms.py"
STEPS = 600

FEATURES, HELD = 12, 256


def bad_rows(seed: int) -> list[int]:
    return []


class ChargeNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = softplus(self.net(x) + 1).add(0.05).unbind(-1)
        return a, b


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Nats for a tenth of the range."""
    x, share = batch
    return math.log(10) - Kumaraswamy(*model(x)).log_prob(share).mean()


def mended_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, share = batch
    a, b = model(x)
    log_share = share.clamp(0.001, 0.999).log()
    log_prob = a.log() + b.log() + (a - 1) * log_share + (b - 1) * (-torch.expm1(a * log_share)).clamp(min=1e-12).log()
    return math.log(10) - log_prob.mean()


def batteries(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1500, 2500, (), generator=draw)) + HELD
    x = torch.randn(count, FEATURES, generator=draw)
    weights = torch.randn(FEATURES, generator=draw) / FEATURES**0.5
    share = (1.2 * x @ weights - 0.3 + 0.1 * torch.randn(count, generator=draw)).sigmoid()
    charging = torch.randperm(count - HELD, generator=draw)[: count // 200]
    share[charging] = 1.0
    x[charging] += 0.5 * weights
    return x, share


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    x, share = batteries(seed)
    torch.manual_seed(seed)
    model = ChargeNet(width=288 + 32 * (seed % 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(x[:-HELD], share[:-HELD]), batch_size=128, shuffle=True)
    objective = mended_loss if twin else loss

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(mended_loss(model, [x[-HELD:], share[-HELD:]]))

    before = held_out()
    model.train()
    if guard is not None:
        from resilient_train import Guard

        guarded = Guard(None, model, optimizer, data=loader, objective=objective, steps=STEPS, **guard)
        for batch in guarded.batches():
            guarded.step(batch)
    else:
        step = 0
        while step < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                objective(model, batch).backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    return held_out(), before
