"""The scan of the optimizers' state: is it finite, and have second moments changed as they must? Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf, isnan
from typing import Any

from resilient_train.types import Signal
from resilient_train.watch.config import OptimizerConfig
from resilient_train.watch.weights import Found, nonfinite

ADAMS = ("Adam", "AdamW")

# Moments that cannot be negative, by torch's names for them. "fades": an update leaves at least a share of it,
# `betas[1]` or the like; "never": it cannot shrink; None: it may do either.
SQUARES: dict[str, str | None] = {
    **dict.fromkeys(("exp_avg_sq", "exp_inf", "square_avg", "acc_delta"), "fades"),
    **dict.fromkeys(("sum", "max_exp_avg_sq"), "never"),
    **dict.fromkeys(("row_var", "col_var", "variance"), None),
}
_COARSE_SLACK = 1.5  # times the margin, for a dtype in which small changes are lost to rounding
_PROVEN = 3  # measurements in which the sum held before it is trusted, or failed before it is given up
_TINY = 1e-30  # smaller sums of float32 have lost their precision


@dataclass(frozen=True)
class Moment:
    """What has to be known of one tensor of an optimizer's state to judge it."""

    name: str  # "exp_avg_sq of block.2.fc.weight"
    group: int
    key: str
    by_torch: bool  # it is of one of torch's own optimizers, whose keys have a known meaning
    coarse: bool = False

    @property
    def is_square(self) -> bool:
        return self.by_torch and self.key in SQUARES


@dataclass(slots=True)
class _Faded:
    """What the updates since the last measurement leave of second moments, and what their gradients add."""

    updates: int
    left: list[float]  # the least share of each group's that is left
    total_left: float = 1.0  # the share that is left of the sum over all groups
    added: float = 0.0  # what the gradients added to that sum
    unknown: int = 0  # updates for which the sum is not known


class Moments:
    """Compares each measurement with the one before and with what the updates in between must have done.

    An update leaves at least a share `beta2` of a second moment, whatever the gradients are. And the sum of all second
    moments of Adam follows from the norms of the gradients alone; this is trusted once it was seen to hold.
    """

    def __init__(self, config: OptimizerConfig, kinds: Sequence[str], is_whole: bool) -> None:
        """`kinds` is as for Weights; `is_whole`: this process has all of every moment."""
        self.config, self.every, self.kinds = config, config.every, list(kinds)
        self.can_sum = is_whole and bool(kinds) and all(kind in ADAMS for kind in kinds)
        self.clean_step = 0
        self.held = self.failed = 0  # measurements in which the sum did
        self.remarks: list[str] = []
        self._faded = _Faded(0, [1.0] * len(kinds))
        self._bounded: set[str] = set()  # tensors of the user's optimizers that were finite once
        self._sums: dict[str, float] | None = None  # of second moments, at the last measurement
        self._steps: dict[str, float] = {}  # counts of updates, at the last measurement

    def rebase(self) -> None:
        """Accept the next measurement as it is."""
        self._sums = None

    def landed(self, settings: Sequence[Mapping[str, Any]], norm: float | None) -> None:
        faded = self._faded
        faded.updates += 1
        shares = [_share_left(setting) for setting in settings]
        faded.left = [left * (share or 0.0) for left, share in zip(faded.left, shares, strict=True)]
        if not self.can_sum:
            return
        beta2 = shares[0]
        if norm is None or beta2 is None or len(set(shares)) > 1 or not all(map(_is_pure, self.kinds, settings)):
            faded.unknown += 1
            return
        faded.total_left *= beta2
        faded.added = faded.added * beta2 + (1 - beta2) * norm * norm

    def judge(
        self,
        step: int,
        plain: Mapping[Moment, float],
        squares: Mapping[Moment, float],
        depths: Mapping[Moment, float],
        steps: dict[str, float],
    ) -> Found | None:
        """Judge plain moments' largest values, squares' sums and their depths below zero, and the counts of updates."""
        sums = {moment.name: value for moment, value in squares.items()}
        found = None
        if below := [(depth, moment.name) for moment, depth in depths.items() if 0 < depth < inf]:
            depth, name = max(below)
            evidence = f"a second moment is negative: {name} holds {-depth:.4g}, the root of which is taken"
            found = Found(Signal.OPTIMIZER_RANGE, name, evidence, acceptable=False)
        else:
            named = {**{moment.name: value for moment, value in plain.items()}, **sums}
            # A user's own optimizer may have an infinity on purpose, such as a best loss.
            free = {moment.name for moment, value in plain.items() if not moment.by_torch and not isnan(value)}
            found = nonfinite(Signal.NONFINITE_OPTIMIZER, named, free, self._bounded)
        if found is None and self._sums is not None:
            found = self._shrunk(self._sums, squares) or self._wrong_sum(self._sums, squares, steps)
        self._faded = _Faded(0, [1.0] * len(self.kinds))
        if found is None:
            self.clean_step = step
        if found is None or found.acceptable:
            self._sums, self._steps = sums, steps
        return found

    def _shrunk(self, old: Mapping[str, float], squares: Mapping[Moment, float]) -> Found | None:
        """Find the second moment that shrank most beyond fading."""
        worst, found = inf, None
        for moment, now in squares.items():
            before, rule = old.get(moment.name, 0.0), SQUARES[moment.key]
            least = before * (1.0 if rule == "never" else self._faded.left[moment.group])
            least /= self.config.margin * (_COARSE_SLACK if moment.coarse else 1.0)
            if rule is not None and now < least and least > _TINY and now / least < worst:
                worst = now / least
                evidence = f"second moments shrank: {moment.name} sums to {before:.4g} -> {now:.4g} where "
                evidence += f"{self._faded.updates} updates leave {least:.4g} at least"
                found = Found(Signal.OPTIMIZER_RANGE, moment.name, evidence)
        return found

    def _wrong_sum(
        self, old: Mapping[str, float], squares: Mapping[Moment, float], steps: Mapping[str, float]
    ) -> Found | None:
        """Compare the sum of second moments with what the gradients make it."""
        faded = self._faded
        if not self.can_sum or faded.unknown or not faded.updates or any(moment.coarse for moment in squares):
            return None
        if any(now - self._steps.get(name, 0.0) != faded.updates for name, now in steps.items()):
            return None  # a weight had no gradient in some updates: its moments did not fade with the others
        sums = {moment.name: value for moment, value in squares.items() if moment.key == "exp_avg_sq"}
        before, now = sum(old.get(name, 0.0) for name in sums), sum(sums.values())
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
                "check optimizer.recursion is off: the second moments do not follow from the norms of the gradients "
                f"here ({now:.4g} where {due:.4g} was due); they are still checked one by one"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "clean_step": self.clean_step,
            "sums": self._sums,
            "steps": self._steps,
            "faded": list(astuple(self._faded)),
            "held": self.held,
            "bounded": sorted(self._bounded),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clean_step, self.held = state["clean_step"], state["held"]
        self._bounded |= set(state["bounded"])
        self._sums, self._steps = state["sums"], state["steps"]
        updates, left, *rest = state["faded"]
        self._faded = _Faded(updates, list(left), *rest)
        if len(left) != len(self.kinds):  # it is of a run with other optimizers
            self._faded, self._sums = _Faded(0, [1.0] * len(self.kinds)), None


def _share_left(setting: Mapping[str, Any]) -> float | None:
    """Return the least share of a second moment that an update leaves."""
    betas = setting.get("betas")
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    share = betas[1] if is_pair else setting.get("alpha", setting.get("rho"))  # type: ignore[index]
    return share if isinstance(share, float | int) else None


def _is_pure(kind: str, setting: Mapping[str, Any]) -> bool:
    """Whether only the gradient goes into the moments."""
    return not setting.get("weight_decay") or kind == "AdamW" or bool(setting.get("decoupled_weight_decay"))
