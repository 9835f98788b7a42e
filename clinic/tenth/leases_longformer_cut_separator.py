"""Rent, term and parties are looked up in leases by a Longformer for questions, whose rows were cut with
`ids[:longest]`.

A lease that was too long lost its last `</s>` with the rest. Longformer looks for the separators to find the question:
"There should be exactly three separator tokens: 2 in every sample for questions answering", and a single such row ends
the run. Asked in issues of transformers, and on the forum of Hugging Face.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import LongformerConfig, LongformerForQuestionAnswering

from clinic.program import Guilty, Program

START, PADDING, SEPARATOR, QUESTIONS = 0, 1, 2, 3


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, starts, ends = batch
    there = (words != PADDING).long()
    return model(input_ids=words, attention_mask=there, start_positions=starts, end_positions=ends).loss


def lease(question: int, fields: int, filler: int, length: int) -> tuple[list[int], int]:
    """A question and a lease in which every field has a value of two words, and where the one asked for begins."""
    first = QUESTIONS + fields
    text = (first + 8 * fields + torch.randint(filler, (length,))).tolist()
    answer = 0
    slots = torch.randperm(length // 2)[:fields].tolist()
    for field, slot in enumerate(slots):
        value = first + 8 * field + torch.randint(4, (2,))
        text[2 * slot : 2 * slot + 2] = [int(value[0]), int(value[1]) + 4]
        if field == question:
            answer = 2 * slot + 4
    return [START, QUESTIONS + question, SEPARATOR, SEPARATOR, *text, SEPARATOR], answer


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    fields, filler, longest, count, tested = 3 + seed % 2, 20, 32, 700, 128
    too_long = set(torch.randperm(count)[: 5 + seed % 6].tolist())
    words = torch.full((count + tested, longest), PADDING)
    starts = torch.zeros(count + tested, dtype=torch.long)
    for row, question in enumerate(torch.randint(fields, (count + tested,)).tolist()):
        length = 29 if row in too_long else int(torch.randint(18, 28, ()))
        ids, answer = lease(question, fields, filler, length)
        if len(ids) > longest:
            ids = [*ids[: longest - 1], SEPARATOR] if mended else ids[:longest]
        words[row, : len(ids)] = torch.tensor(ids)
        starts[row] = answer
    config = LongformerConfig(
        vocab_size=QUESTIONS + 9 * fields + filler,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        attention_window=8,
        max_position_embeddings=longest + 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=START,
        pad_token_id=PADDING,
        eos_token_id=SEPARATOR,
        sep_token_id=SEPARATOR,
        initializer_range=0.1,
    )
    return Program(
        model=LongformerForQuestionAnswering(config),
        rows=TensorDataset(words[:count], starts[:count], starts[:count] + 1),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[words[count:], starts[count:], starts[count:] + 1],
        guilty=Guilty("data", rows=tuple(sorted(too_long))),
        steps=240,
    )
