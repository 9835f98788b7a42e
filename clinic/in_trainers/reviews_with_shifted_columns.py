"""A BERT predicts the stars of a review; lines of the CSV with a comma too many have the price in their place.

"My regression head predicts 20 stars, the loss never comes down": `read_csv` on unquoted text moves every later column
by one. Nothing is NaN; squared errors of a few rows outweigh all others.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

KIND = "hf"
CAUSE = "data"
OPS: tuple[str, ...] = ()
LIBRARY = None

STEPS, BATCH = 500, 32


def reviews(seed: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Token ids, stars, the rows whose columns are shifted, and the prices."""
    g = torch.Generator().manual_seed(seed)
    count, length = 4000 + 100 * (seed % 5), 14
    tokens = torch.randint(20, 80, (count + 200, length), generator=g)
    mood = torch.randint(5, (count + 200, 1), generator=g)
    says = torch.rand(count + 200, length, generator=g) < 0.5
    tokens = torch.where(says, 4 + 3 * mood + torch.randint(3, (count + 200, length), generator=g), tokens)
    tokens[:, 0] = 2
    stars = mood[:, 0] + 1.0
    shifted = torch.randperm(count, generator=g)[: count // 20 + 9 * (seed % 7)]
    prices = 20 + 100 * torch.rand(count, generator=g)
    return tokens, stars, sorted(shifted.tolist()), prices


def bad_rows(seed: int) -> list[int]:
    return reviews(seed)[2]


def held_out(model: BertForSequenceClassification, tokens: Tensor, stars: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(mse_loss(model(input_ids=tokens).logits[:, 0], stars))


def train(seed: int, guard: dict[str, Any] | None = None, twin: bool = False) -> tuple[float, float]:
    tokens, stars, shifted, prices = reviews(seed)
    count = len(prices)
    table = stars[:count].clone()
    if not twin:
        table[shifted] = prices[shifted]
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=80,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=1,
    )
    model = BertForSequenceClassification(config)
    before = held_out(model, tokens[count:], stars[count:])
    rows = [{"input_ids": row, "labels": star} for row, star in zip(tokens[:count], table, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=2e-3,
            warmup_steps=20,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        if guard is not None:
            import resilient_train

            trainer = resilient_train.hf.guard(trainer, **guard)
        trainer.train()
    return held_out(model, tokens[count:], stars[count:]), before
