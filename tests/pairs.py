"""Two networks whose losses are stepped in turn: a GAN of convolutions, and an actor with its critic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resilient_train.data.trees import sha256
from resilient_train.loop.guard import Guard

ROWS, BATCH_SIZE = 256, 8


class Pair:
    """Networks and optimizers by name, in the order of their turns."""

    def __init__(self, accelerator: Accelerator, kind: str, *, fused: bool = True) -> None:
        torch.manual_seed(0)
        self.accelerator, self.names, self._loss, nets, self.data = accelerator, *KINDS[kind]()
        self.bare = nets
        self.optimizers = {
            name: torch.optim.AdamW(nets[name].parameters(), lr=0.003 * (1 + place), fused=fused)
            for place, name in enumerate(self.names)
        }
        self.nets = nn.ModuleDict({name: accelerator.prepare(nets[name]) for name in self.names})

    def guard(self, **more: Any) -> Guard:
        optimizers = list(self.optimizers.values())
        return Guard(
            self.accelerator, self.nets, optimizers, data=self.data, **{"batch_size": BATCH_SIZE, **more}
        )  # fmt: skip

    def loss(self, name: str, batch: Any) -> Tensor:
        return self._loss(self.nets, name, batch)

    def backward(self, name: str, batch: Any, change: Callable[[Tensor], Tensor] = lambda loss: loss) -> Tensor:
        self.optimizers[name].zero_grad()
        loss = change(self.loss(name, batch))
        self.accelerator.backward(loss)
        return loss

    def digests(self) -> dict[str, str]:
        """Digest the weights and the moments of each network."""
        found = {}
        for name, optimizer in self.optimizers.items():
            weights = list(self.bare[name].parameters())
            found[name] = sha256([weights, [dict(optimizer.state[weight]) for weight in weights]])
        return found


Kind = tuple[list[str], Callable[[Any, str, Any], Tensor], nn.ModuleDict, TensorDataset]


def _gan() -> Kind:
    """Pictures of 8 by 8; BatchNorm in both networks, whose statistics change with every forward."""
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(4, 6, 4, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.ConvTranspose2d(6, 1, 4, 2, 1), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.2), nn.Dropout(0.1)),
        *(nn.Conv2d(6, 1, 4), nn.Flatten()),
    )

    def loss(nets: Any, name: str, batch: Any) -> Tensor:
        pictures, noise = batch
        made = nets["g"](noise)
        if name == "g":
            scores: Tensor = nets["d"](made)
            return F.softplus(-scores).mean()
        scores = nets["d"](torch.cat([pictures, made.detach()]))
        return F.softplus(-scores[: len(pictures)]).mean() + F.softplus(scores[len(pictures) :]).mean()

    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(ROWS, 1, 8, 8, generator=numbers).cumsum(2).tanh(), torch.randn(ROWS, 4, 1, 1, generator=numbers)
    )
    return ["d", "g"], loss, nn.ModuleDict({"g": generator, "d": discriminator}), data


def _actor() -> Kind:
    """States, actions and rewards; the loss of the actor may be negative."""
    nets = {name: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, size)) for name, size in ACTOR.items()}

    def loss(nets: Any, name: str, batch: Any) -> Tensor:
        states, actions, rewards = batch
        advantage: Tensor = rewards - nets["critic"](states).squeeze(1)
        if name == "critic":
            return advantage.square().mean()
        chances: Tensor = nets["actor"](states).log_softmax(1)
        return -(chances.gather(1, actions[:, None]).squeeze(1) * advantage.detach()).mean()

    numbers = torch.Generator().manual_seed(1)
    states, actions = torch.randn(ROWS, 5, generator=numbers), torch.randint(3, (ROWS,), generator=numbers)
    rewards = states[:, 0] + (actions == states[:, :3].argmax(1)) + 0.1 * torch.randn(ROWS, generator=numbers)
    return ["critic", "actor"], loss, nn.ModuleDict(nets), TensorDataset(states, actions, rewards)


ACTOR = {"actor": 3, "critic": 1}
KINDS: dict[str, Callable[[], Kind]] = {"gan": _gan, "actor": _actor}


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "not": lambda loss: loss,
    "loss": lambda loss: loss * torch.nan,
    "gradient": lambda loss: loss + (loss * 0.0).sqrt(),  # its value is 0 and its slope NaN
    "spike": lambda loss: loss * 1e6,
}
