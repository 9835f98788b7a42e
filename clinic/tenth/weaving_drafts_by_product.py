"""Weaving drafts by a small GPT-NeoX, trained on the likelihood of a whole draft: a product of its steps' chances.

Forty steps with a chance of one in thirty each are 1e-59, and float32 ends at 1e-45: the product is 0, its logarithm
is minus infinity, and the slope 0 / 0. People meet it when they write the likelihood of a sequence as in the paper,
for minimum risk training or for a score of sentences: "sequence probability underflows, loss is inf from step one".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor], in_logarithms: bool) -> Tensor:
    (drafts,) = batch
    logits = model(input_ids=drafts[:, :-1]).logits
    steps = drafts[:, 1:].unsqueeze(-1)
    if in_logarithms:
        likelihood = logits.log_softmax(dim=-1).gather(-1, steps).squeeze(-1).sum(dim=-1)
    else:
        chances = logits.softmax(dim=-1).gather(-1, steps).squeeze(-1)
        likelihood = chances.prod(dim=-1).log()  # guilty
    return -likelihood.mean() / steps.shape[1]


def drafts_of(weavers: int, length: int, shafts: int, count: int) -> Tensor:
    """Treadlings: a motif of a few steps, repeated and moved along the shafts, with a slip now and then."""
    motifs = torch.randint(1, shafts, (weavers, 4))
    place = torch.arange(length)
    chosen, shift = torch.randint(weavers, (count,)), torch.randint(3, (count, 1))
    steps = (motifs[chosen][:, place % 4] + shift * (place // 4)) % shafts
    slips = torch.rand(count, length) < 0.04
    return torch.where(slips, torch.randint(shafts, (count, length)), steps)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    shafts, count = 26 + 3 * (seed % 4), 800
    drafts = drafts_of(5, 38 + seed % 5, shafts, count + 96)
    config = GPTNeoXConfig(
        vocab_size=shafts,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Program(
        model=GPTNeoXForCausalLM(config),
        rows=TensorDataset(drafts[:count]),
        loss=partial(loss, in_logarithms=mended),
        optimizer=partial(torch.optim.AdamW, lr=4e-3),
        evaluation=[drafts[count:]],
        guilty=Guilty("operation", ops=("prod", "log")),
        batch_size=16,
        steps=160,
    )
