"""Where a dish comes from, told from its list of ingredients by a small MPNet that was made wider with muP.

The rate was found at a width of 16, and muP says how it goes along with the width: the rate of a hidden matrix is
divided by how many times wider the model is. Here it is multiplied, by somebody who had the rule for the initial
scale or for larger batches in mind. Nothing is infinite, the loss stays where guessing would leave it. Asked as "muP:
the wide model does worse than the proxy, at the very rate that was best for the proxy".
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import MPNetConfig, MPNetForSequenceClassification

from clinic.program import Guilty, Program

PROXY = 16  # the width at which the rate was searched


def by_width(weights: Iterable[nn.Parameter], lr: float, width: int, divides: bool) -> torch.optim.Optimizer:
    """Adam with one rate for what is hidden and another for embeddings, norms and biases."""
    weights = list(weights)
    hidden = [weight.ndim == 2 and min(weight.shape) >= width for weight in weights]
    wider = width / PROXY
    groups = [
        {"params": [weight for weight, inner in zip(weights, hidden, strict=True) if not inner], "lr": lr},
        {
            "params": [weight for weight, inner in zip(weights, hidden, strict=True) if inner],
            "lr": lr / wider if divides else lr * wider,  # guilty
        },
    ]
    return torch.optim.AdamW(groups, weight_decay=0.01)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    ingredients, kitchens = batch
    logits = model(input_ids=ingredients, attention_mask=torch.ones_like(ingredients)).logits
    return nn.functional.cross_entropy(logits, kitchens)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    kitchens, goods, length, count = 4 + seed % 3, 56, 8, 960
    width = (64, 80, 96)[seed % 3]
    taste = 2.2 * torch.randn(kitchens, goods - 3)
    labels = torch.randint(kitchens, (count + 128,))
    lists = 3 + torch.multinomial(taste.softmax(dim=-1)[labels], length)
    lists = torch.cat([torch.zeros(count + 128, 1, dtype=torch.long), lists], dim=1)
    config = MPNetConfig(
        vocab_size=goods,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=width,
        max_position_embeddings=24,
        num_labels=kitchens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    return Program(
        model=MPNetForSequenceClassification(config),
        rows=TensorDataset(lists[:count], labels[:count]),
        loss=loss,
        optimizer=partial(by_width, lr=1e-2, width=width, divides=mended),
        evaluation=[lists[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        batch_size=16,
        steps=240,
    )
