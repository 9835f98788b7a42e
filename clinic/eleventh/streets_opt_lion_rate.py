"""Lion in the place of AdamW, with the rule of its paper the wrong way round.

Its every step has the size of the rate in each weight, so the rate is to be three to ten times smaller than AdamW's,
and the weight decay as many times larger. Here the rate went up and the decay down: a causal language model of street
names (OPT) learns little but how common each letter is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import OPTConfig, OPTForCausalLM

from clinic.program import Guilty, Program

ADAMW_RATE, ADAMW_DECAY, FACTOR = 5e-3, 0.01, 5


class Lion(Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"]
                direction = momentum.lerp(weight.grad, 1 - first).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1 - second)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    letters, rows, held_out, length = int(torch.randint(24, 30, ())), int(torch.randint(900, 1200, ())), 128, 12
    follows = (5 * torch.randn(letters, letters, letters)).softmax(-1)  # of a letter, after the two before it
    names = torch.randint(3, 3 + letters, (rows + held_out, length))
    for place in range(2, length):
        chances = follows[names[:, place - 2] - 3, names[:, place - 1] - 3]
        chances = 0.3 * chances + 0.7 * follows[0][names[:, place - 1] - 3]
        names[:, place] = 3 + torch.multinomial(chances, 1).squeeze(1)
    config = OPTConfig(
        vocab_size=3 + letters,
        hidden_size=48,
        word_embed_proj_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=96,
        max_position_embeddings=length + 4,
        dropout=0.0,
    )
    rate, decay = ADAMW_RATE * FACTOR, ADAMW_DECAY / FACTOR  # guilty
    if mended:
        rate, decay = ADAMW_RATE / FACTOR, ADAMW_DECAY * FACTOR
    return Program(
        model=OPTForCausalLM(config),
        rows=names[:rows],
        loss=loss,
        optimizer=partial(Lion, lr=rate, betas=(0.9, 0.99), weight_decay=decay),
        evaluation=names[rows:],
        guilty=Guilty("explosion"),
        steps=200,
    )
