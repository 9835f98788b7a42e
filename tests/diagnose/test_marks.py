"""Rows that share the mark of bad ones, and what a mark is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from resilient_train import Guard
from resilient_train.extensions.diagnosis.rows import alike, nonfinite_fields, outlying_fields

OTHERS = [(torch.tensor([1.0, 2.0]), 0.0), (torch.tensor([-1.5, 0.5]), 0.0)] * 8


@pytest.mark.parametrize(
    ("bad", "row", "fields"),
    [
        ((torch.tensor([1.0, math.nan]), 0.0), (torch.tensor([math.inf, 1.0]), 0.0), ["element 0"]),
        ((torch.tensor([1.0, math.nan]), 0.0), (torch.tensor([1.0, 1.0]), math.nan), []),
        ((torch.tensor([1.0, 1e6]), 0.0), (torch.tensor([3e5, 1.0]), 0.0), ["element 0"]),
        ((torch.tensor([1.0, 1e6]), 0.0), (torch.tensor([9.0, 1.0]), 0.0), []),
        ((torch.tensor([1.0, 1.0]), 1e6), (torch.tensor([1.0, 1.0]), 1.0), []),  # a rare class
    ],
)
def test_a_row_is_like_another_where_it_is_as_far_out(bad: Any, row: Any, fields: list[str]) -> None:
    marks = nonfinite_fields(bad) or outlying_fields(bad, OTHERS, 4.0)
    assert [mark["field"] for mark in alike(row, marks)] == fields


def trained(y: Tensor, loss: Any) -> list[tuple[str, tuple[int, ...]]]:
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(None, model, optimizer, data=TensorDataset(x, y), batch_size=16, steps=60, objective=loss)
    for batch in guard.batches():
        guard.step(batch)
    return [(one.diagnosis.cause, one.diagnosis.rows) for one in guard.incidents]


def test_rows_of_one_mark_are_one_incident() -> None:
    y = torch.zeros(400, 1)
    y[[7, 150, 333]] = -9999.0
    assert trained(y, lambda model, batch: mse_loss(model(batch[0]), batch[1])) == [("data", (7, 150, 333))]


def test_rows_that_break_no_batch_are_not_looked_for() -> None:
    """NaN stands for a missing label, which the loss masks; its root breaks in every batch."""
    y = torch.zeros(400, 1)
    y[::8] = math.nan

    def loss(model: Any, batch: Any) -> Tensor:
        apart = (model(batch[0]) - batch[1].nan_to_num()).square()
        return torch.where(batch[1].isnan(), 0.0, apart).mean() + torch.sqrt(apart - apart).mean()

    assert sum(len(rows) for _, rows in trained(y, loss)) < 25
