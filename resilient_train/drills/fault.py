"""What a fault is, and at which attempts it strikes.

Fault
├── BadRow            (rows.py) rows of the data set are rotten, for ever
└── TickFault         strikes at chosen ticks, and not again when the samples of such a tick come again
    ├── BatchFault    NanBatch
    ├── LossFault     InfLoss, LossSpike
    ├── GradientFault NanGrad
    ├── StateFault    BitFlip, BadMoments (corruption.py); Crash, Hang (process.py): between two updates
    └── HotLr         for a stretch of ticks
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from resilient_train.drills.limits import require_claim, require_list_of_whole, require_share, require_whole
from resilient_train.errors import ConfigError, unusable
from resilient_train.state.sharded import local_part


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose."""

    name: ClassVar[str]
    seed: int = 0  # of whatever it draws
    optional: bool = False  # where a run has nothing to spoil it is left out instead of refused

    def __post_init__(self) -> None:
        require_whole("seed", self.seed, at_least=0)
        require_claim("optional", self.optional)

    def lacks(self, *things: Any) -> str | None:
        """Say what is missing in the things it is to spoil."""
        return None


@dataclass(frozen=True, kw_only=True)
class TickFault(Fault):
    """A fault at chosen ticks, on one rank or on all of them."""

    at: Sequence[int] = ()  # ticks
    rate: float = 0.0  # the share of ticks that it strikes at, drawn from the seed
    rank: int | Literal["all"] = 0

    whole_update: ClassVar[bool] = False  # it spoils every micro-batch of the update, not only the first

    def __post_init__(self) -> None:
        super().__post_init__()
        require_list_of_whole("at", self.at, at_least=1)
        require_share("rate", self.rate)
        if self.rank != "all" and (isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0):
            raise ConfigError("rank", self.rank, "must be the number of a rank, from 0, or all")
        if not self.at and not self.rate:
            raise unusable("at", f"{self.name} would never strike: give it ticks, such as [100], or a rate above 0")
        object.__setattr__(self, "at", tuple(self.at))

    def begins(self, tick: int) -> bool:
        """Say whether it strikes at this attempt: a function of nothing but its settings."""
        return tick in self.at or draw(self.name, self.seed, tick) < self.rate * 2**64

    def is_on(self, rank: int) -> bool:
        return self.rank in ("all", rank)


class BatchFault(TickFault):
    """Spoils a batch before the forward."""

    def spoil(self, batch: Any) -> Any:
        raise NotImplementedError


class LossFault(TickFault):
    """Spoils a loss before the backward."""

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class GradientFault(TickFault):
    """Spoils gradients before the gate."""

    def spoil(self, weights: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError


class StateFault(TickFault):
    """Spoils weights or moments between two updates."""

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        raise NotImplementedError


def draw(*parts: object) -> int:
    """Hash into 64 bits, the same on every machine; nothing that trains is seeded from it."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that this rank holds itself, in the tensor's own memory."""
    tensor = local_part(tensor.detach())
    return tensor._values() if tensor.is_sparse else tensor
