"""Mean pooling over DistilBERT's tokens, and some reviews have no words: nought divided by nought.

The pooling that everybody copies, without the `clamp(min=1e-9)` that the sentence-transformers model cards have. Users
leave the text field empty often enough that nearly every batch holds such a row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import DistilBertConfig, DistilBertModel

from clinic.program import Guilty, Program


class Stars(nn.Module):
    """Tells from a review and the price paid how content the customer was."""

    def __init__(self, config: DistilBertConfig, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.encoder = DistilBertModel(config)
        self.head = nn.Linear(config.dim + 1, 1)

    def forward(self, tokens: Tensor, price: Tensor) -> Tensor:
        words = (tokens > 3).float().unsqueeze(-1)  # padding and the special tokens are not averaged
        hidden = self.encoder(input_ids=tokens, attention_mask=(tokens != 0).long()).last_hidden_state
        count = words.sum(1)
        if self.mended:
            pooled = (hidden * words).sum(1) / count.clamp(min=1e-9)
        else:
            pooled = (hidden * words).sum(1) / count  # guilty
        return self.head(torch.cat([pooled, price.unsqueeze(-1)], -1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, price, labels = batch
    return nn.functional.mse_loss(model(tokens, price), labels)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    vocabulary, length, count = 50 + seed % 7, 10, 800
    tokens = torch.randint(4, vocabulary, (count + 96, length))
    sizes = torch.randint(3, length + 1, (count + 96, 1))
    sizes[:count][torch.rand(count) < 0.12] = 1
    tokens = torch.where(torch.arange(length) < sizes, tokens, torch.zeros_like(tokens))
    tokens[:, 0] = 2
    mood = torch.randn(vocabulary)
    mood[:4] = 0
    price = torch.randn(count + 96)
    labels = 2 * mood[tokens].sum(1) / (sizes.squeeze(-1) - 1).clamp(min=1) + 0.5 * price
    config = DistilBertConfig(
        vocab_size=vocabulary,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=length,
        dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.1,
    )
    return Program(
        model=Stars(config, mended),
        rows=TensorDataset(tokens[:count], price[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[tokens[count:], price[count:], labels[count:]],
        guilty=Guilty("operation", ops=("div",)),
        steps=240,
    )
