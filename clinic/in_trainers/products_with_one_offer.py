"""Offers of a product are ranked by scores standardised within the product; some products have one offer only.

The unbiased `std()` of a single number is 0/0: NaN, with a warning that scrolls by ("std(): degrees of freedom is <=
0"). Asked about advantages and group-wise normalisation alike, and the epsilon behind it does not help.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
CAUSE = "operation"
OPS = ("std",)
LIBRARY = None

STEPS, BATCH, OFFERS, FEATURES = 580, 40, 6, 12


def bad_rows(seed: int) -> list[int]:
    return []


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU())
        self.head = nn.Linear(48, 1)

    def forward(self, offers: Tensor) -> Tensor:
        return self.head(self.body(offers)).squeeze(-1)


def listwise(scores: Tensor, clicks: Tensor, present: Tensor) -> Tensor:
    """Squared error between scores and the clicks as standard scores within each product."""
    losses = []
    for score, click, there in zip(scores, clicks, present, strict=True):
        clicked = click[there]
        target = (clicked - clicked.mean()) / (clicked.std() + 1e-6)  # guilty
        losses.append(((score[there] - target) ** 2).mean())
    return torch.stack(losses).mean()


def listwise_mended(scores: Tensor, clicks: Tensor, present: Tensor) -> Tensor:
    """A product with one offer has nothing to rank: its standard score is 0."""
    losses = []
    for score, click, there in zip(scores, clicks, present, strict=True):
        clicked = click[there]
        spread = clicked.std() if len(clicked) > 1 else torch.ones(())
        losses.append(((score[there] - (clicked - clicked.mean()) / (spread + 1e-6)) ** 2).mean())
    return torch.stack(losses).mean()


class RankTrainer(Trainer):
    objective = staticmethod(listwise)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        scores = model(inputs["offers"])
        loss = self.objective(scores, inputs["labels"], inputs["present"])
        return (loss, {"scores": scores}) if return_outputs else loss


class MendedRankTrainer(RankTrainer):
    objective = staticmethod(listwise_mended)


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    torch.manual_seed(seed)
    count = 1600
    offers = torch.randn(count + 150, OFFERS, FEATURES)
    taste = torch.randn(FEATURES, 4)
    clicks = torch.tanh(offers @ taste / 2).sum(-1) * 20 + 50 + 4 * torch.randn(count + 150, OFFERS)
    numbers = torch.randint(2, OFFERS + 1, (count + 150,))
    numbers[torch.randperm(count)[: count // (30 + 10 * (seed % 4))]] = 1
    present = torch.arange(OFFERS) < numbers[:, None]
    model = Scorer()

    def held_out() -> float:
        model.eval()
        with torch.no_grad():
            return float(listwise_mended(model(offers[count:]), clicks[count:], present[count:]))

    before = held_out()
    rows = [
        {"offers": offer, "labels": click, "present": there}
        for offer, click, there in zip(offers[:count], clicks[:count], present[:count], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            weight_decay=0.01,
            remove_unused_columns=False,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_steps=20,
            disable_tqdm=True,
            use_cpu=True,
        )
        kind = MendedRankTrainer if twin else RankTrainer
        trainer: Trainer = kind(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(), before
