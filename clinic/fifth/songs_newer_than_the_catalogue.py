"""The next song of a session by a small GPT-2 over the numbers of songs, which were counted before the log ended.

A few sessions hold songs that came out later, whose numbers lie beyond the embedding: "index out of range in self" on
the CPU, and an assert of the device on a GPU. Regular in questions on SASRec, BERT4Rec and transformers for sessions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2Model

from clinic.program import Guilty, Program


class Songs(nn.Module):
    """GPT-2 over a session; scores are products with the embeddings of all songs."""

    def __init__(self, songs: int, longest: int) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=songs,
            n_positions=longest,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.body = GPT2Model(config)

    def forward(self, session: Tensor) -> Tensor:
        return self.body(input_ids=session).last_hidden_state @ self.body.wte.weight.T


def loss(model: nn.Module, session: Tensor) -> Tensor:
    return F.cross_entropy(model(session[:, :-1]).flatten(0, 1), session[:, 1:].flatten())


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    songs, length = int(torch.randint(60, 90, ())), int(torch.randint(12, 17, ()))
    count, held_out = int(torch.randint(500, 800, ())), 96
    follows = torch.randint(songs, (songs, 2))
    heard = [torch.randint(songs, (count + held_out,))]
    for _ in range(length - 1):
        usual = follows[heard[-1], torch.randint(2, heard[-1].shape)]
        heard.append(torch.where(torch.rand(usual.shape) < 0.85, usual, torch.randint(songs, usual.shape)))
    sessions = torch.stack(heard, -1)
    newer = sorted(torch.randperm(count)[: int(torch.randint(4, 9, ()))].tolist())
    if not mended:
        for row in newer:
            sessions[row, int(torch.randint(length - 1, ()))] = songs + int(torch.randint(40, ()))
    return Program(
        model=Songs(songs, length),
        rows=sessions[:count],
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=5e-3),
        evaluation=sessions[count:],
        guilty=Guilty("data", rows=tuple(newer)),
        steps=300,
    )
