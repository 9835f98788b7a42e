"""OneCycleLR with `div_factor=0.04`, by one who took it for a factor: the run begins at 25 times the highest rate.

`initial_lr = max_lr / div_factor`, says the documentation. The transformer is ruined before the rate comes down, finite
and at chance, and stays so. Mended with the default of 25.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

KIND = "loader"
CAUSE = "explosion"
OPS = ()
LIBRARY = None
STEPS = 400

LINES, LENGTH, HELD = 6, 12, 240


def bad_rows(seed: int) -> list[int]:
    return []


class JourneyNet(nn.Module):
    def __init__(self, stops: int, width: int) -> None:
        super().__init__()
        self.stop = nn.Embedding(stops, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.line = nn.Linear(width, LINES)

    def forward(self, stops: Tensor) -> Tensor:
        return self.line(self.encoder(self.stop(stops) + self.place).mean(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    stops, lines = batch
    return cross_entropy(model(stops), lines)


def journeys(seed: int) -> tuple[Tensor, Tensor, int]:
    """Walks over the stops of a town; each line has its own way to go from one to the next."""
    draw = torch.Generator().manual_seed(seed)
    count, stops = (
        int(torch.randint(1500, 2200, (), generator=draw)) + HELD,
        int(torch.randint(24, 36, (), generator=draw)),
    )
    ways = torch.stack([torch.randperm(stops, generator=draw) for _ in range(LINES)])
    lines = torch.randint(LINES, (count,), generator=draw)
    walk = [torch.randint(stops, (count,), generator=draw)]
    for _ in range(LENGTH - 1):
        lost = torch.rand(count, generator=draw) < 0.3
        walk.append(torch.where(lost, torch.randint(stops, (count,), generator=draw), ways[lines, walk[-1]]))
    return torch.stack(walk, 1), lines, stops


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    walks, lines, stops = journeys(seed)
    torch.manual_seed(seed)
    model = JourneyNet(stops, width=32 + 16 * (seed % 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=STEPS, div_factor=25 if twin else 0.04
    )
    loader = DataLoader(TensorDataset(walks[:-HELD], lines[:-HELD]), batch_size=32, shuffle=True)

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(loss(model, [walks[-HELD:], lines[-HELD:]]))

    before = held_out()
    model.train()
    if guard is not None:
        from resilient_train import Guard

        guarded = Guard(None, model, optimizer, data=loader, objective=loss, steps=STEPS, schedule=scheduler, **guard)
        for batch in guarded.batches():
            guarded.step(batch)
    else:
        step = 0
        while step < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if step == STEPS:
                    break
    return held_out(), before
