"""How many of an advertisement's impressions are clicked, as a binomial: for some rows there are more clicks than that.

Impressions and clicks come from two logs. A click that arrives after midnight, or whose impression sat in a lost
shard, leaves rows in which nobody saw what several people clicked. torch.distributions checks its arguments and
raises: "Expected value argument to be within the support" of the Binomial. The mend is to leave these rows out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Binomial
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class ClickRate(nn.Module):
    """Embeddings of campaign and page beside a few numbers on the hour and the slot, then a small network."""

    def __init__(self, campaigns: int, pages: int, numbers: int, width: int) -> None:
        super().__init__()
        self.campaign, self.page = nn.Embedding(campaigns, 8), nn.Embedding(pages, 8)
        self.deep = nn.Sequential(nn.Linear(16 + numbers, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, campaign: Tensor, page: Tensor, numbers: Tensor) -> Tensor:
        return self.deep(torch.cat([self.campaign(campaign), self.page(page), numbers], -1)).squeeze(-1)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    campaign, page, numbers, shown, clicked = batch
    return -Binomial(total_count=shown, logits=model(campaign, page, numbers)).log_prob(clicked).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    campaigns, pages, numbers = int(torch.randint(30, 60, ())), int(torch.randint(15, 40, ())), 5
    rows, held_out, late = int(torch.randint(3000, 5000, ())), 600, int(torch.randint(4, 12, ()))
    model = ClickRate(campaigns, pages, numbers, int(torch.randint(24, 48, ())))
    campaign, page = torch.randint(campaigns, (rows + held_out,)), torch.randint(pages, (rows + held_out,))
    features = torch.randn(rows + held_out, numbers)
    appeal, place = torch.randn(campaigns), 0.5 * torch.randn(pages)
    rate = torch.sigmoid(-2.5 + appeal[campaign] + place[page] + 0.5 * features[:, 0] * features[:, 1])
    shown = torch.poisson(torch.exp(3 + 0.7 * torch.randn(rows + held_out))) + 1
    clicked = torch.binomial(shown, rate)

    split = torch.randperm(rows)[:late]
    clicked[split] = clicked[split] + 1 + torch.poisson(torch.full((late,), 2.0))
    shown[split] = torch.minimum(shown[split], torch.randint(0, 2, (late,)).float())
    columns = [campaign, page, features, shown, clicked]
    kept = (shown >= clicked)[:rows] if mended else torch.ones(rows, dtype=torch.bool)
    return Program(
        model=model,
        rows=TensorDataset(*(column[:rows][kept] for column in columns)),
        loss=loss,
        optimizer=lambda weights: torch.optim.Adagrad(weights, lr=0.05),
        evaluation=[column[rows:] for column in columns],
        guilty=Guilty("data", rows=tuple(sorted(split.tolist()))),
        batch_size=64,
        steps=350,
    )
