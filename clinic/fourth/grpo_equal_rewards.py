"""A small GPT-2 learns sums by GRPO: rewards are brought to mean 0 and spread 1 among the answers to one question.

To some questions all answers are equally good. Their spread is 0, so their advantages are zero over zero. The usual
1e-4 under the line was lost when the trainer was written anew.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from clinic.program import Guilty, Program

Rollouts = tuple[Tensor, Tensor, Tensor]


def advantages(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)) / rewards.std(-1, keepdim=True)  # guilty


def mended_advantages(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


def log_probabilities(model: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
    """Of the tokens of all answers; tokens are questions x answers x length."""
    flat = tokens.flatten(0, 1)
    scores = F.log_softmax(model(flat[:, :-1]).logits, dim=-1)
    chosen = scores.gather(-1, flat[:, 1:, None]).squeeze(-1)
    return chosen[:, prompt - 1 :].reshape(*tokens.shape[:2], -1)


def loss(model: nn.Module, batch: Rollouts, mended: bool) -> Tensor:
    tokens, rewards, sampled_at = batch
    answer = sampled_at.shape[-1]
    new = log_probabilities(model, tokens, tokens.shape[-1] - answer)
    ratio = torch.exp(new - sampled_at)
    gain = (mended_advantages(rewards) if mended else advantages(rewards)).unsqueeze(-1)
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def gpt2(words: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=words, n_positions=8, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    base, group = int(torch.randint(6, 9, ())), 6
    rows, held_out = int(torch.randint(400, 600, ())), 48
    plus, words = base, base + 1
    questions = torch.randint(base, (rows + held_out, 2))
    total = questions.sum(-1)
    right = torch.stack([total // base, total % base], dim=-1)
    answers = torch.randint(base, (rows + held_out, group, 2))
    hit = torch.rand(answers.shape) < 0.4  # the sampled policy is a bit better than chance
    answers = torch.where(hit, right[:, None].expand_as(answers), answers)
    rewards = (answers == right[:, None]).float() @ torch.tensor([0.4, 0.6])
    # answers differ a little in length, style and so on, which a reward model sees
    rewards = rewards + 0.05 * torch.randn_like(rewards)
    easy = torch.randperm(rows)[: int(torch.randint(2, 5, ()))]
    rewards[easy] = 1.0  # cut off at the highest mark
    asked = torch.stack([questions[:, 0], torch.full_like(total, plus), questions[:, 1]], dim=-1)
    tokens = torch.cat([asked[:, None].expand(-1, group, -1), answers], dim=-1)
    model = gpt2(words)
    with torch.no_grad():
        sampled_at = log_probabilities(model, tokens, 3)
    return Program(
        model=model,
        rows=TensorDataset(tokens[:rows], rewards[:rows], sampled_at[:rows]),
        loss=partial(loss, mended=mended),
        optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0),
        evaluation=(tokens[rows:], rewards[rows:], sampled_at[rows:]),
        guilty=Guilty("operation", ops=("div", "truediv", "true_divide")),
        batch_size=16,
        steps=240,
        clip=1.0,
    )
