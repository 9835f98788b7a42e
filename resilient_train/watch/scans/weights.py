"""The weights and buffers, judged by what was measured of them. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any

from resilient_train.types import Signal
from resilient_train.watch.config import WeightsConfig
from resilient_train.watch.scans.found import Found
from resilient_train.watch.scans.reach import Path, Traveller, reach

_ROUNDING = 1e-4  # of a float32 norm, from one measurement to the next
_COARSE_ROUNDING = 2**-8  # of bfloat16, in each update
_ENOUGH = 4  # changes seen before a tensor is compared with its own past
_FADES = 0.9  # what the largest change of the past counts for with every scan
_REMARKABLE = 0.25  # the share of a tensor that must have changed before its past is asked
_FULL_SPEED = 0.5  # healthy tensors as a whole move at a fraction of lr an update, where Adam moves them
_LEAP = 3  # times the highest rate of recent updates
_LOUD = 100.0  # times the largest weight of the model


@dataclass(frozen=True)
class Weight:
    """One tensor of weights, as far as a judge has to know it."""

    name: str
    group: int | None  # the parameter group that updates it, counted over all optimizers
    count: int = 1
    coarse: bool = False
    root: float = field(init=False)  # of the count

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", sqrt(self.count))


@dataclass
class Seen:
    """One measurement of all weights."""

    step: int
    length: list[float]  # L2 norms
    largest: list[float]


@dataclass
class _Past:
    """The largest changes of each tensor, per unit of learning rate; what is long ago counts for less."""

    length: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    times: list[int] = field(default_factory=list)


class Weights:
    """Compares each measurement with the one before and with what the updates in between can have done.

    A tensor jumped when it went further than its optimizer can go; or when its norm changed by a large share of
    itself and by far more than it did recently; or, where neither can be told, when it dwarfs the whole model.
    """

    def __init__(self, config: WeightsConfig, weights: Sequence[Weight], kinds: Sequence[str]) -> None:
        """`kinds` names the optimizer of each parameter group, or is empty for one that torch does not have."""
        self.config, self.weights = config, list(weights)
        self.travellers = [Traveller(kind) for kind in kinds]
        self.base: Seen | None = None
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

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        for traveller, setting in zip(self.travellers, settings, strict=True):
            traveller.landed(setting, norm)

    def paths(self) -> list[Path]:
        """Hand out what has been travelled since the last time, and begin anew."""
        paths = [traveller.path for traveller in self.travellers]
        for traveller in self.travellers:
            traveller.path = Path()
        return paths

    def put_back(self, paths: Sequence[Path]) -> None:
        """Take back what was handed out for a measurement that nobody judged."""
        for traveller, path in zip(self.travellers, paths, strict=True):
            traveller.path = path.then(traveller.path)

    def judge(self, step: int, buffers: Sequence[str], values: Sequence[float], paths: Sequence[Path]) -> Found | None:
        """`values`: the L2 norms, the largest absolute values, then those of the buffers."""
        count = len(self.weights)
        seen = Seen(step, list(values[:count]), list(values[count : 2 * count]))
        found = self._nonfinite(seen, dict(zip(buffers, values[2 * count :], strict=True)))
        if found is None and self.base is not None:
            found = self._jumped(self.base, seen, paths)
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self.base = seen
        return found

    def _nonfinite(self, seen: Seen, buffers: Mapping[str, float]) -> Found | None:
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

    def _jumped(self, base: Seen, seen: Seen, paths: Sequence[Path]) -> Found | None:
        loudest = max((value for value in base.largest if isfinite(value)), default=0.0)
        worst: tuple[float, Found] | None = None
        for number, weight in enumerate(self.weights):
            path = None if weight.group is None else paths[weight.group]
            if self._is_quiet(number, weight, base, seen, path):
                continue
            excess, told = self._compare(number, weight, base, seen, path, loudest)
            if told and (worst is None or excess > worst[0]):
                worst = excess, Found(Signal.WEIGHTS_JUMP, weight.name, f"weights jumped: {weight.name} {told}")
        if worst is not None:
            return worst[1]
        self._learn(base, seen, paths)
        return None

    def _is_quiet(self, number: int, weight: Weight, base: Seen, seen: Seen, path: Path | None) -> bool:
        """Whether nothing that is asked below could find anything: so it is with nearly all tensors."""
        before, top = base.length[number], base.largest[number]
        moved, topped = abs(seen.length[number] - before), abs(seen.largest[number] - top)
        if not (moved <= _REMARKABLE * before and topped <= _REMARKABLE * top):
            return False
        if path is None or path.unknown:
            return True
        far = path.element + path.whole
        return topped <= far and moved <= weight.root * far

    def _compare(
        self, number: int, weight: Weight, base: Seen, seen: Seen, path: Path | None, loudest: float
    ) -> tuple[float, str]:
        """How far beyond what is possible a tensor went, and a line about it; an empty line if it did not."""
        before, now = base.length[number], seen.length[number]
        top, new_top = base.largest[number], seen.largest[number]
        if not isfinite(top) or not isfinite(new_top):
            return 0.0, ""
        updates = path.updates if path else seen.step - base.step
        far = reach(path, length=before, largest=top, root=weight.root) if path else None
        if far is not None:
            slack, rounding = self.config.margin, _ROUNDING
            if weight.coarse:
                slack, rounding = 2 * slack, updates * _COARSE_ROUNDING
            if (moved := abs(new_top - top)) > (room := slack * far[1] + rounding * top):
                return moved / room if room else inf, (
                    f"max |w| {top:.4g} -> {new_top:.4g} where {updates} updates can reach {_bound(top, new_top, room)}"
                )
            if isfinite(now) and (moved := abs(now - before)) > (room := slack * far[0] + rounding * before):
                return moved / room if room else inf, (
                    f"norm {before:.4g} -> {now:.4g} where {updates} updates can reach {_bound(before, now, room)}"
                )
        return self._beside_its_past(number, weight, base, seen, path, loudest)

    def _beside_its_past(
        self, number: int, weight: Weight, base: Seen, seen: Seen, path: Path | None, loudest: float
    ) -> tuple[float, str]:
        past, top, new_top = self._past, base.largest[number], seen.largest[number]
        rate = _rate(path, base, seen)
        if path is not None and path.updates and path.rate / path.updates > _LEAP * self._usual_rate > 0:
            return 0.0, ""  # what a leap of the rate does is no damage to the weights, and shows in the loss
        if past.times[number] < _ENOUGH:
            can_tell = path is not None and not path.unknown
            if not can_tell and new_top > _LOUD * loudest > 0:
                return new_top / loudest, f"max |w| {top:.4g} -> {new_top:.4g}, the model's largest was {loudest:.4g}"
            return 0.0, ""
        has_lr_scale = path is not None and not path.unknown and path.element > 0
        floor = _FULL_SPEED * weight.root * path.rate if path is not None and has_lr_scale else 0.0
        sides = [("norm", base.length[number], seen.length[number], past.length[number], floor)]
        if not has_lr_scale:  # the bound above is sharper for single elements
            sides.append(("max |w|", top, new_top, past.largest[number], 0.0))
        for what, before, now, usual, least in sides:
            moved, room = abs(now - before), self.config.jump * usual * rate
            if isfinite(now) and moved > max(room, least, _REMARKABLE * max(before, now)):
                told = f"{what} {before:.4g} -> {now:.4g} where it moved by up to {usual * rate:.3g} lately"
                return moved / room if room else inf, told
        return 0.0, ""

    def _learn(self, base: Seen, seen: Seen, paths: Sequence[Path]) -> None:
        """Remember the changes of a healthy interval."""
        past, lengths, tops, times = self._past, [], [], []
        rates = [path.rate / path.updates for path in paths if path.updates]
        self._usual_rate = max([_FADES * self._usual_rate, *rates])
        for number, weight in enumerate(self.weights):
            rate = _rate(None if weight.group is None else paths[weight.group], base, seen)
            moved = abs(seen.length[number] - base.length[number])
            topped = abs(seen.largest[number] - base.largest[number])
            length, top, count = past.length[number], past.largest[number], past.times[number]
            if rate > 0 and 0 < moved < inf and topped < inf:  # a tensor at rest learns nothing about how it moves
                length, top, count = max(_FADES * length, moved / rate), max(_FADES * top, topped / rate), count + 1
            lengths.append(length)
            tops.append(top)
            times.append(count)
        self._past = _Past(lengths, tops, times)

    def state(self, unread: Sequence[Path] | None) -> dict[str, Any]:
        """`unread` was handed out for a measurement that nobody has judged."""
        base, past = self.base, self._past
        before = unread or [Path()] * len(self.travellers)
        return {
            "clean_step": self.clean_step,
            "base": None if base is None else [base.step, base.length, base.largest],
            "past": [past.length, past.largest, past.times],
            "usual_rate": self._usual_rate,
            "bounded": sorted(self._bounded),
            "travelled": [one.state(path) for one, path in zip(self.travellers, before, strict=True)],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.clean_step, self._usual_rate = state["clean_step"], state["usual_rate"]
        self._bounded |= set(state["bounded"])  # what was finite once does not become infinite by a rewind
        if len(state["past"][0]) != len(self.weights) or len(state["travelled"]) != len(self.travellers):
            self.base, self._past = None, self._no_past()  # of a model with other parameters
            return
        base = state["base"]
        self.base = None if base is None else Seen(base[0], list(base[1]), list(base[2]))
        self._past = _Past(*(list(values) for values in state["past"]))
        for traveller, one in zip(self.travellers, state["travelled"], strict=True):
            traveller.load(one)


def _rate(path: Path | None, base: Seen, seen: Seen) -> float:
    """What changes are proportional to: the learning rates, or the time where there are none."""
    return path.rate if path is not None else float(seen.step - base.step)


def _bound(before: float, now: float, room: float) -> str:
    return f"{before + room:.4g}" if now > before else f"{max(before - room, 0.0):.4g}"
