"""Runs whose schedule restarts: is one met by an incident, and does it end where it would end unwatched?

    python -m clinic restarts                        # unwatched, and guarded
    python -m clinic restarts --arms guarded --seeds 5

A loop of plain PyTorch, the Hugging Face Trainer and Lightning, with cosine schedules that restart, at a usual rate and
at a hot one: restarts ruin SGD at 0.2 and 0.3. Both arms see the same samples; unwatched, checks and policy are
off. A line for each run: the loss of rows that were held out, what ended it, and its incidents.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, TensorDataset

import resilient_train
from resilient_train.zoo.data import digits

ARMS = {"unwatched": {"recovery": "off", "checks": "off"}, "guarded": {}}
STEPS, BATCH = 600, 32


class End(NamedTuple):
    """Where a run ended."""

    loss: float
    ended: str
    incidents: list[str]


class Classifier(nn.Module):
    """Takes rows as the Trainer gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(x)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


def loss_of(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)["loss"]
    return loss


def rows(split: str) -> tuple[Tensor, Tensor]:
    images, labels = digits(split).tensors
    return images.flatten(1), labels


def own_loop(
    make: Callable[..., torch.optim.Optimizer], rate: float, cycle: int, times: int, seed: int, arm: dict[str, Any]
) -> End:
    """A loop of plain PyTorch."""
    torch.manual_seed(seed)
    model, data = Classifier(), TensorDataset(*rows("train"))
    optimizer = make(model.parameters(), lr=rate)
    restarts = CosineAnnealingWarmRestarts(optimizer, cycle, T_mult=times)
    options: dict[str, Any] = {"objective": loss_of, "schedule": restarts, "steps": STEPS, "seed": seed, **arm}
    guard = resilient_train.Guard(None, model, optimizer, data=data, batch_size=BATCH, **options)
    ended = why_ended(lambda: [guard.step(batch) for batch in guard.batches()])
    return End(held_out(model), ended, [f"{one.anomaly.signal} {one.outcome}" for one in guard.incidents])


def hugging_face(rate: float, seed: int, arm: dict[str, Any]) -> End:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    torch.manual_seed(seed)
    model = Classifier()
    data: Any = [{"x": x, "labels": y} for x, y in zip(*rows("train"), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 4}}
        quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
        quiet |= {"disable_tqdm": True, "use_cpu": True, "output_dir": folder}
        batch: dict[str, Any] = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "seed": seed}
        trainer = Trainer(
            model=model, args=TrainingArguments(learning_rate=rate, **how, **batch, **quiet), train_dataset=data
        )
        trainer.remove_callback(PrinterCallback)
        trainer = resilient_train.hf.guard(trainer, run_dir=f"{folder}/run", **arm)
        ended = why_ended(trainer.train)
        return End(held_out(model), ended, written(folder))


def lightning(rate: float, seed: int, arm: dict[str, Any]) -> End:
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=rate)
            restarts = CosineAnnealingWarmRestarts(optimizer, STEPS // 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": restarts, "interval": "step"}}

    torch.manual_seed(seed)
    module, data = Module(), DataLoader(TensorDataset(*rows("train")), BATCH, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        callbacks: Any = [resilient_train.lightning.Guarded(run_dir=f"{folder}/run", **arm)]
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        quiet |= {"enable_model_summary": False, "default_root_dir": folder, "accelerator": "cpu"}
        trainer = pl.Trainer(max_steps=STEPS, callbacks=callbacks, **quiet)
        ended = why_ended(lambda: trainer.fit(module, data))
        return End(held_out(module.model), ended, written(folder))


def why_ended(train: Callable[[], object]) -> str:
    try:
        train()
    except Exception as error:
        return type(error).__name__
    return ""


def held_out(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(loss_of(model, rows("eval")))


def written(folder: str) -> list[str]:
    """The incidents in a run directory."""
    lines = [line for file in Path(folder).glob("run*/incidents.jsonl") for line in file.read_text().splitlines()]
    return [f"{one['signal']} {one['outcome']}" for one in map(json.loads, lines)]


def sgd(weights: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=lr, momentum=0.9)


PROGRAMS: dict[str, Callable[[int, dict[str, Any]], End]] = {
    "own loop, AdamW": partial(own_loop, torch.optim.AdamW, 0.02, 150, 1),
    "own loop, AdamW, hot": partial(own_loop, torch.optim.AdamW, 0.05, 100, 1),
    "own loop, SGD": partial(own_loop, sgd, 0.1, 75, 2),
    "own loop, SGD, hot": partial(own_loop, sgd, 0.2, 75, 2),
    "own loop, SGD, hotter": partial(own_loop, sgd, 0.3, 100, 2),
    "Hugging Face": partial(hugging_face, 0.02),
    "Hugging Face, hot": partial(hugging_face, 0.05),
    "Lightning": partial(lightning, 0.02),
    "Lightning, hot": partial(lightning, 0.05),
}


def main() -> None:
    """Train each program, and print where it ended."""
    parser = argparse.ArgumentParser(
        "clinic restarts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("resilient_train").setLevel(logging.CRITICAL)
    for arm in given.arms:
        ends = []
        for name, program in PROGRAMS.items():
            for seed in range(given.seeds):
                ends.append(end := program(seed, ARMS[arm]))
                print(f"{arm:9} {name:21} {seed} {end.loss:.4g} {end.ended} {', '.join(end.incidents)}", flush=True)
        met = sum(bool(end.incidents) for end in ends)
        print(f"{arm}: {len(ends)} runs, {sum(bool(end.ended) for end in ends)} ended, {met} met an incident")


if __name__ == "__main__":
    main()
