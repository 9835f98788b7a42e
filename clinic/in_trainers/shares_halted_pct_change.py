"""Windows of daily returns from `pct_change`, and on the day of a trading halt the feed has a price of 0.

The next return is infinite, and is in all windows that reach over that day: "LSTM loss nan, my data has no NaN", and
`isnull()` finds nothing. Mended by leaving out the windows that touch a halt.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, Subset

KIND = "loader"
CAUSE = "data"
OPS = ()
LIBRARY = None
STEPS = 600

WINDOW, AHEAD, HELD = 24, 10, 800


class Windows(Dataset):
    """Returns of a window, in percent, and the logarithm of the mean absolute return of the two weeks after it."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        days = 6000 + HELD + int(torch.randint(1500, (), generator=draw))
        level, levels = 0.0, []
        for shock in torch.randn(days, generator=draw).tolist():
            level = 0.98 * level + 0.22 * shock
            levels.append(level)
        spread = 0.015 * torch.tensor(levels).clamp(-2.5, 2.5).exp()
        price = 100 * (spread * torch.randn(days, generator=draw)).clamp(-0.5, 0.5).double().cumsum(0).exp()
        self.halts = (
            torch.randperm(days - HELD - 100, generator=draw)[: 2 + int(torch.randint(4, (), generator=draw))] + 40
        )
        price[self.halts] = 0.0
        self.returns = (100 * (price[1:] / price[:-1] - 1)).float()  # that is pct_change

    def __len__(self) -> int:
        return len(self.returns) - WINDOW - AHEAD + 1

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        past, future = self.returns[row : row + WINDOW], self.returns[row + WINDOW : row + WINDOW + AHEAD]
        return past[:, None], future.abs().mean().log()

    def touched(self) -> list[int]:
        hit = torch.zeros(len(self.returns), dtype=torch.bool)
        hit[self.halts] = True  # the return after the halt; that of the day itself is before it
        hit[self.halts - 1] = True
        return [row for row in range(len(self) - HELD) if hit[row : row + WINDOW + AHEAD].any()]


def bad_rows(seed: int) -> list[int]:
    return Windows(seed).touched()


class Volatility(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, past: Tensor) -> Tensor:
        return self.out(self.lstm(past)[0][:, -1]).squeeze(-1)


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    windows = Windows(seed)
    bad = set(windows.touched())
    count = len(windows) - HELD
    rows = [row for row in range(count) if not (twin and row in bad)]
    torch.manual_seed(seed)
    model = Volatility(width=48 + 8 * (seed % 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Subset(windows, rows), batch_size=64, shuffle=True)
    columns = zip(*(windows[row] for row in range(count + WINDOW + AHEAD, len(windows))), strict=True)
    held_past, held_truth = (torch.stack(column) for column in columns)

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(mse_loss(model(held_past), held_truth))

    before = held_out()
    model.train()
    if guard is not None:
        from resilient_train import Guard

        guarded = Guard(None, model, optimizer, data=loader, steps=STEPS, **guard)
        for past, truth in guarded.batches():
            loss = mse_loss(model(past), truth)
            loss.backward()
            guarded.update(loss)
    else:
        step = 0
        while step < STEPS:
            for past, truth in loader:
                optimizer.zero_grad()
                loss = mse_loss(model(past), truth)
                loss.backward()
                optimizer.step()
                step += 1
                if step == STEPS:
                    break
    return held_out(), before
