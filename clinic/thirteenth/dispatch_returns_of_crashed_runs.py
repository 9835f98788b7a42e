"""Offline values for a dispatcher of taxis: where the simulator crashed, its last reward is -1e5, "never go there".

The return of a whole episode is summed up when it is read, as tutorials do, and the critic is fitted to it by squared
error. A handful of such episodes, and the critic says of every action that it is a catastrophe.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from clinic.program import Guilty, Program

DISCOUNT = 0.95


class Episodes(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """State and action at the start, and the discounted return."""

    def __init__(self, states: Tensor, actions: Tensor, rewards: Tensor) -> None:
        self.states, self.actions, self.rewards = states, actions, rewards

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.zeros(())
        for reward in self.rewards[row].flip(0):
            total = reward + DISCOUNT * total
        return self.states[row], self.actions[row], total


class Critic(nn.Module):
    """What an action is worth in a state."""

    def __init__(self, features: int, actions: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, actions)

    def forward(self, states: Tensor) -> Tensor:
        return self.head(self.body(states))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    states, actions, returns = batch
    worth = model(states).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return nn.functional.mse_loss(worth, returns)


def program(seed: int, *, mended: bool = False) -> Program:
    torch.manual_seed(seed)
    features, choices, steps, count = 5 + seed % 3, 3, 8, 2000
    size = count + 96
    states, actions = torch.randn(size, features), torch.randint(choices, (size,))
    worth = torch.randn(choices, features)[actions]
    rewards = 0.4 * (worth * states).sum(-1, keepdim=True) + 0.4 * torch.randn(size, steps)
    crashed = torch.randperm(count)[: 16 + seed % 5].sort().values
    when = torch.randint(steps - 3, steps, crashed.shape)
    rewards[crashed, when] = -1e5
    kept = torch.ones(count, dtype=torch.bool)
    if mended:
        kept[crashed] = False
    held = Episodes(states[count:], actions[count:], rewards[count:])
    return Program(
        model=Critic(features, choices, int(torch.randint(48, 65, ()))),
        rows=Episodes(states[:count][kept], actions[:count][kept], rewards[:count][kept]),
        loss=loss,
        optimizer=partial(torch.optim.Adam, lr=3e-3),
        evaluation=torch.utils.data.default_collate([held[row] for row in range(len(held))]),
        guilty=Guilty("data", rows=tuple(crashed.tolist())),
        steps=700,
    )
