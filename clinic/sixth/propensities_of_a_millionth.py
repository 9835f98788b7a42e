"""Whether a visitor likes an article, from a log of what was shown: each line counts by one over its propensity.

The recommender logged the chance with which it showed each article. A few lines come from its fallback, which logs
0.000001 as "not known". They count a million times, and the line beside them nothing. Adam divides by the root of what
it has seen for hundreds of steps to come, so that after each of them the network hardly moves at all. Papers on
learning from logs all clip the weights, and say why.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class TwoSides(nn.Module):
    """A visitor's traits, an article's number, and a network over both and their product."""

    def __init__(self, traits: int, articles: int, width: int) -> None:
        super().__init__()
        self.visitor, self.article = nn.Linear(traits, width), nn.Embedding(articles, width)
        self.head = nn.Sequential(nn.Linear(3 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, visitor: Tensor, article: Tensor) -> Tensor:
        one, other = self.visitor(visitor), self.article(article)
        return self.head(torch.cat([one, other, one * other], -1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    visitor, article, clicked, propensity = batch
    error = F.binary_cross_entropy_with_logits(model(visitor, article), clicked, reduction="none")
    return (error / propensity).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    traits, articles = int(torch.randint(4, 7, ())), int(torch.randint(12, 20, ()))
    count, held_out = int(torch.randint(2500, 3500, ())), 400
    total = count + held_out
    visitor, of = torch.randn(total, traits), torch.randn(articles, traits)
    policy = (visitor @ of.T / traits**0.5).softmax(-1)
    policy = 0.5 * policy + 0.5 / articles
    article = policy.multinomial(1).squeeze(1)
    propensity = policy.gather(1, article.unsqueeze(1)).squeeze(1)
    liking = 2.5 * (visitor * torch.randn(articles, traits)[article]).sum(-1)
    clicked = (torch.rand(total) < liking.sigmoid()).float()
    fallback = sorted(torch.randperm(count)[: int(torch.randint(8, 14, ()))].tolist())
    if not mended:
        propensity[fallback] = 1e-6
    data = [visitor, article, clicked, propensity]
    return Program(
        model=TwoSides(traits, articles, int(torch.randint(16, 25, ()))),
        rows=TensorDataset(*(column[:count] for column in data)),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        evaluation=[column[count:] for column in data],
        guilty=Guilty("data", rows=tuple(fallback)),
        batch_size=64,
        steps=500,
    )
