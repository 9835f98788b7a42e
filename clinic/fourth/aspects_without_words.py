"""What a review says of an aspect: an Electra encoder, and the mean over the words that name the aspect.

In the data of SemEval every tenth opinion names no word ("waited an hour": the service), its target is the string NULL
and its place from 0 to 0. The mask of such a row is empty, and the mean over it is zero by zero. The mend is to divide
by one at least, so that the aspect is a vector of zeros beside that of the whole sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import ElectraConfig, ElectraModel

from clinic.program import Guilty, Program


class Reviews(Dataset[dict[str, Tensor]]):
    """Sentences of words that praise, blame or do neither: an opinion is in those of its aspect and the one before."""

    def __init__(self, count: int, length: int, words: int, mood: Tensor, unnamed: float) -> None:
        self.words = torch.randint(2, words, (count, length))
        self.words[:, 0] = 1
        self.start = torch.randint(2, length - 4, (count,))
        self.end = self.start + torch.randint(1, 3, (count,))
        place = torch.arange(length)
        near = (place >= self.start[:, None] - 1) & (place < self.end[:, None])
        null = torch.rand(count) < unnamed
        near[null] = place > 0  # of the whole sentence
        self.opinion = (mood[self.words] * near).sum(1).sign().long() + 1
        self.start[null], self.end[null] = 0, 0

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        place = torch.arange(self.words.shape[1])
        aspect = (place >= self.start[row]) & (place < self.end[row])
        return {"input_ids": self.words[row], "aspect": aspect.float(), "opinion": self.opinion[row]}


class AspectSentiment(nn.Module):
    def __init__(self, config: ElectraConfig, least: int) -> None:
        super().__init__()
        self.least = least
        self.encoder = ElectraModel(config)
        self.head = nn.Sequential(nn.Linear(2 * config.hidden_size, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, input_ids: Tensor, aspect: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids).last_hidden_state
        total = (hidden * aspect[:, :, None]).sum(1)
        named = total / aspect.sum(1, keepdim=True).clamp(min=self.least)  # guilty
        return self.head(torch.cat([hidden[:, 0], named], -1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"], batch["aspect"]), batch["opinion"])


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    words, length = int(torch.randint(40, 80, ())), int(torch.randint(12, 20, ()))
    config = ElectraConfig(
        vocab_size=words,
        embedding_size=48,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = AspectSentiment(config, least=1 if mended else 0)
    mood = torch.randint(-1, 2, (words,))
    unnamed = float(torch.empty(()).uniform_(0.002, 0.01))
    rows = Reviews(int(torch.randint(2000, 3000, ())), length, words, mood, unnamed)
    held_out = Reviews(200, length, words, mood, 0.0)
    batch = [held_out[row] for row in range(len(held_out))]
    return Program(
        model=model,
        rows=rows,
        loss=loss,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
        evaluation={key: torch.stack([row[key] for row in batch]) for key in batch[0]},
        guilty=Guilty("operation", ops=("div",)),
        batch_size=64,
        steps=400,
        clip=1.0,
    )
