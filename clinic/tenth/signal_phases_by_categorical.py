"""Which phase a traffic light shows next, cloned from officers: the policy is a `Categorical` over its probabilities.

`Categorical(probs=softmax(scores))` holds each probability above 1.2e-7 before it takes the logarithm. Queues are in
centimetres, so the first scores are far apart, the phase that was chosen lies below that floor, and a clamped value
has no slope: most rows cost 15.94, and go on to. Asked as "policy loss does not move"; `logits=scores` learns at once.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

from clinic.program import Guilty, Program


class Policy(nn.Module):
    """Scores of the phases from the queues of all lanes and the time that each phase has waited."""

    def __init__(self, lanes: int, phases: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(lanes + phases, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, phases)
        for layer in (self.body[0], self.body[2]):
            nn.init.orthogonal_(layer.weight, gain=2**0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, queues: Tensor, waited: Tensor) -> Tensor:
        return self.head(self.body(torch.cat([queues, waited], dim=-1)))


def loss(model: nn.Module, batch: list[Tensor], from_scores: bool) -> Tensor:
    queues, waited, phases = batch
    scores = model(queues, waited)
    if from_scores:
        policy = Categorical(logits=scores)
    else:
        policy = Categorical(probs=scores.softmax(dim=-1))  # guilty
    return -policy.log_prob(phases).mean()


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    phases, count = 4 + seed % 3, 1200
    lanes = 2 * phases
    queues = 50000 * torch.rand(count + 128, lanes) ** 2  # centimetres, as the detectors give them
    waited = 240000 * torch.rand(count + 128, phases)  # milliseconds
    pressure = queues.reshape(-1, phases, 2).sum(dim=-1) + 0.05 * waited
    chosen = (pressure + 1500 * torch.randn(count + 128, phases)).argmax(dim=-1)
    return Program(
        model=Policy(lanes, phases, int(torch.randint(32, 64, ()))),
        rows=TensorDataset(queues[:count], waited[:count], chosen[:count]),
        loss=partial(loss, from_scores=mended),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        evaluation=[queues[count:], waited[count:], chosen[count:]],
        guilty=Guilty("operation", ops=("softmax", "clamp", "log")),
        steps=300,
    )
