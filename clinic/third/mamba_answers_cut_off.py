"""Fine-tuning on prompts with answers, each divided by the length of its answer, where some have no room for one.

Prompts are masked by -100 and long ones take all the room there is. The mean over the tokens of each answer, as in
preference losses that are normalised by length, is then zero over zero. Here with a Mamba.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import MambaConfig, MambaForCausalLM

from clinic.program import Guilty, Program

IGNORED = -100


def loss(model: nn.Module, batch: list[Tensor], least: int) -> Tensor:
    tokens, labels = batch
    logits, labels = model(input_ids=tokens).logits[:, :-1], labels[:, 1:]
    there = labels != IGNORED
    chosen = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = (chosen * there).sum(-1) / there.sum(-1).clamp(min=least)  # guilty
    return -each.mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    topics, length, words = int(torch.randint(5, 9, ())), int(torch.randint(12, 16, ())), 48
    rows, held_out, answer = int(torch.randint(500, 900, ())), 96, 4
    answers = torch.randint(30, words, (topics, answer))
    topic = torch.randint(topics, (rows + held_out,))
    asked = torch.where(
        torch.rand(rows + held_out, length) < 0.5,
        3 * topic.unsqueeze(-1) + torch.randint(3, (rows + held_out, length)),
        torch.randint(24, 30, (rows + held_out, length)),
    )
    tokens = torch.cat([asked[:, : length - answer], answers[topic]], dim=-1)
    labels = tokens.clone()
    labels[:, : length - answer] = IGNORED
    cut = torch.randperm(rows)[: rows // 12]  # the prompt takes all the room
    tokens[cut], labels[cut] = asked[cut], IGNORED
    config = MambaConfig(
        vocab_size=words, hidden_size=32, state_size=8, num_hidden_layers=2, bos_token_id=0, eos_token_id=0
    )
    return Program(
        model=MambaForCausalLM(config),
        rows=TensorDataset(tokens[:rows], labels[:rows]),
        loss=partial(loss, least=1 if mended else 0),
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        evaluation=[tokens[rows:], labels[rows:]],
        guilty=Guilty("operation", ops=("div",)),
        batch_size=8,
        steps=200,
    )
