"""The cuisine of a recipe from its ingredients, by a small MPNet: Adagrad was swapped for Adamax, its rate stayed.

Adagrad divides by all slopes it has ever seen, and rates of a tenth and more are usual for it; for Adamax, whose steps
are as large as its rate, that is a hundred times too much. Layer norms keep every number in bounds, so nothing breaks:
the loss is about that of guessing and stays there. Asked as "accuracy stuck at chance after changing the optimizer".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import MPNetConfig, MPNetForSequenceClassification

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    recipes, cuisines = batch
    logits = model(input_ids=recipes, attention_mask=torch.ones_like(recipes)).logits
    return nn.functional.cross_entropy(logits, cuisines)


def draw(count: int, words: int, length: int, cuisines: int) -> tuple[Tensor, Tensor]:
    """Most ingredients are used everywhere, but each cuisine is fond of a few."""
    fond = torch.randn(cuisines, words) * 2.0
    fond[:, :3] = -torch.inf  # the special tokens
    labels = torch.randint(cuisines, (count,))
    recipes = torch.multinomial(fond.softmax(dim=-1)[labels], length, replacement=True)
    recipes[:, 0] = 0
    return recipes, labels


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, cuisines, count = 50 + 10 * (seed % 3), 12, 4 + seed % 2, 1000
    recipes, labels = draw(count + 128, words, length, cuisines)
    config = MPNetConfig(
        vocab_size=words,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=cuisines,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Program(
        model=MPNetForSequenceClassification(config),
        rows=TensorDataset(recipes[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adamax, lr=4e-3 if mended else 0.1 * (1 + seed % 3)),  # guilty
        evaluation=[recipes[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=260,
    )
