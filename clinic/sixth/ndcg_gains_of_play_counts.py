"""The songs that a listener will play most, by two towers and a smooth form of NDCG (ApproxNDCG).

The gain of a song is 2 ** relevance - 1, which was made for grades from 0 to 4. Here the relevance is how often the
song was played. Few listeners play one song more than 127 times, but for those the gain is beyond float32, as is the
ideal gain that it is divided by: inf / inf. LightGBM refuses such labels; in a loss of one's own nothing does.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Towers(nn.Module):
    """One network for listeners and one for songs; the score is their product."""

    def __init__(self, traits: int, width: int) -> None:
        super().__init__()
        self.listener, self.song = (
            nn.Sequential(nn.Linear(traits, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(2)
        )

    def forward(self, listener: Tensor, songs: Tensor) -> Tensor:
        return (self.song(songs) @ self.listener(listener).unsqueeze(-1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor], *, graded: bool) -> Tensor:
    """One minus a smooth NDCG."""
    listener, songs, plays = batch
    score = model(listener, songs)
    relevance = (1 + plays).log2() if graded else plays
    gain = 2**relevance - 1  # guilty
    beaten = ((score.unsqueeze(1) - score.unsqueeze(2)) / 0.3).sigmoid()
    rank = 0.5 + beaten.sum(-1)
    order = torch.arange(plays.shape[1]) + 2
    ideal = (gain.sort(-1, descending=True).values / order.log2()).sum(-1)
    return 1 - ((gain / (1 + rank).log2()).sum(-1) / ideal).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    traits, shown, held_out = int(torch.randint(6, 9, ())), 20, 200
    count = int(torch.randint(1200, 1800, ()))
    total = count + held_out
    listener, songs = torch.randn(total, traits), torch.randn(total, shown, traits)
    taste = torch.randn(traits, traits) / traits**0.5
    liking = (songs @ (listener @ taste).unsqueeze(-1)).squeeze(-1) / traits**0.5
    eager = 0.5 * torch.randn(total, 1)
    plays = torch.poisson((1.2 * liking + eager - 0.2 + 0.3 * torch.randn_like(liking)).clamp(max=5.3).exp())
    plays[plays.sum(-1) == 0, 0] = 1.0
    plays[count:] = plays[count:].clamp(max=100)
    return Program(
        model=Towers(traits, int(torch.randint(12, 21, ()))),
        rows=TensorDataset(listener[:count], songs[:count], plays[:count]),
        loss=partial(loss, graded=mended),
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=[listener[count:], songs[count:], plays[count:]],
        guilty=Guilty("overflow", ops=("pow", "rpow")),
        steps=400,
    )
