"""A few reports are longer than the positions that a BERT has, because the tokenizer was called without truncation.

Most batches are fine. One that is padded to the length of such a report raises in the embeddings.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

from clinic.program import Guilty, Program

POSITIONS = 40

Row = tuple[Tensor, int]  # tokens and label


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Pad to the longest of the batch."""
    tokens = pad_sequence([item for item, _ in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.tensor([y for _, y in rows])}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def report(length: int, label: int, vocabulary: int) -> Row:
    """The first token is [CLS]; a third of the others tell the label."""
    telling = torch.rand(length) < 0.35
    words = torch.where(telling, 10 + 5 * label + torch.randint(5, (length,)), torch.randint(30, vocabulary, (length,)))
    words[0] = 1
    return words, label


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    vocabulary, labels = int(torch.randint(60, 90, ())), int(torch.randint(3, 5, ()))
    total, held_out = int(torch.randint(500, 800, ())), 96

    def some(count: int) -> list[Row]:
        lengths, of = torch.randint(8, POSITIONS - 8, (count,)), torch.randint(labels, (count,))
        return [report(int(length), int(label), vocabulary) for length, label in zip(lengths, of, strict=True)]

    reports, unseen = some(total), some(held_out)
    bad = sorted(torch.randperm(total)[: int(torch.randint(4, 9, ()))].tolist())
    for row in bad:
        long = report(POSITIONS + int(torch.randint(1, 30, ())), reports[row][1], vocabulary)
        reports[row] = (long[0][:POSITIONS], long[1]) if mended else long
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        num_labels=labels,
    )
    return Program(
        model=BertForSequenceClassification(config),
        rows=reports,
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=collate(unseen),
        guilty=Guilty("data", rows=tuple(bad)),
        steps=200,
        collate=collate,
    )
