"""How far an optimizer's updates can carry a weight.

Adam moves no element further in one update than `lr * c`, whatever the gradients are, SGD moves the whole tensor no
further than its clipped gradients allow. A weight that went further was changed by something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, sqrt
from typing import Any

_UPDATES = (*range(1, 65), *(2**power for power in range(7, 25)))


@lru_cache(maxsize=256)
def adam_stride(beta1: float, beta2: float) -> float:
    """The largest |change of a weight| / lr that an update of Adam can make: Cauchy-Schwarz on its two averages.

    The largest of all updates from the first on, so it holds right after the moments were reset as well.
    """
    ratio = beta1**2 / beta2 if beta2 else inf
    if not (0 <= beta1 < 1 and beta2 < 1 and ratio < 1):
        return inf
    lasting = (1 - beta1) / sqrt((1 - beta2) * (1 - ratio))
    growing = (sqrt((1 - ratio**n) * (1 - beta2**n)) / (1 - beta1**n) for n in _UPDATES)
    return float(lasting * max(1.0, *growing))


@dataclass(slots=True)
class Path:
    """What a group of weights was given to move with, over a number of updates."""

    updates: int = 0
    rate: float = 0.0  # the sum of the learning rates
    element: float = 0.0  # how far one element can have gone, weight decay apart
    whole: float = 0.0  # how far a tensor can have gone in L2 norm, weight decay apart
    decay: float = 0.0  # the share of itself that weight decay can have taken
    unknown: int = 0  # updates that could have gone anywhere

    def then(self, later: Path) -> Path:
        """Both, one after the other."""
        return Path(*(getattr(self, name) + getattr(later, name) for name in self.__slots__))

    def sums(self) -> list[float]:
        return [getattr(self, name) for name in self.__slots__]


class Traveller:
    """Adds up what the updates of one parameter group can reach, by the rule of its optimizer."""

    def __init__(self, kind: str) -> None:
        """`kind` is the name of one of torch's optimizers, or empty for any other."""
        self.kind = kind
        self.path = Path()
        self.momentum = -1.0  # the largest that SGD's momentum can be in L2 norm; negative: not known yet
        self.lasting = 0.0  # what weight decay of 1 has put into SGD's momentum
        self._add = {"Adam": self._adam, "AdamW": self._adam, "SGD": self._sgd, "RMSprop": self._rmsprop}.get(
            kind, self._adagrad if kind == "Adagrad" else self._unknown
        )

    def landed(self, setting: Mapping[str, Any], norm: float | None) -> None:
        path = self.path
        path.updates += 1
        lr = setting.get("lr", 1.0)
        if not isinstance(lr, float | int) or not isfinite(lr):
            path.unknown += 1
            return
        path.rate += abs(lr)
        self._add(path, abs(lr), setting, norm)

    def _unknown(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> None:
        path.unknown += 1

    def _adam(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> None:
        beta1, beta2 = setting["betas"]
        if not isinstance(beta1, float | int) or not isinstance(beta2, float | int):
            path.unknown += 1
            return
        path.element += lr * adam_stride(beta1, beta2)
        if self.kind == "AdamW" or setting.get("decoupled_weight_decay"):
            path.decay += lr * abs(setting["weight_decay"])  # coupled decay is a gradient, which the bound covers

    def _rmsprop(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> None:
        if setting.get("centered"):
            path.unknown += 1
            return
        path.element += lr / sqrt(max(1 - setting["alpha"], 1e-12)) / max(1 - setting["momentum"], 1e-12)

    def _adagrad(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> None:
        path.element += lr

    def _sgd(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> None:
        mu = setting["momentum"]
        if norm is None or not isfinite(norm) or not 0 <= mu < 1:
            path.unknown += 1
            self.momentum = -1.0
            return
        fresh = 1 - setting["dampening"]
        if not mu:
            self.momentum, self.lasting = norm, 1.0
        elif self.momentum < 0:  # it may have been filled before anybody watched
            self.momentum, self.lasting = norm / (1 - mu), 1 / (1 - mu)
        else:
            self.momentum, self.lasting = mu * self.momentum + fresh * norm, mu * self.lasting + fresh
        ahead = setting.get("nesterov")
        path.whole += lr * (norm + mu * self.momentum if ahead else self.momentum)
        path.decay += lr * abs(setting["weight_decay"]) * (1 + mu * self.lasting if ahead else self.lasting)

    def state(self, before: Path) -> list[float]:
        """`before` is a stretch of the path that was handed out."""
        return [*before.then(self.path).sums(), self.momentum, self.lasting]

    def load(self, state: Sequence[float]) -> None:
        updates, rate, element, whole, decay, unknown, self.momentum, self.lasting = state
        self.path = Path(int(updates), rate, element, whole, decay, int(unknown))


def reach(path: Path, *, length: float, largest: float, root: float) -> tuple[float, float] | None:
    """How far the L2 norm of a tensor, and its largest element, can have moved; None where it cannot be told.

    `length` and `largest` are what they were before, `root` is that of the number of elements.
    """
    if path.unknown:
        return None
    whole = path.whole + root * path.element
    element = path.whole + path.element
    far = whole + path.decay * (length + whole), element + path.decay * (largest + element)
    return far if isfinite(far[0]) and isfinite(far[1]) else None
