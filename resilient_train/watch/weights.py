"""The scan of weights and buffers: are they finite, and can the updates have moved them this far? Free of torch.

An update of Adam moves no element farther than `lr * c`, whatever the gradients are; an update of SGD moves a tensor
no farther than its clipped gradients allow. A weight that moved farther was changed by something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

from resilient_train.types import Signal
from resilient_train.watch.config import WeightsConfig

_ROUNDING = 1e-4  # relative error of a float32 norm, from one measurement to the next
_COARSE_ROUNDING = 2**-8  # relative error of bfloat16, in each update
_KNOWN_AFTER = 4  # changes of a tensor, before which it is not compared with its own past
_FADES = 0.9  # factor for the largest past change, at each measurement
_REMARKABLE = 0.25  # share of its size that a tensor must have changed by, to be compared with its past
_FULL_SPEED = 0.5  # of `lr` per update: healthy tensors as a whole move by less with Adam
_LIKELY = 0.2  # of what SGD can move: below that a tensor is not compared with its past
_LEAP = 3  # times the highest rate of recent updates: weights may move farther, and the loss shows any harm
_LOUD = 100.0  # times the largest weight of the model


class Found(NamedTuple):
    """What a scan found wrong."""

    signal: Signal
    subject: str  # the name of a tensor, mostly
    evidence: str
    acceptable: bool = True  # it can be on purpose, as a value that is not finite cannot


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
    """How far a number of updates can have moved the weights of a parameter group."""

    updates: int = 0
    rate: float = 0.0  # the sum of the learning rates
    element: float = 0.0  # of one element, without weight decay
    whole: float = 0.0  # of a tensor in L2 norm, without weight decay
    decay: float = 0.0  # the share of a tensor that weight decay can have taken
    unknown: int = 0  # updates without a bound

    def then(self, later: Path) -> Path:
        return Path(*(getattr(self, name) + getattr(later, name) for name in self.__slots__))


class GroupPath:
    """Adds up the path of one parameter group, by the rule of its optimizer."""

    def __init__(self, kind: str) -> None:
        """`kind` is the name of one of torch's optimizers, or empty for any other."""
        self.kind = kind
        self.path = Path()  # since the last measurement
        self.measured = Path()  # before that, since the last measurement that was judged
        self.momentum = -1.0  # bound of the L2 norm of SGD's momentum; negative: not known yet
        self.decay_momentum = 0.0  # what a weight decay of 1 has put into SGD's momentum

    def landed(self, setting: Mapping[str, Any], norm: float | None) -> None:
        """Add an update with the settings of the group. `norm` is that of the clipped gradients, if known."""
        path, kind, lr = self.path, self.kind, setting.get("lr", 1.0)
        path.updates += 1
        if not isinstance(lr, float | int) or not isfinite(lr):
            path.unknown += 1
            return
        lr = abs(lr)
        path.rate += lr
        betas = setting.get("betas", ())
        if kind in ("Adam", "AdamW") and all(isinstance(beta, float | int) for beta in betas):
            path.element += lr * adam_stride(*betas)
            if kind == "AdamW" or setting.get("decoupled_weight_decay"):
                path.decay += lr * abs(setting["weight_decay"])  # coupled decay is a gradient, which the bound covers
        elif kind == "SGD" and norm is not None and isfinite(norm) and 0 <= setting["momentum"] < 1:
            self._add_sgd(lr, setting, norm)
        elif kind == "RMSprop" and not setting.get("centered"):
            path.element += lr / sqrt(max(1 - setting["alpha"], 1e-12)) / max(1 - setting["momentum"], 1e-12)
        elif kind == "Adagrad":
            path.element += lr
        else:
            path.unknown += 1
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
        self.path.whole += lr * step
        self.path.decay += lr * abs(setting["weight_decay"]) * decay

    def state_dict(self) -> list[float]:
        path = self.measured.then(self.path)
        return [*(getattr(path, name) for name in path.__slots__), self.momentum, self.decay_momentum]

    def load_state_dict(self, state: Sequence[float]) -> None:
        updates, rate, element, whole, decay, unknown, self.momentum, self.decay_momentum = state
        self.path, self.measured = Path(int(updates), rate, element, whole, decay, int(unknown)), Path()


def reach(path: Path, *, length: float, largest: float, root: float) -> tuple[float, float] | None:
    """Return how far the L2 norm of a tensor, and its largest element, can have moved; None if that is not known.

    `length` and `largest` are these before the path, `root` is the square root of the number of elements.
    """
    if path.unknown:
        return None
    whole = path.whole + root * path.element
    element = path.whole + path.element
    far = whole + path.decay * (length + whole), element + path.decay * (largest + element)
    return far if isfinite(far[0]) and isfinite(far[1]) else None


@dataclass(frozen=True)
class Weight:
    """What has to be known of one tensor of weights to judge it."""

    name: str
    group: int | None  # the parameter group that updates it, counted over all optimizers
    root: float  # the square root of the number of its elements
    coarse: bool = False  # it is of a dtype in which small changes are lost to rounding


class _Measured(NamedTuple):
    """One measurement of all weights."""

    step: int
    lengths: list[float]  # L2 norms
    largest: list[float]


class Weights:
    """Compares each measurement with the one before and with what the updates in between can have done.

    A tensor jumped if it moved farther than its optimizer can move it; or if its norm changed by a large share of
    itself and by far more than it did recently; or, where neither is known, if it dwarfs the whole model.
    """

    def __init__(self, config: WeightsConfig, weights: Sequence[Weight], kinds: Sequence[str]) -> None:
        """`kinds` names the optimizer of each parameter group; an empty name is one that torch does not have."""
        self.config, self.every, self.weights = config, config.every, list(weights)
        self.groups = [GroupPath(kind) for kind in kinds]
        self.base: _Measured | None = None
        self.clean_step = 0
        self._bounded: set[str] = set()  # buffers that were finite once; others have inf or NaN on purpose
        self._usual_rate = 0.0  # the highest learning rate of recent updates
        self._start_past()

    def _start_past(self) -> None:
        # Of each tensor: the largest recent change of its norm and of its largest element, per unit of learning rate,
        # and the number of changes.
        count = len(self.weights)
        self._past_length, self._past_largest, self._times = [0.0] * count, [0.0] * count, [0] * count

    def rebase(self) -> None:
        """Accept the next measurement as it is."""
        self.base = None
        for group in self.groups:
            group.measured = Path()

    def put_back(self) -> None:
        """The last measurement is not judged: the next one covers its updates as well."""
        for group in self.groups:
            group.path, group.measured = group.measured.then(group.path), Path()

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        for group, setting in zip(self.groups, settings, strict=True):
            group.landed(setting, norm)

    def begin(self) -> None:
        """Note that a measurement is made, whose numbers `judge` gets later."""
        for group in self.groups:
            group.measured, group.path = group.path, Path()

    def judge(
        self,
        step: int,
        buffers: Sequence[str],
        lengths: list[float],
        largest: list[float],
        largest_of_buffers: Sequence[float],
    ) -> Found | None:
        """Judge the L2 norms and the largest absolute values of the weights, and those values of the named buffers."""
        seen = _Measured(step, lengths, largest)
        found = self._nonfinite(seen, dict(zip(buffers, largest_of_buffers, strict=True)))
        if found is None and self.base is not None:
            found = self._jumped(self.base, seen)
        for group in self.groups:
            group.measured = Path()
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self.base = seen
        return found

    def _nonfinite(self, seen: _Measured, buffers: Mapping[str, float]) -> Found | None:
        named = {weight.name: value for weight, value in zip(self.weights, seen.largest, strict=True)}
        free = {weight.name for weight in self.weights if weight.group is None} | set(buffers)
        named |= buffers
        on_purpose = free - self._bounded
        # NaN on one of several ranks arrives as inf, the largest value: so both are treated alike.
        bad = [(name, value) for name, value in named.items() if not isfinite(value) and name not in on_purpose]
        self._bounded |= {name for name in on_purpose if isfinite(named[name])}
        if not bad:
            return None
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        evidence = f"not finite: {bad[0][0]} holds {bad[0][1]}{more}, of {len(named)} tensors"
        return Found(Signal.NONFINITE_WEIGHTS, bad[0][0], evidence, acceptable=False)

    def _jumped(self, base: _Measured, seen: _Measured) -> Found | None:
        """Find the tensor that moved farthest beyond what is possible; learn from the measurement if none did."""
        loudest = max((value for value in base.largest if isfinite(value)), default=0.0)
        worst, found = -1.0, None
        for number, weight in enumerate(self.weights):
            if self._is_quiet(number, weight, base, seen):
                continue
            excess, evidence = self._excess(number, weight, base, seen, loudest)
            if evidence and excess > worst:
                worst = excess
                found = Found(Signal.WEIGHTS_JUMP, weight.name, f"weights jumped: {weight.name} {evidence}")
        if found is None:
            self._learn(base, seen)
        return found

    def _is_quiet(self, number: int, weight: Weight, base: _Measured, seen: _Measured) -> bool:
        """Say whether a tensor changed little, and each element by no more than the updates can have moved it.

        The sharper bound of its norm does not apply then: a loop may shrink its weights a little in each step.
        """
        before, top = base.lengths[number], base.largest[number]
        moved, topped = abs(seen.lengths[number] - before), abs(seen.largest[number] - top)
        if not (moved <= _REMARKABLE * before and topped <= _REMARKABLE * top):
            return False
        path = self._path(weight)
        if path is None or path.unknown:
            return True
        far = path.element + path.whole
        return topped <= far and moved <= weight.root * far

    def _excess(
        self, number: int, weight: Weight, base: _Measured, seen: _Measured, loudest: float
    ) -> tuple[float, str]:
        """Return how many times farther than possible a tensor moved, and the evidence; no evidence if it did not."""
        norm = base.lengths[number], seen.lengths[number]
        top = base.largest[number], seen.largest[number]
        if not isfinite(top[0]) or not isfinite(top[1]):
            return 0.0, ""
        path = self._path(weight)
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
            return 0.0, ""
        has_bound = path is not None and not path.unknown
        if self._times[number] < _KNOWN_AFTER:
            if not has_bound and top[1] > _LOUD * loudest > 0:
                evidence = f"max |w| {top[0]:.4g} -> {top[1]:.4g}, the model's largest was {loudest:.4g}"
                return top[1] / loudest, evidence
            return 0.0, ""
        if path is not None and has_bound and path.element > 0:  # the bound above is sharper for single elements
            sides = [("norm", norm, self._past_length[number], _FULL_SPEED * weight.root * path.rate)]
        else:
            # Behind a plateau gradients point the same way, and a tensor moves a hundred times as fast as before.
            least = _LIKELY * path.whole if path is not None and has_bound else 0.0
            sides = [
                ("norm", norm, self._past_length[number], least),
                ("max |w|", top, self._past_largest[number], least),
            ]
        rate = _rate(path, base, seen)
        for what, (before, now), usual, least in sides:
            moved, room = abs(now - before), self.config.jump * usual * rate
            if isfinite(now) and moved > max(room, least, _REMARKABLE * max(before, now)):
                evidence = f"{what} {before:.4g} -> {now:.4g} where it moved by up to {usual * rate:.3g} lately"
                return moved / room if room else inf, evidence
        return 0.0, ""

    def _path(self, weight: Weight) -> Path | None:
        return None if weight.group is None else self.groups[weight.group].measured

    def _learn(self, base: _Measured, seen: _Measured) -> None:
        """Remember the changes of a healthy interval."""
        rates = [group.measured.rate / group.measured.updates for group in self.groups if group.measured.updates]
        self._usual_rate = max([_FADES * self._usual_rate, *rates])
        for number, weight in enumerate(self.weights):
            rate = _rate(self._path(weight), base, seen)
            length = abs(seen.lengths[number] - base.lengths[number])
            largest = abs(seen.largest[number] - base.largest[number])
            if rate > 0 and 0 < length < inf and largest < inf:  # a tensor at rest does not show how it moves
                self._past_length[number] = max(_FADES * self._past_length[number], length / rate)
                self._past_largest[number] = max(_FADES * self._past_largest[number], largest / rate)
                self._times[number] += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "clean_step": self.clean_step,
            "base": None if self.base is None else list(self.base),
            "past": [list(self._past_length), list(self._past_largest), list(self._times)],
            "usual_rate": self._usual_rate,
            "bounded": sorted(self._bounded),
            "travelled": [group.state_dict() for group in self.groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clean_step, self._usual_rate = state["clean_step"], state["usual_rate"]
        self._bounded |= set(state["bounded"])  # a buffer that was finite once does not become infinite by a rewind
        if len(state["past"][0]) != len(self.weights) or len(state["travelled"]) != len(self.groups):
            self.rebase()  # it is of a model with other parameters
            self._start_past()
            return
        self.base = None if state["base"] is None else _Measured(*state["base"])
        self._past_length, self._past_largest, self._times = map(list, state["past"])
        for group, one in zip(self.groups, state["travelled"], strict=True):
            group.load_state_dict(one)


def _rate(path: Path | None, base: _Measured, seen: _Measured) -> float:
    """Return what changes are proportional to: the learning rates, or the steps for weights that no group updates."""
    return path.rate if path is not None else float(seen.step - base.step)
