"""A small Llama from scratch at a rate that a weight-decay sweep left behind: the loss stays at twice what it could be.

The commands of a play, told as tokens. Nothing is infinite: the loss falls, more slowly than it should, and then hovers
where a few of the tokens are predicted, as in "my language model only ever predicts the most frequent token".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    (tokens,) = batch
    return model(input_ids=tokens, labels=tokens).loss


def texts(count: int, length: int, vocabulary: int) -> Tensor:
    """Each token has three that may follow it, of which one is likely."""
    follows = torch.stack([torch.randperm(vocabulary) for _ in range(3)], dim=-1)
    tokens = torch.randint(vocabulary, (count, 1))
    for _ in range(length - 1):
        which = torch.multinomial(torch.tensor([0.85, 0.1, 0.05]), count, replacement=True)
        tokens = torch.cat([tokens, follows[tokens[:, -1], which].unsqueeze(-1)], dim=-1)
    return tokens


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    vocabulary, length = int(torch.randint(40, 60, ())), int(torch.randint(16, 25, ()))
    rows, held_out = int(torch.randint(900, 1500, ())), 96
    tokens = texts(rows + held_out, length, vocabulary)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return Program(
        model=LlamaForCausalLM(config),
        rows=TensorDataset(tokens[:rows]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3 if mended else 0.3, weight_decay=0.1),  # guilty
        evaluation=[tokens[rows:]],
        guilty=Guilty("explosion"),
        steps=220,
        clip=1.0,
    )
