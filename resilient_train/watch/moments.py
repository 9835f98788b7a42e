"""The scan of the optimizers' state: is it finite, and have second moments changed as they must? Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isnan
from typing import Any, NamedTuple

from resilient_train.types import Signal, fact
from resilient_train.watch.config import ScanConfig
from resilient_train.watch.weights import Found, Scan, nonfinite

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
