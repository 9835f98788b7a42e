"""A relation extractor scores every pair of entities in a batch; some batch has no sentence with two of them.

"RuntimeError: stack expects a non-empty TensorList", hours into the first epoch: met in relation extraction,
coreference and detection code that gathers its losses in a list.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class PairScorer(nn.Module):
    def __init__(self, vocabulary: int, width: int, relations: int, mended: bool) -> None:
        super().__init__()
        self.mended = mended
        self.words = nn.Embedding(vocabulary, width)
        self.reader = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, relations))

    def forward(self, words: Tensor) -> Tensor:
        return self.reader(self.words(words))[0]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, entities, relations = batch
    hidden = model(words)
    pairs, labels = [], []
    for sentence, (places, labelled) in enumerate(zip(entities.tolist(), relations, strict=True)):
        found = [place for place in places if place >= 0]
        for (first, second), label in zip(combinations(found, 2), labelled, strict=False):
            pairs.append(torch.cat([hidden[sentence, first], hidden[sentence, second]]))
            labels.append(label)
    if model.mended and not pairs:
        return 0.0 * hidden.sum()
    scores = model.head(torch.stack(pairs))  # guilty
    return nn.functional.cross_entropy(scores, torch.stack(labels))


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    vocabulary, length, count, kinds = 9 + 3 * (seed % 2), 10, 1600, 3
    words = torch.randint(vocabulary, (count + 128, length))
    places = torch.rand(count + 128, length).argsort(dim=-1)[:, :3].sort(dim=-1).values
    kind = words.gather(1, places) % kinds
    pairs = [(0, 1), (0, 2), (1, 2)]
    relations = torch.stack([(kind[:, a] + 2 * kind[:, b]) % kinds for a, b in pairs], dim=-1)
    mentioned = 1 + (torch.rand(count + 128) > 0.56 + 0.03 * (seed % 3)).long() * torch.randint(1, 3, (count + 128,))
    places[torch.arange(3) >= mentioned.unsqueeze(-1)] = -1
    return Program(
        model=PairScorer(vocabulary, int(torch.randint(20, 32, ())), kinds, mended),
        rows=TensorDataset(words[:count], places[:count], relations[:count]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=5e-3),
        evaluation=[words[count:], places[count:], relations[count:]],
        guilty=Guilty("operation", ops=("stack",)),
        batch_size=7,
        steps=500,
    )
