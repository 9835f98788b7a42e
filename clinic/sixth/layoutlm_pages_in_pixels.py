"""Which words of an invoice are its total, its number, its date: a LayoutLM reads words and their boxes on the page.

LayoutLM wants boxes on a scale from 0 to 1000. These are pixels as the text recognition gives them, and nobody noticed,
since an A4 page at 72 dots per inch has 595 times 842 of them. A few invoices were scanned at 150 dots per inch: their
boxes point beyond the table of places, "index out of range in self", or in the words of the library "The bbox
coordinate values should be within 0-1000 range". One of the commonest questions about LayoutLM.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import LayoutLMConfig, LayoutLMModel

from clinic.program import Guilty, Program

WORDS, KINDS = 60, 5


class Reader(nn.Module):
    """A LayoutLM, and what a word is."""

    def __init__(self, width: int, scales: bool) -> None:
        super().__init__()
        config = LayoutLMConfig(
            vocab_size=WORDS,
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder, self.head = LayoutLMModel(config), nn.Linear(width, KINDS)
        self.scales = scales

    def forward(self, words: Tensor, boxes: Tensor, page: Tensor) -> Tensor:
        if self.scales:
            boxes = boxes * 1000 // page.repeat(1, 2).unsqueeze(1)
        return self.head(self.encoder(input_ids=words, bbox=boxes).last_hidden_state)  # guilty


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, boxes, page, kinds = batch
    return F.cross_entropy(model(words, boxes, page).transpose(1, 2), kinds)


def invoices(count: int, scanned: float) -> list[Tensor]:
    """Numbers are what their place makes of them: at the top right, at the bottom right, in the table, elsewhere."""
    length = 14
    words = torch.randint(WORDS, (count, length))
    left, top = 0.9 * torch.rand(count, length), 0.97 * torch.rand(count, length)
    size = torch.stack([0.03 + 0.07 * torch.rand(count, length), torch.full((count, length), 0.02)], -1)
    corner = torch.stack([left, top], -1)
    page = torch.tensor([595, 842]).expand(count, -1).clone()
    page[torch.rand(count) < scanned] = torch.tensor([1240, 1754])
    boxes = (torch.cat([corner, corner + size], -1) * page.repeat(1, 2).unsqueeze(1)).long()
    number, right = words < WORDS // 2, left > 0.45
    kinds = torch.full((count, length), 1)
    kinds[(top < 0.3) & right] = 2
    kinds[(top > 0.7) & right] = 3
    kinds[~right] = 4
    return [words, boxes, page, torch.where(number, kinds, 0)]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    count = int(torch.randint(800, 1200, ()))
    return Program(
        model=Reader(int(torch.randint(8, 13, ())) * 4, scales=mended),
        rows=TensorDataset(*invoices(count, 0.01)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=invoices(200, 0.01),
        guilty=Guilty("operation", ops=("embedding",)),
        batch_size=16,
        steps=400,
    )
