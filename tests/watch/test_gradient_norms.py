"""Which gradients are not finite, by name, and the norms of all of them, layer by layer."""

from __future__ import annotations

import csv
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from resilient_train import Guard
from resilient_train.watch.layout import nonfinite


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        ({"a.weight": 1.0, "b.weight": 2.0}, ""),
        ({"a.weight": nan, "b.weight": inf}, "no gradient is finite"),
        ({"a.weight": nan, "b.weight": 2.0}, "the gradient of `a.weight` is not finite (1 of 2 weights)"),
        (
            {"a.weight": nan, "b.weight": nan, "b.bias": inf, "c.weight": 1.0},
            "the gradients of `a.weight`, `b.weight` and `b.bias` are not finite "
            "(3 of 4 weights, from `b` on backward)",
        ),
        (
            {"a.weight": 1.0, "b.weight": nan, "c": nan, "d": nan, "e": nan},
            "the gradients of `b.weight`, `c`, `d` and 1 more are not finite (4 of 5 weights)",
        ),
    ],
)
def test_the_weights_are_named(norms: dict[str, float], said: str) -> None:
    """A few of them, how many there are, and where it began if that shows."""
    assert nonfinite(norms) == said


class Deep(nn.Module):
    """The gradient breaks between `second` and `third`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs).tanh())
        found: Tensor = self.third(hidden + (inputs.sum(-1, keepdim=True) * hidden).abs().pow(0.5))
        return found


def test_a_run_names_them_without_a_replay_and_records_the_norms(tmp_path: Path) -> None:
    """Where the loop makes the loss: in the evidence of the incident, next to its table, and in what is uploaded."""
    torch.manual_seed(0)
    rows = torch.randn(64, 3)
    rows[40] = 0.0
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    guard = Guard(None, model, optimizer, data=rows, batch_size=8, steps=60, run_dir=tmp_path / "run")
    reported: set[str] = set()
    for batch in guard.batches():
        loss = model(batch).square().mean()
        loss.backward()
        guard.update(loss)
        reported |= (report.values if (report := guard.report()) else {}).keys()
    first = guard.incidents[0]
    assert first.anomaly.evidence.endswith("are not finite (4 of 6 weights, from `second` on backward)")
    with (tmp_path / "run" / "incidents" / "0001-layers.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["first"] for line in lines if line["tick"] == str(first.anomaly.tick)] == ["nan"]
    assert all(float(line["third"]) > 0 for line in lines)
    assert {"grad_norm/first", "grad_norm/second", "grad_norm/third"} <= reported
