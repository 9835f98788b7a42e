"""A run in TensorBoard: its numbers as curves, its incidents as texts."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from resilient_train import Guard

EXAMPLE = Path(__file__).parents[2] / "examples/tensorboard_writer.py"


def test_the_example_shows_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 3)
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    rows.tensors[0][7, 1] = torch.nan
    model = nn.Linear(3, 1)
    board = runpy.run_path(str(EXAMPLE))["TensorBoard"](tmp_path / "board")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(
        None, model, optimizer, data=rows, batch_size=8, steps=100, run_dir=tmp_path / "r", extensions=[board]
    )
    for x, y in guard.batches():
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        guard.update(loss)
    guard.close()
    shown = EventAccumulator(str(tmp_path / "board")).Reload()
    tags = shown.Tags()
    assert {"loss", "grad_norm", "lr"} <= {*tags["scalars"]}
    losses = shown.Scalars("loss")
    assert [one.step for one in losses][:2] == [11, 21]  # one attempt was refused
    assert losses[-1].value < losses[0].value
    assert {"incident 1 opened/text_summary", "incident 1 closed/text_summary"} <= {*tags["tensors"]}
