"""ALBERT is trained with AdamW at a rate that was chosen for LAMB, and without the warm-up that goes with it.

LAMB scales each update by the norm of the weights and bears ten times the rate. Nothing breaks; the loss stays at
that of a guess, and people ask "why does ALBERT not learn in my setup", whose layers all share the same weights.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import AlbertConfig, AlbertForSequenceClassification

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, length, count = 5 + seed % 3, 16, 1000
    words = 3 + 8 * topics
    labels = torch.randint(topics, (count + 128,))
    own = 3 + labels.unsqueeze(-1) + topics * torch.randint(8, (count + 128, length))
    tokens = torch.randint(3, words, (count + 128, length))
    tokens = torch.where(torch.rand(count + 128, length) < 0.5, own, tokens)
    tokens[:, 0] = 1
    config = AlbertConfig(
        vocab_size=words,
        embedding_size=24,
        hidden_size=48,
        num_hidden_layers=3 + seed % 2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=length,
        classifier_dropout_prob=0.0,
        num_labels=topics,
    )
    return Program(
        model=AlbertForSequenceClassification(config),
        rows=TensorDataset(tokens[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1.5e-3 if mended else 0.02),
        evaluation=[tokens[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=350,
    )
