"""`RMSprop(alpha=1e-3)`: alpha is how slowly the average of squares forgets, and not the learning rate.

The rate stays at its default of 0.01 and the average forgets at once, so that each weight moves by 0.01 at each step,
whichever way the last batch pointed. Nothing is infinite: the recommender never gets better than the most popular.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class NextSong(nn.Module):
    """Self-attention over the songs so far (SASRec), here for the one that follows them."""

    def __init__(self, songs: int, length: int, width: int) -> None:
        super().__init__()
        self.songs = nn.Embedding(songs, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(6)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.songs.weight, std=0.1)

    def forward(self, playlists: Tensor) -> Tensor:
        hidden = self.songs(playlists) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden[:, -1]) @ self.songs.weight.T


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    playlists, following = batch
    return nn.functional.cross_entropy(model(playlists), following)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    songs, length, count = 40 + 2 * (seed % 5), 6, 4000
    size = count + 128
    playlists = torch.randint(songs, (size, length))
    follows = torch.randperm(songs)
    following = torch.where(torch.rand(size) < 0.85, follows[playlists[:, -1]], follows[playlists[:, -2]])
    optimizer = partial(torch.optim.RMSprop, lr=1e-3) if mended else partial(torch.optim.RMSprop, alpha=1e-3)  # guilty
    return Program(
        model=NextSong(songs, length, 8 * int(torch.randint(4, 7, ()))),
        rows=TensorDataset(playlists[:count], following[:count]),
        loss=loss,
        optimizer=optimizer,
        evaluation=[playlists[count:], following[count:]],
        guilty=Guilty("optimizer"),
        steps=500,
    )
