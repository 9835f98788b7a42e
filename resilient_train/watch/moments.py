"""The state of optimizers, judged by what was measured of it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from resilient_train.types import Signal
from resilient_train.watch.config import OptimizerConfig
from resilient_train.watch.weights import Found

ADAMS = ("Adam", "AdamW")

# Moments that cannot be negative, by torch's names for them, and the setting that says how fast they can fade at
# most: `betas[1]`, or itself. None: nothing is known about fading.
SQUARES: dict[str, str | None] = {
    **dict.fromkeys(("exp_avg_sq", "exp_inf", "square_avg", "acc_delta"), "fades"),
    **dict.fromkeys(("sum", "max_exp_avg_sq"), "never"),
    **dict.fromkeys(("row_var", "col_var", "variance"), None),
}
_COARSE_SLACK = 1.5
_PROVEN = 3  # scans in which the recursion held before it is trusted, and in which it failed before it is given up
_TINY = 1e-30  # sums of the smallest numbers there are lose all precision


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state, as far as a judge has to know it."""

    name: str  # "exp_avg_sq of block.2.fc.weight"
    group: int
    key: str
    by_torch: bool  # of one of torch's own optimizers: we know what its names mean
    coarse: bool = False

    @property
    def is_square(self) -> bool:
        return self.by_torch and self.key in SQUARES


@dataclass(slots=True)
class Faded:
    """What must be left of second moments after a number of updates, and what gradients must have added to them."""

    updates: int
    left: list[float]  # share of each group's that is left at least
    total_left: float = 1.0  # share of the sum over all groups
    added: float = 0.0  # what the gradients of all groups added to that
    unknown: int = 0  # updates for which the sum is not known

    def then(self, later: Faded) -> Faded:
        left = [mine * its for mine, its in zip(self.left, later.left, strict=True)]
        added = self.added * later.total_left + later.added
        total = self.total_left * later.total_left
        return Faded(self.updates + later.updates, left, total, added, self.unknown + later.unknown)


class Moments:
    """Compares the state of the optimizers with the one before and with what the updates in between must have done.

    A second moment keeps at least its share `beta2` in an update, whatever the gradients are. And the sum of all of
    Adam's follows from the norms of the gradients alone, which is trusted once it has been seen to hold.
    """

    def __init__(self, config: OptimizerConfig, kinds: Sequence[str], is_whole: bool) -> None:
        """`kinds` as for weights; `is_whole` says that this process holds all of every moment."""
        self.config, self.every, self.kinds = config, config.every, list(kinds)
        self.can_sum = is_whole and bool(kinds) and all(kind in ADAMS for kind in kinds)
        self.clean_step = 0
        self.faded = self._nothing()  # since the last measurement
        self.measured: Faded | None = None  # before that, up to a measurement that was not judged yet
        self.held = self.failed = 0
        self._bounded: set[str] = set()
        self.remarks: list[str] = []
        self._sums: dict[str, float] | None = None
        self._steps: dict[str, float] = {}

    def _nothing(self) -> Faded:
        return Faded(0, [1.0] * len(self.kinds))

    def rebase(self) -> None:
        """Take the next measurement as it is."""
        self._sums = self.measured = None

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        faded = self.faded
        faded.updates += 1
        shares = [_fades(setting) for setting in settings]
        for group, share in enumerate(shares):
            faded.left[group] = faded.left[group] * share if share is not None else 0.0
        if not self.can_sum:
            return
        beta2 = shares[0]
        if norm is None or beta2 is None or len(set(shares)) > 1 or not all(map(_is_pure, self.kinds, settings)):
            faded.unknown += 1
            return
        faded.total_left *= beta2
        faded.added = faded.added * beta2 + (1 - beta2) * norm * norm

    def begin(self) -> None:
        """A measurement is made, of which `judge` gets the numbers later."""
        self.measured, self.faded = self.faded, self._nothing()

    def put_back(self) -> None:
        """The last measurement is not judged: the next one is of all that happened."""
        if self.measured is not None:
            self.faded, self.measured = self.measured.then(self.faded), None

    def judge(
        self,
        step: int,
        plain: Sequence[Moment],
        squares: Sequence[Moment],
        counted: Sequence[str],
        values: Sequence[float],
    ) -> Found | None:
        """`values`: the largest of plain moments; sums, and depths below zero, of squares; counts of updates."""
        faded, self.measured = self.measured or self._nothing(), None
        ends = [len(plain), len(plain) + len(squares), len(plain) + 2 * len(squares)]
        largest, depths = values[: ends[0]], values[ends[1] : ends[2]]
        sums = dict(zip((moment.name for moment in squares), values[ends[0] : ends[1]], strict=True))
        steps = dict(zip(counted, values[ends[2] :], strict=True))
        found = self._negative(squares, depths) or self._nonfinite(plain, largest, squares, sums)
        if found is None and self._sums is not None:
            found = self._shrunk(self._sums, squares, sums, faded)
            found = found or self._off_course(self._sums, squares, sums, steps, faded)
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self._sums, self._steps = sums, steps
        return found

    def _negative(self, squares: Sequence[Moment], depths: Sequence[float]) -> Found | None:
        below = [(depth, moment.name) for moment, depth in zip(squares, depths, strict=True) if 0 < depth < inf]
        if not below:
            return None
        depth, name = max(below)
        evidence = f"a second moment is negative: {name} holds {-depth:.4g}, the root of which is taken"
        return Found(Signal.OPTIMIZER_RANGE, name, evidence, acceptable=False)

    def _nonfinite(
        self, plain: Sequence[Moment], largest: Sequence[float], squares: Sequence[Moment], sums: Mapping[str, float]
    ) -> Found | None:
        values = list(zip(plain, largest, strict=True))
        values += [(moment, sums[moment.name]) for moment in squares]
        # a user's own optimizer may keep an infinity on purpose, such as a best loss
        by_design = {moment.name for moment, _ in values if not moment.by_torch} - self._bounded
        bad = [(moment.name, value) for moment, value in values if not isfinite(value)]
        bad = [(name, value) for name, value in bad if not (value == inf and name in by_design)]
        self._bounded |= {moment.name for moment, value in values if moment.name in by_design and isfinite(value)}
        if not bad:
            return None
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        evidence = f"not finite: {bad[0][0]} holds {bad[0][1]}{more}, of {len(values)} tensors of the optimizer's state"
        return Found(Signal.NONFINITE_OPTIMIZER, bad[0][0], evidence, acceptable=False)

    def _shrunk(
        self, old: Mapping[str, float], squares: Sequence[Moment], sums: Mapping[str, float], faded: Faded
    ) -> Found | None:
        """A moment that lost more than fading takes."""
        worst: tuple[float, Found] | None = None
        for moment in squares:
            before, now, rule = old.get(moment.name, 0.0), sums[moment.name], SQUARES[moment.key]
            if rule is None:
                continue
            least = before * (1.0 if rule == "never" else faded.left[moment.group])
            least /= self.config.margin * (_COARSE_SLACK if moment.coarse else 1.0)
            if now < least and least > _TINY and (worst is None or now / least < worst[0]):
                evidence = f"second moments shrank: {moment.name} sums to {before:.4g} -> {now:.4g} where "
                evidence += f"{faded.updates} updates leave {least:.4g} at least"
                worst = now / least, Found(Signal.OPTIMIZER_RANGE, moment.name, evidence)
        return worst[1] if worst else None

    def _off_course(
        self,
        old: Mapping[str, float],
        squares: Sequence[Moment],
        sums: Mapping[str, float],
        steps: Mapping[str, float],
        faded: Faded,
    ) -> Found | None:
        """A sum of second moments that is not what the gradients make it."""
        if not self.can_sum or faded.unknown or not faded.updates or any(moment.coarse for moment in squares):
            return None
        if any(now - self._steps.get(name, 0.0) != faded.updates for name, now in steps.items()):
            return None  # a weight without gradient in some updates: its moments did not fade with the others
        mine = [moment.name for moment in squares if moment.key == "exp_avg_sq"]
        before, now = sum(old.get(name, 0.0) for name in mine), sum(sums[name] for name in mine)
        due = before * faded.total_left + faded.added
        if not due > _TINY:
            return None
        if abs(now - due) <= self.config.recursion * due:
            self.held += 1
            return None
        if self.held >= _PROVEN:
            evidence = f"the second moments sum to {now:.6g} where {faded.updates} updates make it {due:.6g}"
            return Found(Signal.OPTIMIZER_RANGE, "the sum of second moments", f"{evidence}, from {before:.6g}")
        self.held, self.failed = 0, self.failed + 1
        if self.failed >= _PROVEN:
            self.can_sum = False
            self.remarks.append(
                "checks.optimizer.recursion is off: the second moments do not follow from the norms of the gradients "
                f"here ({now:.4g} where {due:.4g} was due); they are still checked one by one"
            )
        return None

    def state(self) -> dict[str, Any]:
        faded = self.measured.then(self.faded) if self.measured else self.faded
        return {
            "clean_step": self.clean_step,
            "sums": self._sums,
            "steps": self._steps,
            "faded": [faded.updates, list(faded.left), faded.total_left, faded.added, faded.unknown],
            "held": self.held,
            "bounded": sorted(self._bounded),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.clean_step, self.held = state["clean_step"], state["held"]
        self._bounded = set(state["bounded"])
        self._sums = None if state["sums"] is None else dict(state["sums"])
        self._steps = dict(state["steps"])
        updates, left, *rest = state["faded"]
        self.faded, self.measured = Faded(updates, list(left), *rest), None
        if len(left) != len(self.kinds):  # of a run with other optimizers
            self.faded, self._sums = self._nothing(), None


def _fades(setting: Mapping[str, Any]) -> float | None:
    """The share of a second moment that is left of it after an update at least."""
    betas = setting.get("betas")
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    share = betas[1] if is_pair else setting.get("alpha", setting.get("rho"))  # type: ignore[index]
    return share if isinstance(share, float | int) else None


def _is_pure(kind: str, setting: Mapping[str, Any]) -> bool:
    """Whether nothing but the gradient goes into the moments."""
    return not setting.get("weight_decay") or kind == "AdamW" or bool(setting.get("decoupled_weight_decay"))
