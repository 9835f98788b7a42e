"""A tokenizer was given one more token than the model has embeddings: the few rows that hold it raise IndexError.

"IndexError: index out of range in self" after `tokenizer.add_tokens` without `resize_token_embeddings`; here a handful
of rows were tokenized with the wrong tokenizer and hold an id that does not exist.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, answers = batch
    return model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=answers).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    vocabulary, kinds, length, count = 64, 4 + seed % 3, 10, 900
    kind = torch.randint(kinds, (count + 96,))
    topical = 20 + 5 * kind.unsqueeze(-1) + torch.randint(5, (count + 96, length))
    anything = torch.randint(20, vocabulary, (count + 96, length))
    tokens = torch.where(torch.rand(count + 96, length) < 0.6, topical, anything)
    tokens[:, -1] = 1
    answers = torch.stack([4 + kind, 4 + (2 * kind + 1) % kinds, torch.ones_like(kind)], -1)
    wrong = torch.randperm(count)[: 4 + seed % 4]
    if not mended:
        place = torch.randint(length - 1, (len(wrong),))
        tokens[wrong, place] = vocabulary + torch.randint(3, (len(wrong),))
    config = T5Config(
        vocab_size=vocabulary,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Program(
        model=T5ForConditionalGeneration(config),
        rows=TensorDataset(tokens[:count], answers[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[tokens[count:], answers[count:]],
        guilty=Guilty("data", rows=tuple(sorted(wrong.tolist()))),
        steps=220,
    )
