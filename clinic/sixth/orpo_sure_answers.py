"""A small OPT learns to prefer short answers to long-winded ones by ORPO: likelihood, and a ratio of odds.

The odds of an answer are p / (1 - p), in logarithms log p - log1p(-exp(log p)). Under bfloat16 the p of an answer from
a template is soon rounded to 1, and 1 - p is nothing. The loss itself stays fine, for the logarithm of the sigmoid of
infinity is 0. Its slope is 0 times infinity. Trainers in use have the same line, and threads about their NaN.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import OPTConfig, OPTForCausalLM

from clinic.program import Guilty, Program

WORDS, ANSWER = 48, 2


def log_chance(model: nn.Module, question: Tensor, answer: Tensor) -> Tensor:
    """The mean log-probability of the words of an answer."""
    words = torch.cat([question, answer], 1)
    logits = model(input_ids=words).logits[:, question.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, answer.unsqueeze(-1)).squeeze(-1).mean(-1)


def log_odds(chance: Tensor, most: float) -> Tensor:
    """The logarithm of p / (1 - p)."""
    if most < 0:
        chance = chance.float().clamp(max=most)
    return chance - torch.log1p(-chance.exp())  # guilty


def loss(model: nn.Module, batch: list[Tensor], *, most: float) -> Tensor:
    question, chosen, rejected = batch
    chances = log_chance(model, question.repeat(2, 1), torch.cat([chosen, rejected]))
    good, bad = chances.chunk(2)
    return -good.mean() - 0.5 * F.logsigmoid(log_odds(good, most) - log_odds(bad, most)).mean()


def talks(count: int, answers: Tensor) -> list[Tensor]:
    """One word of a question decides on the answer; the other answer beats about the bush."""
    question = torch.randint(4, WORDS, (count, 6))
    chosen = answers[question[:, 2] % len(answers)]
    rejected = torch.where(torch.rand(count, 1) < 0.5, chosen.flip(1), torch.randint(4, WORDS, (count, ANSWER)))
    return [question, chosen, rejected]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    answers = torch.randint(4, WORDS, (int(torch.randint(3, 6, ())), ANSWER))
    width = int(torch.randint(12, 17, ())) * 4
    config = OPTConfig(
        vocab_size=WORDS,
        hidden_size=width,
        word_embed_proj_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=2 * width,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        init_std=0.1,
    )
    return Program(
        model=OPTForCausalLM(config),
        rows=TensorDataset(*talks(int(torch.randint(900, 1300, ())), answers)),
        loss=partial(loss, most=-1e-4 if mended else 0.0),
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01),
        evaluation=talks(200, answers),
        guilty=Guilty("operation", ops=("log1p",)),
        batch_size=32,
        steps=400,
        bf16=True,
    )
