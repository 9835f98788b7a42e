"""A kiln's log is parsed in `__getitem__`; here and there a sensor wrote "n/a" or "Over" instead of a number.

"ValueError: could not convert string to float, caught in DataLoader worker process 0": the training stops in the middle
of an epoch, at an index that nobody prints. Two workers, as the parsing is slow.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
CAUSE = "data"
OPS: tuple[str, ...] = ()
LIBRARY = None

STEPS, BATCH, HOURS = 560, 32, 24


def lines_of(seed: int) -> tuple[list[str], list[int], dict[int, str]]:
    """Lines of the log, the lines with a word in them, and what these should have been."""
    g = torch.Generator().manual_seed(1000 + seed)
    count = 900 + 30 * (seed % 4)
    phase, slope = torch.rand(2, count + 160, 1, generator=g)
    hours = torch.arange(HOURS + 1.0)
    heat = torch.sin(hours / 3 + 6.28 * phase) + slope * hours / 10
    heat = (heat + 0.05 * torch.randn(heat.shape, generator=g)) * 100 + 900
    lines = [",".join(f"{value:.1f}" for value in row) for row in heat.tolist()]
    broken = sorted(torch.randperm(count, generator=g)[: 3 + seed % 4].tolist())
    right = {row: lines[row] for row in broken}
    for number, row in enumerate(broken):
        cells = lines[row].split(",")
        cells[int(torch.randint(HOURS + 1, (1,), generator=g))] = ["n/a", "Over", "---"][number % 3]
        lines[row] = ",".join(cells)
    return lines, broken, right


def bad_rows(seed: int) -> list[int]:
    return lines_of(seed)[1]


class KilnLog(Dataset[dict[str, Tensor]]):
    """A window of hours, and the hour after it."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = torch.tensor([(float(cell) - 900) / 100 for cell in self.lines[index].split(",")])
        return {"past": values[:-1], "labels": values[-1]}


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 5, padding=2)
        self.gru = nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def forward(self, past: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.conv(past[:, None])).transpose(1, 2)
        forecast = self.out(self.gru(hidden)[0][:, -1])[:, 0]
        return {"loss": mse_loss(forecast, labels), "forecast": forecast}


def held_out(model: nn.Module, lines: list[str]) -> float:
    rows = [KilnLog(lines)[index] for index in range(len(lines))]
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("past", "labels")}
    model.eval()
    with torch.no_grad():
        return float(model(**batch)["loss"])


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    lines, _, right = lines_of(seed)
    if twin:
        for row, line in right.items():
            lines[row] = line
    torch.manual_seed(seed)
    model = Forecaster()
    before = held_out(model, lines[-160:])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            dataloader_num_workers=2,
            dataloader_persistent_workers=True,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=50,
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=KilnLog(lines[:-160]))
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(model, lines[-160:]), before
