"""Blood values of patients from a laboratory's export, parsed row by row: now and then one reads "<0.5".

"ValueError: could not convert string to float: '<0.5'" comes in the middle of the first epoch, and the run is over.
What is below the limit of detection is written so by all laboratories; others write "haemolytic", or a comma. Mended
by taking the limit itself, and the middle of the values where there is none.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program


class Export(Dataset[tuple[Tensor, Tensor]]):
    """Lines as they are in the file: values, and at the end whether it was a sepsis."""

    def __init__(self, values: Tensor, sepsis: Tensor) -> None:
        self.lines = [
            ";".join(f"{value:.2f}" for value in row) + f";{outcome:.0f}"
            for row, outcome in zip(values.tolist(), sepsis.tolist(), strict=True)
        ]
        self.mended = False

    def put(self, row: int, column: int, text: str) -> None:
        cells = self.lines[row].split(";")
        cells[column] = text
        self.lines[row] = ";".join(cells)

    def __len__(self) -> int:
        return len(self.lines)

    def number(self, cell: str) -> float:
        if self.mended:
            cell = cell.lstrip("<").replace(",", ".")
            cell = "3.00" if cell == "haemolytic" else cell
        return float(cell)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        cells = [self.number(cell) for cell in self.lines[row].split(";")]
        return torch.tensor(cells[:-1]), torch.tensor(cells[-1])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    values, sepsis = batch
    return nn.functional.binary_cross_entropy_with_logits(model(values).squeeze(-1), sepsis)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    values_each, count = 10 + seed % 4, 3200
    rows = count + 128
    states = torch.randn(rows, values_each)
    risk = 2.5 * states[:, 0] - 2 * states[:, 1] * states[:, 2] + states @ torch.randn(values_each)
    sepsis = (risk + 0.5 * torch.randn(rows) > 0).float()
    values = 3 * torch.exp(0.4 * states)
    export = Export(values[:count], sepsis[:count])
    export.mended = mended
    bad = torch.randperm(count)[: 5 + seed % 5].sort().values.tolist()
    for row in bad:
        text = ("<0.50", "<1.00", "haemolytic", "2,75")[int(torch.randint(4, ()))]
        export.put(row, int(torch.randint(values_each, ())), text)
    width = int(torch.randint(48, 65, ()))
    model = nn.Sequential(
        nn.Linear(values_each, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )
    return Program(
        model=model,
        rows=export,
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
        evaluation=[values[count:], sepsis[count:]],
        guilty=Guilty("data", rows=tuple(bad)),
        steps=2200,
    )
