"""A small ALBERT learns from a teacher's probabilities, which a file keeps with three decimals.

Where the teacher is sure, the other classes are written as 0.000. The Kullback-Leibler divergence by hand,
p * log(p / q), is zero times minus infinity there. torch.nn.functional.kl_div knows about it, which is the mend.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AlbertConfig, AlbertForSequenceClassification

from clinic.program import Guilty, Program


class Lion(torch.optim.Optimizer):
    """The sign of a running mean, after Chen et al. (2023)."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(weights, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                mean = state["mean"]
                weight.sub_(group["lr"] * (mean * first + weight.grad * (1 - first)).sign())
                mean.mul_(second).add_(weight.grad, alpha=1 - second)


class Judged(Dataset[dict[str, Tensor]]):
    """Questions, and what the teacher thinks of each class."""

    def __init__(self, count: int, length: int, evidence: Tensor, sharpness: float) -> None:
        self.words = torch.randint(len(evidence), (count, length))
        teacher = (sharpness * evidence[self.words].mean(1)).softmax(-1)
        self.teacher = (teacher * 1000).round() / 1000

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[row], "teacher": self.teacher[row]}


def loss(model: nn.Module, batch: dict[str, Tensor], mended: bool) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    p = batch["teacher"]
    if mended:
        return F.kl_div(logits.log_softmax(-1), p, reduction="batchmean")
    return (p * torch.log(p / logits.softmax(-1))).sum(-1).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, classes = int(torch.randint(40, 80, ())), int(torch.randint(10, 17, ())), 4
    config = AlbertConfig(
        vocab_size=words,
        embedding_size=32,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,
    )
    model = AlbertForSequenceClassification(config)
    evidence, sharpness = torch.randn(words, classes), float(torch.empty(()).uniform_(8.0, 10.0))
    rows = Judged(int(torch.randint(1500, 2500, ())), length, evidence, sharpness)
    held_out = Judged(200, length, evidence, sharpness)
    return Program(
        model=model,
        rows=rows,
        loss=partial(loss, mended=mended),
        optimizer=lambda weights: Lion(weights, lr=1e-3),
        evaluation={"input_ids": held_out.words, "teacher": held_out.teacher},
        guilty=Guilty("operation", ops=("log", "div")),
        batch_size=32,
        steps=300,
    )
