"""A Reformer that reads system logs, whose batches are padded to their longest row, as collators do.

In training a Reformer wants each batch to be a multiple of its chunks, and as long as its axial positions, and raises
otherwise. Most batches hold a log that was truncated at the full length, and pass; some hold only short ones: "If
training, sequence length 31 has to be a multiple of least common multiple chunk_length 8".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import ReformerConfig, ReformerModel

from clinic.program import Guilty, Program

LONGEST = 32
Row = tuple[Tensor, int]


class LogReader(nn.Module):
    """A Reformer, and the mean over what it makes of the events."""

    def __init__(self, events: int, kinds: int) -> None:
        super().__init__()
        config = ReformerConfig(
            attn_layers=["local", "local"],
            axial_pos_shape=[4, 8],
            axial_pos_embds_dim=[8, 24],
            hidden_size=32,
            attention_head_size=16,
            num_attention_heads=2,
            feed_forward_size=64,
            local_attn_chunk_length=8,
            max_position_embeddings=LONGEST,
            vocab_size=events,
            hidden_dropout_prob=0.0,
            is_decoder=False,
        )
        self.body = ReformerModel(config)
        self.head = nn.Linear(2 * config.hidden_size, kinds)

    def forward(self, events: Tensor) -> Tensor:
        there = (events > 0).long()
        read = self.body(input_ids=events, attention_mask=there).last_hidden_state  # guilty
        return self.head((read * there[..., None]).sum(1) / there.sum(1, keepdim=True))


def collate(rows: list[Row], full: bool) -> dict[str, Tensor]:
    events, kinds = zip(*rows, strict=True)
    padded = pad_sequence(list(events), batch_first=True)
    if full:
        padded = F.pad(padded, (0, LONGEST - padded.shape[1]))
    return {"events": padded, "kind": torch.tensor(kinds)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["events"]), batch["kind"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    events, kinds = int(torch.randint(24, 40, ())), int(torch.randint(3, 6, ()))
    habits = torch.softmax(1.2 * torch.randn(kinds, events - 1), -1)

    def row() -> Row:
        kind = int(torch.randint(kinds, ()))
        length = LONGEST if float(torch.rand(())) < 0.1 else int(torch.randint(8, LONGEST, ()))
        return 1 + torch.multinomial(habits[kind], length, replacement=True), kind

    rows = [row() for _ in range(int(torch.randint(500, 800, ())))]
    held_out = [row() for _ in range(96)]
    return Program(
        model=LogReader(events, kinds),
        rows=rows,
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=collate(held_out, full=True),
        guilty=Guilty("operation", ops=("ReformerModel", "ReformerEmbeddings", "AxialPositionEmbeddings", "embedding")),
        batch_size=24,
        steps=200,
        collate=partial(collate, full=mended),
    )
