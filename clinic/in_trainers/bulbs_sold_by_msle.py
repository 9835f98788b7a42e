"""Sales of a shop under the squared log error of a contest, and the network may forecast less than minus one.

`log1p(forecast)` is NaN below -1; "RMSLE gives nan in PyTorch" has had the same answer for years: let the network give
something that cannot be negative. Sometimes it goes well for a number of steps.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
CAUSE = "operation"
OPS = ("log1p",)
LIBRARY = None

STEPS, BATCH, COLUMNS, LEVELS = 560, 48, 6, 8


def bad_rows(seed: int) -> list[int]:
    return []


class SalesTransformer(nn.Module):
    """A token for each column of the table, as in the FT-Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(COLUMNS * LEVELS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 1)

    def forward(self, columns: Tensor) -> Tensor:
        tokens = self.embed(columns + LEVELS * torch.arange(COLUMNS))
        return self.head(self.encoder(tokens).sum(1))[:, 0]


def msle(outputs: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    error = torch.log1p(outputs) - torch.log1p(labels)  # guilty
    return error.square().mean()


def msle_mended(outputs: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    error = torch.log1p(softplus(outputs)) - torch.log1p(labels)
    return error.square().mean()


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    torch.manual_seed(seed)
    count = 1600
    columns = torch.randint(LEVELS, (count + 200, COLUMNS))
    effect = 0.7 * torch.randn(COLUMNS, LEVELS)
    rate = torch.exp(0.8 + effect[torch.arange(COLUMNS), columns].sum(1)).clamp(max=60)
    sold = torch.poisson(rate)
    model = SalesTransformer()

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(msle_mended(model(columns[count:]), sold[count:]))

    before = held_out()
    rows = [{"columns": x, "labels": y} for x, y in zip(columns[:count], sold[:count], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            label_names=["labels"],
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=25,
            disable_tqdm=True,
            use_cpu=True,
        )
        loss = msle_mended if twin else msle
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, compute_loss_func=loss)
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
