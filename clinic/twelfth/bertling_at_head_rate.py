"""A BERT classifier trained at the rate that suits a fresh linear head: no NaN and no spike, the loss stays at chance.

Asked again and again as "fine-tuning BERT, accuracy stuck at chance, predicts the same class for everything"; the
answer is always to lower the learning rate by a factor of ten or more.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, labels = batch
    return model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    classes, vocabulary, length, count = 3 + seed % 3, 60, 12, 800
    labels = torch.randint(classes, (count + 96,))
    topical = 4 + 6 * labels.unsqueeze(-1) + torch.randint(6, (count + 96, length))
    anything = torch.randint(4, vocabulary, (count + 96, length))
    tokens = torch.where(torch.rand(count + 96, length) < 0.45, topical, anything)
    sizes = torch.randint(7, length + 1, (count + 96, 1))
    tokens = torch.where(torch.arange(length) < sizes, tokens, torch.zeros_like(tokens))
    tokens[:, 0] = 2
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.08,
        num_labels=classes,
    )
    return Program(
        model=BertForSequenceClassification(config),
        rows=TensorDataset(tokens[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 if mended else 3e-2),  # guilty
        evaluation=[tokens[count:], labels[count:]],
        guilty=Guilty("explosion"),
        steps=240,
    )
