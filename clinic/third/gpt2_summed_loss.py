"""The loss of a GPT-2 is summed over its tokens, for an exact perplexity, and the rate stays what it was for the mean.

SGD with momentum: each step is as many times too long as there are tokens in a batch, from the first one on.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from clinic.program import Guilty, Program


def loss(model: nn.Module, batch: list[Tensor], reduction: str) -> Tensor:
    (tokens,) = batch
    logits = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    vocabulary, length = int(torch.randint(30, 50, ())), int(torch.randint(12, 20, ()))
    rows, held_out = int(torch.randint(900, 1400, ())), 96
    stride = 1 + torch.randint(3, (rows + held_out, 1))
    tokens = (torch.randint(vocabulary, (rows + held_out, 1)) + stride * torch.arange(length)) % vocabulary
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return Program(
        model=GPT2LMHeadModel(config),
        rows=TensorDataset(tokens[:rows]),
        loss=partial(loss, reduction="mean" if mended else "sum"),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        evaluation=[tokens[rows:]],
        guilty=Guilty("explosion"),
        steps=220,
    )
