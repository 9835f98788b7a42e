"""Two networks whose losses are stepped in turn: a GAN of convolutions, and an actor with its critic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resilient_train.adapters.guard import Guard
from resilient_train.core.tree import sha256

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

    def plain(self, batches: Iterable[Any]) -> None:
        for batch in batches:
            for name in self.names:
                self.backward(name, batch)
                self.optimizers[name].step()

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
    "loss": lambda loss: loss * torch.nan,
    "gradient": lambda loss: loss + (loss * 0.0).sqrt(),  # its value is 0 and its slope NaN
    "spike": lambda loss: loss * 1e6,
}


class Fault:
    """Spoils one loss of one turn, once."""

    def __init__(self, turn: int, name: str, how: str, rank: int = 0) -> None:
        self.turn, self.name, self.how, self.rank = turn, name, how, rank


def train(pair: Pair, guard: Guard, fault: Fault | None = None, *, settles: bool = False) -> list[Any]:
    """Train to the end of the plan; return the batches. With `settles` the verdict on the bad turn is read at once."""
    batches = []
    for turn, batch in enumerate(guard.batches(), start=1):
        batches.append(batch)
        is_struck = fault is not None and turn == fault.turn
        before = pair.digests() if is_struck else {}
        for name in pair.names:
            is_bad = is_struck and fault is not None and name == fault.name
            spoils = is_bad and fault is not None and guard.world.rank == fault.rank
            loss = pair.backward(name, batch, SPOILED[fault.how] if spoils and fault else lambda loss: loss)
            is_attempted = guard.update(loss, optimizer=pair.optimizers[name])
            assert not is_attempted or name == pair.names[-1]
        if is_struck and settles:
            assert not guard.settle()
            assert pair.digests() == before
    return batches


def on_a_rank(kind: str, fault: Fault | None, steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train on one rank of several, and then again without a guard if nothing is spoiled."""
    accelerator = Accelerator(cpu=True)
    pair = Pair(accelerator, kind)
    guard = pair.guard(steps=steps, **more)
    batches = train(pair, guard, fault, settles=fault is not None)
    told = {
        "digests": pair.digests(),
        "tick": guard.clock.tick,
        "ranks": [one.anomaly.ranks for one in guard.incidents],
    }
    guard.close()
    told["names"] = list(guard.state.live()["weights"])
    if fault is None:  # nothing may be random in it
        again = Pair(accelerator, kind)
        again.plain(batches)
        told["plain"] = again.digests()
    guard.world.leave()
    return told
