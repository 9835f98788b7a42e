"""A reader sums the probability of every mention of the answer; in some windows over a long document there is none.

The marginal likelihood of `log(0)` is minus infinity, and its gradient NaN. Met with weakly supervised question
answering, where passages are found by search and cut to a length, and the answer stands behind the cut.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ElectraConfig, ElectraModel

from clinic.program import Guilty, Program


class Reader(nn.Module):
    def __init__(self, config: ElectraConfig, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.body = ElectraModel(config)
        self.start = nn.Linear(config.hidden_size, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.start(self.body(tokens).last_hidden_state).squeeze(-1).softmax(dim=-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, mentions = batch
    found = (model(tokens) * mentions).sum(dim=-1)
    if model.mended:
        found = found[mentions.any(dim=-1)]
    return -torch.log(found).mean()  # guilty


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length, count = 24, 20, 700
    question = torch.randint(words // 2, (count + 96, 1))
    passage = torch.randint(words // 2, words, (count + 96, length))
    answer = words // 2 + question
    passage = torch.where(passage == answer, (passage - words // 2 + 1) % (words // 2) + words // 2, passage)
    first = torch.randint(length, (count + 96,))
    passage[torch.arange(count + 96), first] = answer.squeeze(-1)
    again = torch.rand(count + 96) < 0.4
    passage[again, first[again] - 3] = answer[again].squeeze(-1)
    cut = torch.randperm(count)[: 9 + 4 * (seed % 4)]
    gone = passage[cut] == answer[cut]
    passage[cut] = torch.where(gone, (passage[cut] - words // 2 + 1) % (words // 2) + words // 2, passage[cut])
    tokens = torch.cat([question, passage], dim=-1)
    mentions = (tokens == answer).float()
    config = ElectraConfig(
        vocab_size=words,
        embedding_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=length + 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Program(
        model=Reader(config, mended),
        rows=TensorDataset(tokens[:count], mentions[:count]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        evaluation=[tokens[count:], mentions[count:]],
        guilty=Guilty("operation", ops=("log",)),
        batch_size=16,
        steps=400,
    )
