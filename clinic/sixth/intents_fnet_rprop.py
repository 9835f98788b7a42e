"""What a customer wants from the service line, read from the transcript by a small FNet and trained with Rprop.

Rprop goes by the sign of each slope only: a sign that stays makes its step longer by a fifth, one that turns halves it.
That is meant for the slope of all data. From batch to batch the sign turns by chance, and within some dozens of updates
all steps have shrunk to next to nothing: the loss falls a little and stands. Hinton's lecture explains it; it comes
back in threads where somebody tries every optimizer in `torch.optim`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import FNetConfig, FNetModel

from clinic.program import Guilty, Program

LENGTH = 16


class Intent(nn.Module):
    """An FNet, and what the first word has gathered."""

    def __init__(self, words: int, intents: int, width: int) -> None:
        super().__init__()
        config = FNetConfig(
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=2,
            intermediate_size=2 * width,
            hidden_dropout_prob=0.0,
            max_position_embeddings=LENGTH,
            type_vocab_size=1,
        )
        self.encoder, self.head = FNetModel(config), nn.Linear(width, intents)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(input_ids=words).last_hidden_state[:, 0])


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, intent = batch
    return F.cross_entropy(model(words), intent)


def calls(count: int, chances: Tensor, noise: float) -> list[Tensor]:
    """Words by intent, and words that anybody says."""
    intent = torch.randint(len(chances), (count,))
    own = chances[intent].multinomial(LENGTH, replacement=True)
    common = torch.randint(chances.shape[1], (count, LENGTH))
    return [torch.where(torch.rand(count, LENGTH) < noise, common, own), intent]


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, intents = int(torch.randint(150, 250, ())), int(torch.randint(6, 10, ()))
    chances = (1.5 * torch.randn(intents, words)).softmax(-1)
    model = Intent(words, intents, int(torch.randint(8, 13, ())) * 4)
    return Program(
        model=model,
        rows=TensorDataset(*calls(int(torch.randint(1500, 2500, ())), chances, 0.4)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3) if mended else partial(torch.optim.Rprop, lr=2e-3),
        evaluation=calls(300, chances, 0.4),
        guilty=Guilty("optimizer"),
        batch_size=32,
        steps=300,
    )
