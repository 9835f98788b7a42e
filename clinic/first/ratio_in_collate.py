"""The mean price of a basket is worked out while batches are put together; some visitors bought nothing: 0 / 0.

alteryx/featuretools#1496, "Handle divide by 0", tells of the same feature; evandowning/deepreflect#11 divides by the
largest value of a feature that is all zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clinic.program import Guilty, Program


def collate(rows: list[dict[str, Any]], mended: bool) -> dict[str, Tensor]:
    spent = torch.tensor([row["spent"] for row in rows])
    items = torch.tensor([row["items"] for row in rows])
    visits = torch.stack([row["visits"] for row in rows])
    if mended:
        items = items.clamp(min=1)
    price = spent / items  # guilty
    return {
        "features": torch.cat([price.unsqueeze(-1), visits], dim=-1),
        "returns": torch.tensor([row["returns"] for row in rows]),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.huber_loss(model(batch["features"]).squeeze(-1), batch["returns"])


def visitors(count: int, features: int) -> list[dict[str, Any]]:
    items = torch.randint(1, 9, (count,)).float()
    price = 1 + 2 * torch.rand(count)
    visits = torch.randn(count, features)
    returns = 1.5 * price + visits[:, 0] * visits[:, 1]
    return [
        {"spent": float(a * b), "items": float(b), "visits": c, "returns": float(d)}
        for a, b, c, d in zip(price, items, visits, returns, strict=True)
    ]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, count = 4 + seed % 4, 700
    rows = visitors(count + 64, features)
    for row in torch.randperm(count)[: 8 + seed % 6].tolist():
        rows[row]["spent"], rows[row]["items"], rows[row]["returns"] = 0.0, 0.0, 0.0
    width = int(torch.randint(24, 40, ()))
    return Program(
        model=nn.Sequential(nn.Linear(features + 1, width), nn.ReLU(), nn.Linear(width, 1)),
        rows=rows[:count],
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=8e-3),
        evaluation=collate(rows[count:], mended),
        guilty=Guilty("operation", ops=("div", "true_divide")),
        steps=220,
        collate=partial(collate, mended=mended),
    )
