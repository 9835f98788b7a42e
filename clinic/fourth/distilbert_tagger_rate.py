"""A DistilBERT that tags words, trained with the rate that the recurrent tagger before it had: 1e-2.

Nothing breaks. The gradients are clipped, AdamW bounds the steps, the loss falls for a moment and then stays at what
the frequencies of the tags alone would give: "my BERT predicts only the class O". With 5e-4 it learns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForTokenClassification

from clinic.program import Guilty, Program

OTHER, FILL = 0, -100


class Tagged(Dataset[dict[str, Tensor]]):
    """Sentences in which some words are names: what kind of name also depends on the word before."""

    def __init__(self, sentences: int, length: int, words: int, kinds: Tensor, tags: int) -> None:
        self.words = torch.randint(1, words, (sentences, length))
        kind = kinds[self.words]
        before = torch.cat([torch.zeros_like(kind[:, :1]), kind[:, :-1]], 1)
        self.tags = torch.where(kind > 0, 1 + (kind + before) % (tags - 1), OTHER)
        ends = torch.randint(length // 2, length + 1, (sentences, 1))
        self.mask = (torch.arange(length) < ends).long()
        self.words, self.tags = self.words * self.mask, self.tags.masked_fill(self.mask == 0, FILL)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[row], "attention_mask": self.mask[row], "labels": self.tags[row]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, tags = int(torch.randint(80, 150, ())), int(torch.randint(14, 24, ())), 5
    kinds = torch.where(torch.rand(words) < 0.4, torch.randint(1, 3, (words,)), 0)
    config = DistilBertConfig(
        vocab_size=words,
        max_position_embeddings=32,
        dim=64,
        n_layers=4,
        n_heads=4,
        hidden_dim=128,
        dropout=0.0,
        attention_dropout=0.0,
        num_labels=tags,
    )
    model = DistilBertForTokenClassification(config)
    rows = Tagged(int(torch.randint(800, 1200, ())), length, words, kinds, tags)
    held_out = Tagged(128, length, words, kinds, tags)
    rate = 5e-4 if mended else 1e-2
    return Program(
        model=model,
        rows=rows,
        loss=loss,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=rate, weight_decay=0.01),
        evaluation={"input_ids": held_out.words, "attention_mask": held_out.mask, "labels": held_out.tags},
        guilty=Guilty("explosion"),
        batch_size=16,
        steps=300,
        clip=1.0,
    )
