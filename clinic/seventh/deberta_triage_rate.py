"""Triage of complaints with DeBERTa at the rate of a perceptron (0.03 with Adam): the loss stays at that of guessing.

Asked as "DeBERTa predicts one class only" and "loss stuck at 1.38": recipes name 1e-5 to 3e-5 for the large models,
and a small one from scratch takes a thousandth. Nothing is NaN, and no gradient looks large.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from clinic.program import Guilty, Program

WORDS, LENGTH = 60, 14


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, urgency = batch
    return nn.functional.cross_entropy(model(input_ids=words).logits, urgency)


def complaints(count: int, levels: int) -> tuple[Tensor, Tensor]:
    """Each has three of the words that tell how urgent it is, among words that tell nothing."""
    urgency = torch.randint(levels, (count,))
    words = torch.randint(2 + 5 * levels, WORDS, (count, LENGTH))
    places = torch.rand(count, LENGTH - 1).argsort(dim=-1)[:, :3] + 1
    words.scatter_(1, places, 2 + 5 * urgency.unsqueeze(-1) + torch.randint(5, (count, 3)))
    words[:, 0] = 1
    return words, urgency


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    levels, count = 4 + seed % 2, 1200
    words, urgency = complaints(count + 128, levels)
    width = 32 + 16 * (seed % 2)
    config = DebertaV2Config(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        type_vocab_size=0,
        pooler_hidden_size=width,
        num_labels=levels,
    )
    return Program(
        model=DebertaV2ForSequenceClassification(config),
        rows=TensorDataset(words[:count], urgency[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=1e-3 if mended else 0.03 + 0.01 * (seed % 3)),
        evaluation=[words[count:], urgency[count:]],
        guilty=Guilty("optimizer"),
        steps=280,
    )
