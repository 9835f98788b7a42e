"""The scans of weights, buffers and the optimizers' state: are they finite, and can updates have moved them this far?

An update of Adam or RMSprop moves no element farther than `lr * c`, whatever the gradients are; one of SGD no farther
than its clipped gradients allow. A weight that moved farther was changed by something else. Second moments shrink no
faster than they must. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf, isfinite, sqrt
from typing import Any, ClassVar, NamedTuple

from resilient_train.core.loss import Every, PlainState
from resilient_train.ground.reader import limited
from resilient_train.ground.types import Facts, Signal, fact


@dataclass
class ScanConfig(Every):
    margin: float = limited(at_least=1)


@dataclass
class NormsConfig(Every):
    factor: float = limited(above=1)


KEPT = "kept.*"  # the name of all that the user keeps
_REMARKABLE = 0.25  # of its size: a smaller change is no jump, as rounding and a loop that shrinks its weights make it
_LOUD = 100.0  # times the largest weight of the model
_ROUNDING = 1 + 2**-8  # of second moments in bfloat16, in each update
_TINY = 1e-30  # smaller moments of float32 have lost their precision
_LEAST = 1e-3  # of statistics: those of a layer without input fade to nothing
# Moments of which an update leaves at least a share, by torch's names for them.
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg"}


class Watched(NamedTuple):
    scan: str
    name: str  # "exp_avg_sq of block.2.fc.weight"
    group: int | None = None  # the parameter group that it belongs to, counted over all optimizers
    is_weight: bool = False
    total: str = ""  # what else is measured of it: the sum of a second moment, the length of a weight of SGD
    is_free: bool = False  # it may hold NaN or infinities on purpose, until it was finite once


class Numbers(NamedTuple):
    largest: float  # absolute value
    total: float = 0.0  # the sum of second moments, which are not negative, or the length of a weight


Measured = Sequence[tuple[Watched, Numbers]]


class Found(NamedTuple):
    signal: Signal
    evidence: Facts = ()  # one, with the name of a tensor or a layer
    acceptable: bool = True  # it can be on purpose, as a weight that is not finite cannot
    size: float = 0.0  # of what is there now

    @property
    def subject(self) -> str:
        return str(self.evidence[0]["name"])

    def is_like(self, other: Found) -> bool:
        """Say whether it is about as large: damage differs each time, what code writes does not."""
        return self.subject == other.subject and max(self.size, other.size) <= 2 * min(self.size, other.size)


def adam_stride(beta1: float, beta2: float) -> float:
    """Return the largest |change of a weight| / lr in an update of Adam: Cauchy-Schwarz on its two averages.

    It holds from the first update on, also right after the moments were reset. The bound of the n-th update is this one
    times sqrt((1 - ratio^n) (1 - beta2^n)) / (1 - beta1^n). That is at most 1, since ratio * beta2 is beta1^2.
    """
    ratio = beta1**2 / beta2 if beta2 else inf
    if not (0 <= beta1 < 1 and beta2 < 1 and ratio < 1):
        return inf
    return (1 - beta1) / sqrt((1 - beta2) * (1 - ratio))


@dataclass(slots=True)
class Path:
    """What the updates since the last measurement can have done to the weights of a parameter group."""

    kind: str  # the name of one of torch's optimizers, or empty for any other
    updates: int = 0
    element: float = 0.0  # how far an element can have moved, without weight decay
    decay: float = 0.0  # the share of a tensor that weight decay can have taken
    left: float = 1.0  # the least share of second moments that they leave
    is_known: bool = True  # each of them had a bound
    momentum: float = -1.0  # bound of the norm of SGD's momentum; negative: not known yet

    def landed(self, setting: Mapping[str, Any], norm: float | None) -> None:
        """Add an update with the settings of the group. `norm` is that of the clipped gradients, if known."""
        self.updates += 1
        element, decay, left = self._bound(setting, norm) if self.kind else _UNKNOWN
        self.left *= left
        if not isfinite(element + decay):
            self.is_known, self.momentum = False, -1.0
        elif self.is_known:
            self.element, self.decay = self.element + element, self.decay + decay

    def _bound(self, setting: Mapping[str, Any], norm: float | None) -> tuple[float, float, float]:
        """Return how far one update can move an element, the share that decay takes, and that of moments it leaves."""
        lr, betas = setting["lr"], setting.get("betas", ())
        left = betas[1] if betas else setting.get("alpha", 0.0)
        if not all(isinstance(one, float | int) for one in (lr, left, *betas)):
            return _UNKNOWN  # they are tensors
        if self.kind in ("Adam", "AdamW"):
            # Coupled decay is a gradient, which the bound covers.
            is_decoupled = self.kind == "AdamW" or setting.get("decoupled_weight_decay")
            return abs(lr) * adam_stride(*betas), abs(lr * setting["weight_decay"]) if is_decoupled else 0.0, left
        if self.kind == "SGD" and norm is not None:
            mu = setting["momentum"]
            is_first = self.momentum < 0  # updates before the first one that was watched may have filled it
            self.momentum = norm * _sum(mu) if is_first else mu * self.momentum + norm
            step = norm + mu * self.momentum if setting.get("nesterov") else self.momentum
            return abs(lr) * step, abs(lr * setting["weight_decay"]) * _sum(mu), left
        if self.kind == "RMSprop" and not setting.get("centered"):
            return abs(lr) * sqrt(_sum(left)) * _sum(setting["momentum"]), 0.0, left
        return inf, 0.0, left

    def reach(self, largest: float) -> float:
        """How far the largest element of a tensor can have moved."""
        return self.element + self.decay * (largest + self.element)


_UNKNOWN = inf, 0.0, 0.0


def _sum(share: float) -> float:
    """1 + share + share^2 + ..."""
    return 1 / max(1 - share, 1e-12)


class Scan(PlainState):
    """Judges numbers that were measured of some tensors, by those of the last measurement."""

    saved = ("clean_step", "base", "bounded", "loose")
    nonfinite: ClassVar = Signal.NONFINITE_WEIGHTS
    jumped: ClassVar = Signal.WEIGHTS_JUMP

    def __init__(self, config: Every, kinds: Sequence[str] = ()) -> None:
        """`kinds` names the optimizer of each parameter group; an empty name is one that torch does not have."""
        self.config: Any = config
        self.every = config.every  # updates; 0: off
        self.clean_step = 0  # the newest step that it has seen and found clean
        # Free tensors that were not finite at first, as a minimum until it is set, and all that the loop writes itself.
        self.loose: set[str] = set()
        self.bounded: set[str] = set()  # all that were finite once
        self.restart(kinds)

    def restart(self, kinds: Sequence[str]) -> None:
        self.base: dict[str, Any] = {}  # the last numbers of each tensor, with which the next ones are compared
        self.paths = [Path(kind) for kind in kinds]

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step > 0 and step % self.every == 0

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        for path, setting in zip(self.paths, settings, strict=False):
            path.landed(setting, norm)

    def look(self, measured: Measured) -> Found | None:
        """Return the worst that is wrong. NaN on one of several ranks arrives as inf: both are treated alike."""
        bad = [(one.name, now.largest) for one, now in measured if not isfinite(now.largest) and self._is_bound(one)]
        if bad:
            (name, value), count = bad[0], len(measured)
            evidence = fact("not_finite", name=name, value=value, more=len(bad) - 1, count=count)
            return Found(self.nonfinite, evidence, acceptable=name == KEPT)
        worst, found = 1.0, None
        for one, now in measured:
            if one.name in self.base and one.name not in self.loose and isfinite(now.largest):
                excess, evidence = self.excess(one, Numbers(*self.base[one.name]), now)
                if excess > worst:
                    worst, found = excess, Found(self.jumped, evidence, size=now.largest)
        return found

    def _is_bound(self, one: Watched) -> bool:
        return not one.is_free or (one.name in self.bounded and one.name not in self.loose)

    def excess(self, one: Watched, before: Numbers, now: Numbers) -> tuple[float, Facts]:
        """Return how many times farther than possible a tensor moved, and the evidence."""
        raise NotImplementedError

    def learn(self, step: int, measured: Measured, found: Found | None) -> None:
        self.loose |= {one.name for one, now in measured if not isfinite(now.largest) and not self._is_bound(one)}
        self.bounded |= {one.name for one, now in measured if isfinite(now.largest)}
        self.paths = [Path(path.kind, momentum=path.momentum) for path in self.paths]
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self.base |= {one.name: list(numbers) for one, numbers in measured if all(map(isfinite, numbers))}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "paths": [list(astuple(path)) for path in self.paths]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.paths = [Path(*path) for path in state["paths"]]


class Weights(Scan):
    """A weight jumped if it moved farther than its optimizer can; if that is not known, if it dwarfs the model."""

    def look(self, measured: Measured) -> Found | None:
        sizes = [self.base[one.name][0] for one, _ in measured if one.is_weight and one.name in self.base]
        self._loudest = max(sizes, default=0.0)
        return super().look(measured)

    def excess(self, one: Watched, before: Numbers, now: Numbers) -> tuple[float, Facts]:
        if not one.is_weight:
            return 0.0, ()
        path, was, size = None if one.group is None else self.paths[one.group], before.largest, now.largest
        if path is not None and path.kind == "SGD" and not path.is_known:  # its updates may be of any size
            return 0.0, ()
        if path is None or not path.is_known:
            huge = fact("weight_huge", name=one.name, before=was, now=size, largest=self._loudest)
            return size / (_LOUD * self._loudest) if self._loudest else 0.0, huge
        worst: tuple[float, Facts] = 0.0, ()
        for long, (was, size) in enumerate(zip(before, now, strict=True)):
            moved, room = abs(size - was), self.config.margin * path.reach(was)
            excess = moved / max(room, _TINY)
            if moved > max(room, _REMARKABLE * was) and excess > worst[0]:
                bound = was + room if size > was else max(was - room, 0.0)
                seen = {"name": one.name, "long": long, "before": was, "now": size, "bound": bound}
                worst = excess, fact("weight_jumped", **seen, updates=path.updates)
        return worst


class Moments(Scan):
    """An update leaves at least a share `beta2` of a second moment, whatever the gradients are."""

    nonfinite = Signal.NONFINITE_OPTIMIZER
    jumped = Signal.OPTIMIZER_RANGE

    def excess(self, one: Watched, before: Numbers, now: Numbers) -> tuple[float, Facts]:
        if one.group is None or one.total != "sum":
            return 0.0, ()
        path = self.paths[one.group]
        least = before.total * path.left / (self.config.margin * _ROUNDING**path.updates)
        sizes = {"before": before.total, "now": now.total, "least": least}
        excess = least / now.total if now.total > 0 else inf
        return excess if least > _TINY else 0.0, fact("moments_shrank", name=one.name, updates=path.updates, **sizes)


class Norms(Scan):
    """Running statistics of normalization layers: no training loss shows their damage, as only evaluation uses them."""

    def excess(self, one: Watched, before: Numbers, now: Numbers) -> tuple[float, Facts]:
        evidence = fact("statistics_out", name=one.name, before=before.largest, now=now.largest)
        return now.largest**2 / (self.config.factor * max(before.largest**2, _LEAST)), evidence
