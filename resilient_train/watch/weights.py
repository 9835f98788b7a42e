"""The weights and buffers, judged by what was measured of them and by how far updates can carry them. Free of torch.

Adam moves no element further in one update than `lr * c`, whatever the gradients are, SGD moves the whole tensor no
further than its clipped gradients allow. A weight that went further was changed by something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

from resilient_train.types import Signal
from resilient_train.watch.config import WeightsConfig

_ROUNDING = 1e-4  # of a float32 norm, from one measurement to the next
_COARSE_ROUNDING = 2**-8  # of bfloat16, in each update
_ENOUGH = 4  # changes seen before a tensor is compared with its own past
_FADES = 0.9  # what the largest change of the past counts for with every scan
_REMARKABLE = 0.25  # the share of a tensor that must have changed before its past is looked at
_FULL_SPEED = 0.5  # healthy tensors as a whole move at a fraction of lr an update, where Adam moves them
_LEAP = 3  # times the highest rate of recent updates
_LOUD = 100.0  # times the largest weight of the model
_UPDATES = (*range(1, 65), *(2**power for power in range(7, 25)))


class Found(NamedTuple):
    """What a scan found wrong."""

    signal: Signal
    subject: str  # the tensor, or what else it is about
    evidence: str
    acceptable: bool = True  # it could be done on purpose: not if it is not finite


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


class Traveller:
    """Adds up what the updates of one parameter group can reach, by the rule of its optimizer."""

    def __init__(self, kind: str) -> None:
        """`kind` is the name of one of torch's optimizers, or empty for any other."""
        self.kind = kind
        self.path = Path()  # since the last measurement
        self.measured = Path()  # before that, up to a measurement that was not judged yet
        self.momentum = -1.0  # the largest that SGD's momentum can be in L2 norm; negative: not known yet
        self.lasting = 0.0  # what weight decay of 1 has put into SGD's momentum

    def landed(self, setting: Mapping[str, Any], norm: float | None) -> None:
        path = self.path
        path.updates += 1
        lr = setting.get("lr", 1.0)
        if not isinstance(lr, float | int) or not isfinite(lr):
            path.unknown += 1
            return
        path.rate += abs(lr)
        if not self._add(path, abs(lr), setting, norm):
            path.unknown += 1

    def _add(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> bool:
        """Add one update; False where it could have gone anywhere."""
        if self.kind in ("Adam", "AdamW"):
            beta1, beta2 = setting["betas"]
            if not isinstance(beta1, float | int) or not isinstance(beta2, float | int):
                return False
            path.element += lr * adam_stride(beta1, beta2)
            if self.kind == "AdamW" or setting.get("decoupled_weight_decay"):
                path.decay += lr * abs(setting["weight_decay"])  # coupled decay is a gradient, which the bound covers
        elif self.kind == "SGD":
            return self._add_sgd(path, lr, setting, norm)
        elif self.kind == "RMSprop" and not setting.get("centered"):
            path.element += lr / sqrt(max(1 - setting["alpha"], 1e-12)) / max(1 - setting["momentum"], 1e-12)
        elif self.kind == "Adagrad":
            path.element += lr
        else:
            return False
        return True

    def _add_sgd(self, path: Path, lr: float, setting: Mapping[str, Any], norm: float | None) -> bool:
        mu = setting["momentum"]
        if norm is None or not isfinite(norm) or not 0 <= mu < 1:
            self.momentum = -1.0
            return False
        fresh = 1 - setting["dampening"]
        if not mu:
            self.momentum, self.lasting = norm, 1.0
        elif self.momentum < 0:  # it may have been filled before anything was watched
            self.momentum, self.lasting = norm / (1 - mu), 1 / (1 - mu)
        else:
            self.momentum, self.lasting = mu * self.momentum + fresh * norm, mu * self.lasting + fresh
        ahead = setting.get("nesterov")
        path.whole += lr * (norm + mu * self.momentum if ahead else self.momentum)
        path.decay += lr * abs(setting["weight_decay"]) * (1 + mu * self.lasting if ahead else self.lasting)
        return True

    def begin(self) -> None:
        """A measurement is made: what was travelled is judged with it."""
        self.measured, self.path = self.path, Path()

    def state(self) -> list[float]:
        path = self.measured.then(self.path)
        return [*(getattr(path, name) for name in path.__slots__), self.momentum, self.lasting]

    def load(self, state: Sequence[float]) -> None:
        updates, rate, element, whole, decay, unknown, self.momentum, self.lasting = state
        self.path, self.measured = Path(int(updates), rate, element, whole, decay, int(unknown)), Path()


def reach(path: Path, *, length: float, largest: float, root: float) -> tuple[float, float] | None:
    """How far the L2 norm of a tensor, and its largest element, can have moved; None where it is not known.

    `length` and `largest` are what they were before, `root` is that of the number of elements.
    """
    if path.unknown:
        return None
    whole = path.whole + root * path.element
    element = path.whole + path.element
    far = whole + path.decay * (length + whole), element + path.decay * (largest + element)
    return far if isfinite(far[0]) and isfinite(far[1]) else None


@dataclass(frozen=True)
class Weight:
    """One tensor of weights, as far as a judge has to know it."""

    name: str
    group: int | None  # the parameter group that updates it, counted over all optimizers
    root: float  # of the number of its elements
    coarse: bool = False


@dataclass
class _Seen:
    """One measurement of all weights."""

    step: int
    length: list[float]  # L2 norms
    largest: list[float]


@dataclass
class _Past:
    """The largest changes of each tensor, per unit of learning rate; what is long ago counts for less."""

    length: list[float]
    largest: list[float]
    times: list[int]


class Weights:
    """Compares each measurement with the one before and with what the updates in between can have done.

    A tensor jumped when it went further than its optimizer can go; or when its norm changed by a large share of
    itself and by far more than it did recently; or, where neither is known, when it dwarfs the whole model.
    """

    def __init__(self, config: WeightsConfig, weights: Sequence[Weight], kinds: Sequence[str]) -> None:
        """`kinds` names the optimizer of each parameter group, or is empty for one that torch does not have."""
        self.config, self.every, self.weights = config, config.every, list(weights)
        self.travellers = [Traveller(kind) for kind in kinds]
        self.base: _Seen | None = None
        self.clean_step = 0
        self._bounded: set[str] = set()  # buffers that were finite once; others hold inf or NaN on purpose
        self._past = self._no_past()
        self._usual_rate = 0.0  # the highest learning rate of recent updates

    def _no_past(self) -> _Past:
        count = len(self.weights)
        return _Past([0.0] * count, [0.0] * count, [0] * count)

    def rebase(self) -> None:
        """Take the next measurement as it is."""
        self.base = None
        for traveller in self.travellers:
            traveller.measured = Path()

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        for traveller, setting in zip(self.travellers, settings, strict=True):
            traveller.landed(setting, norm)

    def begin(self) -> None:
        """A measurement is made, of which `judge` gets the numbers later."""
        for traveller in self.travellers:
            traveller.begin()

    def put_back(self) -> None:
        """The last measurement is not judged: the next one is of all that was travelled."""
        for traveller in self.travellers:
            traveller.path, traveller.measured = traveller.measured.then(traveller.path), Path()

    def judge(self, step: int, buffers: Sequence[str], values: Sequence[float]) -> Found | None:
        """`values`: the L2 norms, the largest absolute values, then those of the buffers."""
        paths = [traveller.measured for traveller in self.travellers]
        for traveller in self.travellers:
            traveller.measured = Path()
        count = len(self.weights)
        seen = _Seen(step, list(values[:count]), list(values[count : 2 * count]))
        found = self._nonfinite(seen, dict(zip(buffers, values[2 * count :], strict=True)))
        if found is None and self.base is not None:
            found = self._jumped(self.base, seen, paths)
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self.base = seen
        return found

    def _nonfinite(self, seen: _Seen, buffers: Mapping[str, float]) -> Found | None:
        named = {weight.name: value for weight, value in zip(self.weights, seen.largest, strict=True)}
        free = {weight.name for weight in self.weights if weight.group is None} | set(buffers)
        named |= buffers
        by_design = free - self._bounded
        # Of several ranks the largest value is judged, and there a NaN counts as infinite: no difference is made.
        bad = [(name, value) for name, value in named.items() if not isfinite(value) and name not in by_design]
        self._bounded |= {name for name in by_design if isfinite(named[name])}
        if not bad:
            return None
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        evidence = f"not finite: {bad[0][0]} holds {bad[0][1]}{more}, of {len(named)} tensors"
        return Found(Signal.NONFINITE_WEIGHTS, bad[0][0], evidence, acceptable=False)

    def _jumped(self, base: _Seen, seen: _Seen, paths: Sequence[Path]) -> Found | None:
        loudest = max((value for value in base.largest if isfinite(value)), default=0.0)
        worst: tuple[float, Found] | None = None
        for number, weight in enumerate(self.weights):
            path = None if weight.group is None else paths[weight.group]
            if self._is_quiet(number, weight, base, seen, path):
                continue
            excess, evidence = self._excess(number, weight, base, seen, path, loudest)
            if evidence and (worst is None or excess > worst[0]):
                worst = excess, Found(Signal.WEIGHTS_JUMP, weight.name, f"weights jumped: {weight.name} {evidence}")
        if worst is not None:
            return worst[1]
        self._learn(base, seen, paths)
        return None

    def _is_quiet(self, number: int, weight: Weight, base: _Seen, seen: _Seen, path: Path | None) -> bool:
        """Whether nothing below could find anything: so it is with nearly all tensors."""
        before, top = base.length[number], base.largest[number]
        moved, topped = abs(seen.length[number] - before), abs(seen.largest[number] - top)
        if not (moved <= _REMARKABLE * before and topped <= _REMARKABLE * top):
            return False
        if path is None or path.unknown:
            return True
        far = path.element + path.whole
        return topped <= far and moved <= weight.root * far

    def _excess(
        self, number: int, weight: Weight, base: _Seen, seen: _Seen, path: Path | None, loudest: float
    ) -> tuple[float, str]:
        """How many times further than possible a tensor went, and a line about it; an empty line if it did not."""
        norm, top = (base.length[number], seen.length[number]), (base.largest[number], seen.largest[number])
        if not isfinite(top[0]) or not isfinite(top[1]):
            return 0.0, ""
        far = reach(path, length=norm[0], largest=top[0], root=weight.root) if path else None
        if path is not None and far is not None:
            slack, rounding = self.config.margin, _ROUNDING
            if weight.coarse:
                slack, rounding = 2 * slack, path.updates * _COARSE_ROUNDING
            for what, (before, now), reached in (("max |w|", top, far[1]), ("norm", norm, far[0])):
                moved, room = abs(now - before), slack * reached + rounding * before
                if isfinite(now) and moved > room:
                    bound = f"{before + room:.4g}" if now > before else f"{max(before - room, 0.0):.4g}"
                    evidence = f"{what} {before:.4g} -> {now:.4g} where {path.updates} updates can reach {bound}"
                    return moved / room if room else inf, evidence
        if path is not None and path.updates and path.rate / path.updates > _LEAP * self._usual_rate > 0:
            return 0.0, ""  # what a leap of the rate does is no damage to the weights, and shows in the loss
        has_bound = path is not None and not path.unknown
        past = self._past
        if past.times[number] < _ENOUGH:
            if not has_bound and top[1] > _LOUD * loudest > 0:
                evidence = f"max |w| {top[0]:.4g} -> {top[1]:.4g}, the model's largest was {loudest:.4g}"
                return top[1] / loudest, evidence
            return 0.0, ""
        has_lr_scale = path is not None and has_bound and path.element > 0
        floor = _FULL_SPEED * weight.root * path.rate if path is not None and has_lr_scale else 0.0
        sides = [("norm", norm, past.length[number], floor)]
        if not has_lr_scale:  # the bound above is sharper for single elements
            sides.append(("max |w|", top, past.largest[number], 0.0))
        rate = _rate(path, base, seen)
        for what, (before, now), usual, least in sides:
            moved, room = abs(now - before), self.config.jump * usual * rate
            if isfinite(now) and moved > max(room, least, _REMARKABLE * max(before, now)):
                evidence = f"{what} {before:.4g} -> {now:.4g} where it moved by up to {usual * rate:.3g} lately"
                return moved / room if room else inf, evidence
        return 0.0, ""

    def _learn(self, base: _Seen, seen: _Seen, paths: Sequence[Path]) -> None:
        """Remember the changes of a healthy interval."""
        past = self._past
        rates = [path.rate / path.updates for path in paths if path.updates]
        self._usual_rate = max([_FADES * self._usual_rate, *rates])
        for number, weight in enumerate(self.weights):
            rate = _rate(None if weight.group is None else paths[weight.group], base, seen)
            moved = abs(seen.length[number] - base.length[number])
            topped = abs(seen.largest[number] - base.largest[number])
            if rate > 0 and 0 < moved < inf and topped < inf:  # a tensor at rest learns nothing about how it moves
                past.length[number] = max(_FADES * past.length[number], moved / rate)
                past.largest[number] = max(_FADES * past.largest[number], topped / rate)
                past.times[number] += 1

    def state(self) -> dict[str, Any]:
        base, past = self.base, self._past
        return {
            "clean_step": self.clean_step,
            "base": None if base is None else [base.step, base.length, base.largest],
            "past": [list(past.length), list(past.largest), list(past.times)],
            "usual_rate": self._usual_rate,
            "bounded": sorted(self._bounded),
            "travelled": [traveller.state() for traveller in self.travellers],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.clean_step, self._usual_rate = state["clean_step"], state["usual_rate"]
        self._bounded |= set(state["bounded"])  # what was finite once does not become infinite by a rewind
        if len(state["past"][0]) != len(self.weights) or len(state["travelled"]) != len(self.travellers):
            self.rebase()  # of a model with other parameters
            self._past = self._no_past()
            return
        base = state["base"]
        self.base = None if base is None else _Seen(base[0], list(base[1]), list(base[2]))
        self._past = _Past(*(list(values) for values in state["past"]))
        for traveller, one in zip(self.travellers, state["travelled"], strict=True):
            traveller.load(one)


def _rate(path: Path | None, base: _Seen, seen: _Seen) -> float:
    """What changes are proportional to: the learning rates, or the time where there are none."""
    return path.rate if path is not None else float(seen.step - base.step)
