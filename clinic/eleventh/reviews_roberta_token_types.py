"""RoBERTa is given the token types of BERT, 0 for the text and 1 for what it is paired with; it knows only 0.

"IndexError: index out of range in self", since `type_vocab_size` of RoBERTa is 1: met by everybody who changes the
checkpoint under a script for sentence pairs. Here most reviews have a title only, and a few are paired with an
answer of the shop.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import RobertaConfig, RobertaForSequenceClassification

from clinic.program import Guilty, Program

PAD, END = 1, 2


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([row["ids"] for row in rows], batch_first=True, padding_value=PAD)
    return {
        "input_ids": ids,
        "token_type_ids": pad_sequence([row["types"] for row in rows], batch_first=True),
        "attention_mask": (ids != PAD).long(),
        "labels": torch.stack([row["label"] for row in rows]),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, count = int(torch.randint(60, 100, ())), int(torch.randint(700, 900, ()))
    praise = torch.randn(words)
    paired = torch.randperm(count)[: 3 + seed % 4].sort().values.tolist()
    reviews: list[dict[str, Tensor]] = []
    for row in range(count + 160):
        text = torch.randint(words, (int(torch.randint(4, 14, ())),))
        ids, label = torch.cat([3 + text, torch.tensor([END])]), (praise[text].sum() > 0).long()
        types = torch.zeros_like(ids)
        if row in paired:
            answer = torch.cat([torch.randint(3, 3 + words, (5,)), torch.tensor([END])])
            ids = torch.cat([ids, answer])
            types = torch.cat([types, torch.full_like(answer, 0 if mended else 1)])
        reviews.append({"ids": ids, "types": types, "label": label})
    config = RobertaConfig(
        vocab_size=3 + words,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        type_vocab_size=1,
        num_labels=2,
    )
    return Program(
        model=RobertaForSequenceClassification(config),
        rows=reviews[:count],
        loss=loss,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=2e-3),
        evaluation=collate(reviews[count:]),
        guilty=Guilty("data", rows=tuple(paired)),
        collate=collate,
        steps=240,
    )
