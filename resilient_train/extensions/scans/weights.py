"""The scans of weights, buffers and the optimizers' state: are they finite, and can updates have moved them this far?

An update of Adam moves no element farther than `lr * c`, whatever the gradients are; an update of SGD moves a tensor
no farther than its clipped gradients allow. A weight that moved farther was changed by something else. Second moments
change as they must. Free of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from math import inf, isfinite, isnan, sqrt
from typing import Any, ClassVar, NamedTuple

from resilient_train.core.loss import PlainState
from resilient_train.extensions.checks.config import ScanConfig
from resilient_train.ground.types import Facts, Signal, fact

_ROUNDING = 1e-4  # relative error of a float32 norm, from one measurement to the next
_COARSE_ROUNDING = 2**-8  # relative error of bfloat16, in each update
_REMARKABLE = 0.25  # share of its size that a tensor must have changed by, to be judged by the bound of its norm
KEPT = "kept."  # how the names of tensors begin that the user keeps
_LOUD = 100.0  # times the largest weight of the model


class Found(NamedTuple):
    signal: Signal
    evidence: Facts  # one, with the name of a tensor or a layer
    acceptable: bool = True  # it can be on purpose, as a weight that is not finite cannot
    size: float = 0.0  # of what is there now

    @property
    def subject(self) -> str:
        return str(self.evidence[0]["name"])

    def is_like(self, other: Found) -> bool:
        """Say whether it is about as large: damage differs each time, what code writes does not."""
        return self.subject == other.subject and max(self.size, other.size) <= 2 * min(self.size, other.size)


def nonfinite(signal: Signal, values: Mapping[str, float], free: Collection[str], bounded: set[str]) -> Found | None:
    """Find what is not finite. The `free` may be so on purpose, but not once they were finite: then they are `bounded`.
    NaN on one of several ranks arrives as inf, the largest value: both are treated alike.
    """
    bad = [name for name, value in values.items() if not isfinite(value) and (name not in free or name in bounded)]
    bounded.update(name for name in free if isfinite(values[name]))
    if not bad:
        return None
    first = bad[0]
    evidence = fact("not_finite", name=first, value=values[first], more=len(bad) - 1, count=len(values))
    return Found(signal, evidence, acceptable=first.startswith(KEPT))


class Scan(PlainState):
    def __init__(self, every: int) -> None:
        self.every = every  # updates; 0: off
        self.clean_step = 0  # the newest step that it has seen and found clean
        self.base: Any = None  # the last measurement, with which the next one is compared
        self.bounded: set[str] = set()  # what was finite once; other tensors have inf or NaN on purpose

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step > 0 and step % self.every == 0

    def rebase(self) -> None:
        self.base = None

    def _concluded(self, step: int, found: Found | None, seen: Any) -> Found | None:
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self.base = seen
        return found


@lru_cache(maxsize=256)
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
    """How far the updates since the last measurement can have moved the weights of a parameter group."""

    kind: str  # the name of one of torch's optimizers, or empty for any other
    updates: int = 0
    element: float = 0.0  # of one element, without weight decay
    whole: float = 0.0  # of a tensor in L2 norm, without weight decay
    decay: float = 0.0  # the share of a tensor that weight decay can have taken
    unknown: int = 0  # updates without a bound
    momentum: float = -1.0  # bound of the L2 norm of SGD's momentum; negative: not known yet
    decay_momentum: float = 0.0  # what a weight decay of 1 has put into SGD's momentum

    def restart(self) -> None:
        self.updates = self.unknown = 0
        self.element = self.whole = self.decay = 0.0

    def landed(self, setting: Mapping[str, Any], norm: float | None) -> None:
        """Add an update with the settings of the group. `norm` is that of the clipped gradients, if known."""
        kind, lr, betas = self.kind, setting.get("lr", 1.0), setting.get("betas", ())
        self.updates += 1
        if not isinstance(lr, float | int) or not isfinite(lr):
            self.unknown += 1
            return
        lr = abs(lr)
        if kind in ("Adam", "AdamW") and all(isinstance(beta, float | int) for beta in betas):
            self.element += lr * adam_stride(*betas)
            if kind == "AdamW" or setting.get("decoupled_weight_decay"):
                self.decay += lr * abs(setting["weight_decay"])  # coupled decay is a gradient, which the bound covers
        elif kind == "SGD" and norm is not None and isfinite(norm) and 0 <= setting["momentum"] < 1:
            self._add_sgd(lr, setting, norm)
        elif kind == "RMSprop" and not setting.get("centered"):
            self.element += lr / sqrt(max(1 - setting["alpha"], 1e-12)) / max(1 - setting["momentum"], 1e-12)
        elif kind == "Adagrad":
            self.element += lr
        else:
            self.unknown += 1
            self.momentum = -1.0

    def _add_sgd(self, lr: float, setting: Mapping[str, Any], norm: float) -> None:
        mu, new_share = setting["momentum"], 1 - setting["dampening"]
        if not mu:
            self.momentum, self.decay_momentum = norm, 1.0
        elif self.momentum < 0:  # updates before the first one that was watched may have filled it
            self.momentum, self.decay_momentum = norm / (1 - mu), 1 / (1 - mu)
        else:
            self.momentum = mu * self.momentum + new_share * norm
            self.decay_momentum = mu * self.decay_momentum + new_share
        step, decay = self.momentum, self.decay_momentum
        if setting.get("nesterov"):
            step, decay = norm + mu * step, 1 + mu * decay
        self.whole += lr * step
        self.decay += lr * abs(setting["weight_decay"]) * decay

    def reach(self, *, length: float, largest: float, root: float) -> tuple[float, float] | None:
        """How far the norm of a tensor and its largest element can have moved; None if that is not known."""
        if self.unknown:
            return None
        whole, element = self.whole + root * self.element, self.whole + self.element
        far = whole + self.decay * (length + whole), element + self.decay * (largest + element)
        return far if isfinite(far[0]) and isfinite(far[1]) else None


@dataclass(frozen=True)
class Weight:
    name: str
    group: int | None  # the parameter group that updates it, counted over all optimizers
    root: float  # the square root of the number of its elements
    coarse: bool = False  # it is of a dtype in which small changes are lost to rounding


class _Measured(NamedTuple):
    step: int
    lengths: Mapping[str, float]  # L2 norms
    largest: Mapping[str, float]


class Weights(Scan):
    """A tensor jumped if it moved farther than its optimizer can; if that is not known, if it dwarfs the model."""

    saved = ("clean_step", "base", "bounded", "unbounded")
    records: ClassVar = {"base": lambda plain: _Measured(*plain)}

    def __init__(self, config: ScanConfig, weights: Sequence[Weight], kinds: Sequence[str]) -> None:
        """`kinds` names the optimizer of each parameter group; an empty name is one that torch does not have."""
        super().__init__(config.every)
        self.config, self.weights = config, list(weights)
        self.paths = [Path(kind) for kind in kinds]
        # What is kept and was not finite at first: an infinite minimum is so again when it is reset.
        self.unbounded: set[str] = set()

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        for path, setting in zip(self.paths, settings, strict=True):
            path.landed(setting, norm)

    def judge(
        self,
        step: int,
        lengths: Mapping[str, float],
        largest: Mapping[str, float],
        buffers: Mapping[str, float],
        kept: Mapping[str, float],
    ) -> Found | None:
        """`lengths` are the L2 norms of the weights, all others the largest absolute values."""
        seen = _Measured(step, lengths, largest)
        self.unbounded |= {name for name, value in kept.items() if not isfinite(value)} - self.bounded
        others = {name: value for name, value in {**buffers, **kept}.items() if name not in self.unbounded}
        free = {weight.name for weight in self.weights if weight.group is None} | others.keys()
        found = nonfinite(Signal.NONFINITE_WEIGHTS, {**largest, **others}, free, self.bounded)
        if found is None and self.base is not None:
            found = self._jumped(self.base, seen)
        for path in self.paths:
            path.restart()
        return self._concluded(step, found, seen)

    def _jumped(self, base: _Measured, seen: _Measured) -> Found | None:
        loudest = max((value for value in base.largest.values() if isfinite(value)), default=0.0)
        worst, found = 0.0, None
        for weight in self.weights:
            excess, evidence = self._excess(weight, base, seen, loudest)
            if excess > worst:
                size = seen.largest[weight.name]
                worst, found = excess, Found(Signal.WEIGHTS_JUMP, evidence, size=size)
        return found

    def _excess(self, weight: Weight, base: _Measured, seen: _Measured, loudest: float) -> tuple[float, Facts]:
        """Return how many times farther than possible a tensor moved, and the evidence; 0 if it did not."""
        norm = base.lengths[weight.name], seen.lengths[weight.name]
        top = base.largest[weight.name], seen.largest[weight.name]
        if not isfinite(top[0]) or not isfinite(top[1]):
            return 0.0, ()
        path = None if weight.group is None else self.paths[weight.group]
        far = path.reach(length=norm[0], largest=top[0], root=weight.root) if path else None
        if path is None or far is None:
            if top[1] > _LOUD * loudest > 0:
                huge = fact("weight_huge", name=weight.name, before=top[0], now=top[1], largest=loudest)
                return top[1] / loudest, huge
            return 0.0, ()
        if all(abs(now - before) <= _REMARKABLE * before for before, now in (norm, top)):
            # The sharp bound of the norm does not apply: a loop may shrink its weights a little in each step.
            each = path.element + path.whole
            if abs(top[1] - top[0]) <= each and abs(norm[1] - norm[0]) <= weight.root * each:
                return 0.0, ()
        slack, rounding = self.config.margin, _ROUNDING
        if weight.coarse:
            slack, rounding = 2 * slack, path.updates * _COARSE_ROUNDING
        for what, (before, now), reached in (("max |w|", top, far[1]), ("norm", norm, far[0])):
            moved, room = abs(now - before), slack * reached + rounding * before
            if isfinite(now) and moved > room:
                moves = {"what": what, "before": before, "now": now}
                moves["bound"] = before + room if now > before else max(before - room, 0.0)
                evidence = fact("weight_jumped", name=weight.name, updates=path.updates, **moves)
                return moved / room if room else inf, evidence
        return 0.0, ()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "paths": [list(astuple(path)) for path in self.paths]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        paths, names = state["paths"], {weight.name for weight in self.weights}
        if len(paths) == len(self.paths) and (self.base is None or self.base.lengths.keys() == names):
            self.paths = [Path(*path) for path in paths]
        else:  # it is of a model with other parameters
            self.base, self.paths = None, [Path(path.kind) for path in self.paths]


# Moments that cannot be negative, by torch's names for them. "fades": an update leaves at least a share of it,
# `betas[1]` or the like; "never": it cannot shrink; None: it may do either.
SQUARES: dict[str, str | None] = {
    **dict.fromkeys(("exp_avg_sq", "exp_inf", "square_avg", "acc_delta"), "fades"),
    **dict.fromkeys(("sum", "max_exp_avg_sq"), "never"),
    **dict.fromkeys(("row_var", "col_var", "variance"), None),
}
_COARSE_SLACK = 1.5  # times the margin, for a dtype in which small changes are lost to rounding
_TINY = 1e-30  # smaller sums of float32 have lost their precision


class Moment(NamedTuple):  # the key of many measurements: a dataclass takes five times as long to hash
    name: str  # "exp_avg_sq of block.2.fc.weight"
    group: int
    key: str
    by_torch: bool  # it is of one of torch's own optimizers, whose keys have a known meaning
    coarse: bool = False

    @property
    def is_square(self) -> bool:
        return self.by_torch and self.key in SQUARES


class Moments(Scan):
    """An update leaves at least a share `beta2` of a second moment, whatever the gradients are."""

    saved = ("clean_step", "base", "updates", "left", "bounded")

    def __init__(self, config: ScanConfig, groups: int) -> None:
        super().__init__(config.every)
        self.config = config
        self.updates = 0  # since the last measurement
        self.left = [1.0] * groups  # the least share of each group's second moments that these leave

    def landed(self, settings: Sequence[Mapping[str, Any]]) -> None:
        self.updates += 1
        self.left = [left * _share_left(setting) for left, setting in zip(self.left, settings, strict=True)]

    def judge(
        self, step: int, plain: Mapping[Moment, float], squares: Mapping[Moment, float], depths: Mapping[Moment, float]
    ) -> Found | None:
        """Judge plain moments' largest values, and squares' sums and their depths below zero."""
        sums = {moment.name: value for moment, value in squares.items()}
        found = None
        if below := [(depth, moment.name) for moment, depth in depths.items() if 0 < depth < inf]:
            depth, name = max(below)
            evidence = fact("moment_negative", name=name, value=-depth)
            found = Found(Signal.OPTIMIZER_RANGE, evidence, acceptable=False)
        else:
            named = {moment.name: value for moment, value in {**plain, **squares}.items()}
            # A user's own optimizer may have an infinity on purpose, such as a best loss.
            free = {moment.name for moment, value in plain.items() if not moment.by_torch and not isnan(value)}
            found = nonfinite(Signal.NONFINITE_OPTIMIZER, named, free, self.bounded)
        if found is None and self.base is not None:
            found = self._shrunk(self.base, squares)
        self.updates, self.left = 0, [1.0] * len(self.left)
        return self._concluded(step, found, sums)

    def _shrunk(self, old: Mapping[str, float], squares: Mapping[Moment, float]) -> Found | None:
        worst, found = inf, None
        for moment, now in squares.items():
            before, rule = old.get(moment.name, 0.0), SQUARES[moment.key]
            least = before * (1.0 if rule == "never" else self.left[moment.group])
            least /= self.config.margin * (_COARSE_SLACK if moment.coarse else 1.0)
            if rule is not None and now < least and least > _TINY and now / least < worst:
                worst = now / least
                sizes = {"before": before, "now": now, "least": least}
                evidence = fact("moments_shrank", name=moment.name, updates=self.updates, **sizes)
                found = Found(Signal.OPTIMIZER_RANGE, evidence)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = len(self.left)
        super().load_state_dict(state)
        if len(self.left) != groups:  # it is of a run with other optimizers
            self.base, self.updates, self.left = None, 0, [1.0] * groups


def _share_left(setting: Mapping[str, Any]) -> float:
    """Return the least share of a second moment that an update leaves: 0 where that is not known."""
    betas = setting.get("betas")
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    share = betas[1] if is_pair else setting.get("alpha", setting.get("rho"))  # type: ignore[index]
    return float(share) if isinstance(share, float | int) else 0.0
