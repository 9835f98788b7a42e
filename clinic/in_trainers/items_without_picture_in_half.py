"""Features of text and pictures, cached in float16 and normalized as they come; some items have no picture.

In half precision the 1e-12 that `normalize` guards the norm with is zero, as their rows are: 0 / 0 ("normalize is NaN
for zero vectors in fp16"). Mended by going to float32 before.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

KIND = "loader"
CAUSE = "operation"
OPS = ("normalize", "div")
LIBRARY = None
STEPS = 600

HELD = 256


def bad_rows(seed: int) -> list[int]:
    return []


class Rater(nn.Module):
    def __init__(self, texts: int, pictures: int, width: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.text, self.picture = nn.Linear(texts, width), nn.Linear(pictures, width)
        self.rating = nn.Sequential(nn.GELU(), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, text: Tensor, picture: Tensor) -> Tensor:
        if self.mended:
            text, picture = normalize(text.float(), dim=-1), normalize(picture.float(), dim=-1)
        else:
            text, picture = normalize(text, dim=-1).float(), normalize(picture, dim=-1).float()  # guilty
        both = torch.cat([self.text(text), self.picture(picture)], -1)
        return self.rating(both).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    text, picture, rating = batch
    return mse_loss(model(text, picture), rating)


def items(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1500, 2500, (), generator=draw)) + HELD
    themes = torch.randn(count, 6, generator=draw)
    texts, pictures = torch.randint(48, 96, (2,), generator=draw).tolist()
    text = themes @ torch.randn(6, texts, generator=draw) + 0.5 * torch.randn(count, texts, generator=draw)
    picture = themes @ torch.randn(6, pictures, generator=draw) + 0.5 * torch.randn(count, pictures, generator=draw)
    rating = 3.5 + (themes[:, 0] * 1.5).tanh() + 0.5 * themes[:, 1].sin() + 0.1 * torch.randn(count, generator=draw)
    picture[torch.randperm(count - HELD, generator=draw)[: count // 200]] = 0.0
    return [text.half(), picture.half(), rating]


def train(seed: int, guard: dict | None = None, twin: bool = False) -> tuple[float, float]:
    columns = items(seed)
    text, picture, rating = (column[-HELD:] for column in columns)
    torch.manual_seed(seed)
    model = Rater(text.shape[1], picture.shape[1], width=384 + 32 * (seed % 3), mended=twin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*(column[:-HELD] for column in columns)), batch_size=64, shuffle=True)

    def held_out() -> float:
        model.eval()
        model.mended = True
        with torch.no_grad():
            value = float(loss(model, [text, picture, rating]))
        model.mended = twin
        return value

    before = held_out()
    model.train()
    if guard is not None:
        from resilient_train import Guard

        guarded = Guard(None, model, optimizer, data=loader, objective=loss, steps=STEPS, **guard)
        for batch in guarded.batches():
            guarded.step(batch)
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
