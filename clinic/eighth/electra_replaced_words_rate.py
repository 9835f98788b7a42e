"""A small ELECTRA that tells replaced words from real ones, trained at the rate of a recipe for SGD, without warm-up.

Common on forums as "ELECTRA discriminator predicts all tokens as original": the loss settles at the share of replaced
words and stays there. With a small part of the rate it learns within a few hundred steps.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ElectraConfig, ElectraForPreTraining

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, replaced = batch
    return model(input_ids=words, labels=replaced).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, each, length, count = 4, 12 + seed % 4, 14, 1400
    vocabulary = torch.randperm(topics * each).view(topics, each)
    topic = torch.randint(topics, (count + 128, 1))
    other = (topic + torch.randint(1, topics, (count + 128, length))) % topics
    replaced = torch.rand(count + 128, length) < 0.2
    words = vocabulary[torch.where(replaced, other, topic), torch.randint(each, (count + 128, length))]
    config = ElectraConfig(
        vocab_size=topics * each,
        embedding_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    labels = replaced.float()
    return Program(
        model=ElectraForPreTraining(config),
        rows=TensorDataset(words[:count], labels[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3 if mended else 0.04 + 0.02 * (seed % 3)),
        evaluation=[words[count:], labels[count:]],
        guilty=Guilty("optimizer"),
        steps=400,
    )
