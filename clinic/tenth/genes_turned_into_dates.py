"""Which pathway a list of genes belongs to, by a small MPNet: a spreadsheet has made dates of a few names of genes.

SEPT2 comes back as "2-Sep" and MARCH1 as "1-Mar" from whoever opened a table in Excel and saved it again. The collate
function looks names up in the vocabulary: KeyError: '2-Sep', somewhere in the first epoch. Ziemann et al. (2016) found
it in a fifth of the papers with such tables; asked as "KeyError in my collate_fn, but all genes are in the vocabulary".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import MPNetConfig, MPNetForSequenceClassification

from clinic.program import Guilty, Program

FAMILIES = ("SEPT", "MARCH", "CDK", "HOX", "WNT", "TNF", "FGF", "RAB", "MAPK", "SOX")
MONTHS = {"SEPT": "Sep", "MARCH": "Mar"}
PAD = 1  # as MPNet has it


def date_of(gene: str) -> str:
    """What a spreadsheet makes of a name."""
    for family, month in MONTHS.items():
        if gene.startswith(family):
            return f"{gene.removeprefix(family)}-{month}"
    return gene


def collate(rows: list[tuple[list[str], int]], vocabulary: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    genes = [torch.tensor([vocabulary[gene] for gene in listed]) for listed, _ in rows]
    return pad_sequence(genes, batch_first=True, padding_value=PAD), torch.tensor([pathway for _, pathway in rows])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    genes, pathways = batch
    logits = model(input_ids=genes, attention_mask=(genes != PAD).long()).logits
    return nn.functional.cross_entropy(logits, pathways)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    pathways, most, count = 3 + seed % 3, 9, 800
    names = [f"{family}{number}" for family in FAMILIES for number in range(1, 7)]
    vocabulary = {name: place + 4 for place, name in enumerate(names)}
    takes_part = 1.3 * torch.randn(pathways, len(names))
    labels = torch.randint(pathways, (count + 128,))
    drawn = torch.multinomial(takes_part.softmax(dim=-1)[labels], most)
    lengths = torch.randint(4, most + 1, (count + 128,)).tolist()
    lists = [[names[gene] for gene in row[:length]] for row, length in zip(drawn.tolist(), lengths, strict=True)]
    rows = list(zip(lists, labels.tolist(), strict=True))
    at_risk = [row for row in range(count) if any(gene != date_of(gene) for gene in lists[row])]
    saved = sorted(at_risk[place] for place in torch.randperm(len(at_risk))[: 2 + seed % 4].tolist())
    if not mended:
        for row in saved:
            rows[row] = [date_of(gene) for gene in lists[row]], rows[row][1]
    config = MPNetConfig(
        vocab_size=len(names) + 4,
        hidden_size=32,
        num_hidden_layers=1 + seed % 2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=most + 3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=pathways,
    )
    return Program(
        model=MPNetForSequenceClassification(config),
        rows=rows[:count],
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=collate(rows[count:], vocabulary),
        guilty=Guilty("data", rows=tuple(saved)),
        steps=240,
        collate=partial(collate, vocabulary=vocabulary),
    )
