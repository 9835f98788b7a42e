"""All checks of the vitals together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from resilient_train.events import Anomaly, Signal, Vitals
from resilient_train.watch.checks.jump import Jump, Outliers
from resilient_train.watch.checks.level import Level
from resilient_train.watch.checks.limit import NO_LIMIT, GradLimit, Refusals
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.checks.scale import ScaleCollapse
from resilient_train.watch.checks.trend import Creep, Slow, Stall
from resilient_train.watch.config import ChecksConfig

_AROUND = 2  # steps on either side of a declared change
_FIGHTS = 4  # alarms at one place before it is given time to settle
_SAME_PLACE = 64  # steps between two alarms that are about the same trouble
_LIMITS = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checks say about one update."""

    anomaly: Anomaly | None = None
    remarks: tuple[str, ...] = ()  # worth a line in the log, and nothing else
    repeat: bool = False  # it was refused by mistake: the same update is to be done again, and lands now


_NOTHING = Finding()


class Panel:
    """Judges every attempted update, in order, and sets the limits of the next.

    What it has learned from accepted updates rewinds with the run. What it remembers of alarms and refusals does
    not, nor do declared changes: else a rewind would make it fight the same change for ever.
    """

    limits: tuple[float, float]

    def __init__(self, config: ChecksConfig, *, clip_norm: float | None = None) -> None:
        self.config = config
        self._expected: set[int] = set(config.expect)
        self._level = Level(config.jump)
        self._grad_limit = GradLimit(config.limit)
        self._jump = Jump(config.jump, self._level)
        self._creep = Creep(config.creep, self._level)
        self._slow = Slow(config.slow, self._level)
        self._stall = Stall(config.stall, self._level)
        self._outliers = Outliers(config.outlier, self._level)
        self._scale = ScaleCollapse(config.scale)
        self._refusals = Refusals(config.limit)
        self._alarms: list[tuple[Signal, int]] = []
        self._loss_room = -NO_LIMIT  # the highest loss of a regime that was given way to
        self._checks: dict[str, Remembers] = {
            "level": self._level,
            "limit": self._grad_limit,
            "jump": self._jump,
            "creep": self._creep,
            "slow": self._slow,
            "stall": self._stall,
            "outliers": self._outliers,
            "scale": self._scale,
        }
        self.limits = (NO_LIMIT, NO_LIMIT)

    def expect(self, step: int) -> None:
        """Declare that something changes on purpose with this step."""
        self._expected.add(step)

    def judge(self, vitals: Vitals) -> Finding:
        """Say what is wrong with one attempted update, after it was read back."""
        if vitals.overflowed:
            evidence = self._scale.overflowed(vitals)
            return Finding(self._not_landed(vitals, Signal.SCALE_COLLAPSE, evidence)) if evidence else _NOTHING
        if vitals.refused is not None:
            if vitals.refused in _LIMITS:
                return self._judge_refused(vitals, vitals.refused)
            return Finding(self._not_landed(vitals, vitals.refused, _not_finite(vitals)))
        if not vitals.accepted:
            return _NOTHING
        if not (isfinite(vitals.loss) and isfinite(vitals.grad_norm)):
            signal = Signal.NONFINITE_GRAD if isfinite(vitals.loss) else Signal.NONFINITE_LOSS
            return Finding(_landed(vitals, signal, vitals.step - 1, _not_finite(vitals)))
        return self._judge_landed(vitals)

    def _judge_landed(self, vitals: Vitals) -> Finding:
        step, loss = vitals.step, vitals.loss
        self._scale.landed(vitals.loss_scale)
        if self._expected and self._is_declared(step):
            self._forget()
            return _NOTHING
        outside = self._jump.is_outside(loss)
        first = self._jump.see(step, loss, outside)
        if not outside:
            self._level.learn(loss)
        self._grad_limit.learn(vitals.grad_norm)
        crept, slowed = self._creep.see(step, loss), self._slow.see(step, loss)
        stalled = self._stall.see(step, loss)
        outlier = self._outliers.see(step, loss) if outside else None
        self._set_limits()
        if first is not None or outside or crept is not None or slowed is not None or stalled:
            remarks = tuple(remark for remark in (stalled, outlier) if remark)
            return self._conclude(vitals, first, crept, slowed, remarks)
        return _NOTHING

    def _conclude(
        self, vitals: Vitals, first: int | None, crept: int | None, slowed: int | None, remarks: tuple[str, ...]
    ) -> Finding:
        """One verdict from what the detectors found, the quickest first."""
        if self._jump.config.every and (settled := self._jump.new_range()):
            self._start_over(settled)
            return Finding(remarks=(*remarks, f"loss {vitals.loss:.4g} is taken for the new usual"))
        usual = f"loss {vitals.loss:.4g} where {self._level.median:.4g} was usual"
        if first is not None:
            since = max(0, first - 2)  # the state before this one produced the last usual loss
            if not self._fought_enough(Signal.LOSS_SPIKE, since):
                evidence = f"{usual}, and it stays"
                return Finding(_landed(vitals, Signal.LOSS_SPIKE, since, evidence), remarks)
        trend = crept if crept is not None else slowed
        if trend is not None:
            how = "creeping up" if crept is not None else "risen from its best"
            self._creep.forget()
            self._slow.forget()
            if not self._fought_enough(Signal.DIVERGENCE, trend):
                return Finding(_landed(vitals, Signal.DIVERGENCE, trend, f"{usual}: {how} since step {trend}"), remarks)
            remarks = (*remarks, f"loss {vitals.loss:.4g} is taken for the new usual")
        return Finding(remarks=remarks) if remarks else _NOTHING

    def _judge_refused(self, vitals: Vitals, signal: Signal) -> Finding:
        """An update above a limit: an outlier, damage that was there before it, or a new regime."""
        loss, norm, step = vitals.loss, vitals.grad_norm, vitals.step + 1
        if self._is_declared(step):
            self._forget()
            return Finding(repeat=True)
        which = vitals.start if vitals.stop > vitals.start else vitals.tick
        outside = self._jump.is_outside(loss)
        first = self._jump.see(step, loss, outside) if outside else None
        if first is not None and not self._fought_enough(Signal.LOSS_SPIKE, max(0, first - 2)):
            evidence = f"loss {loss:.4g} where {self._level.median:.4g} was usual, and it stays"
            return Finding(_landed(vitals, Signal.LOSS_SPIKE, max(0, first - 2), evidence))
        if self._refusals.add(step, which, loss, norm):
            losses, norms = self._refusals.take()
            self._grad_limit.give_way(norms)
            self._loss_room = max(self._loss_room, max(losses))
            self._set_limits()
            return Finding(remarks=(f"{len(norms)} updates above the limit: it gives way",), repeat=True)
        if signal is Signal.GRAD_SPIKE:
            evidence = (
                f"gradient norm {norm:.4g} where at most {self.limits[1] / self.config.limit.grad_factor:.4g} was usual"
            )
        else:
            evidence = f"loss {loss:.4g} where {self._level.median:.4g} was usual"
        return Finding(self._not_landed(vitals, signal, evidence))

    def _is_declared(self, step: int) -> bool:
        return any(abs(step - expected) <= _AROUND for expected in self._expected)

    def _fought_enough(self, signal: Signal, since: int) -> bool:
        """Whether an alarm was raised here so often that one more would not help; else note this one."""
        here = sum(1 for other, step in self._alarms if other is signal and abs(step - since) <= _SAME_PLACE)
        if here >= _FIGHTS:
            return True
        self._alarms.append((signal, since))
        return False

    def _start_over(self, losses: Sequence[float] = ()) -> None:
        self._level.forget(losses)
        for check in (self._jump, self._creep, self._slow, self._stall):
            check.forget()

    def _forget(self) -> None:
        self._start_over()
        self._grad_limit.forget()
        self._set_limits()

    def _set_limits(self) -> None:
        self.limits = (NO_LIMIT, self._grad_limit.limit)

    def _not_landed(self, vitals: Vitals, signal: Signal, evidence: str) -> Anomaly:
        return Anomaly(
            signal, vitals.step + 1, vitals.tick, since=vitals.step, evidence=evidence, landed=False, ranks=vitals.ranks
        )

    def state_dict(self) -> dict[str, Any]:
        """What rewinds with the run, as plain data of its own."""
        checks = {name: check.state_dict() for name, check in self._checks.items()}
        return {"checks": checks, "loss_room": self._loss_room, "limits": list(self.limits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, check in self._checks.items():
            check.load_state_dict(state["checks"][name])
        self._loss_room = state["loss_room"]
        self.limits = (state["limits"][0], state["limits"][1])


def _landed(vitals: Vitals, signal: Signal, since: int, evidence: str) -> Anomaly:
    return Anomaly(signal, vitals.step, vitals.tick, since=max(0, since), evidence=evidence, ranks=vitals.ranks)


def _not_finite(vitals: Vitals) -> str:
    what = "the batch is not finite, " if vitals.refused is Signal.NONFINITE_BATCH else ""
    return f"{what}loss {vitals.loss:.4g}, gradient norm {vitals.grad_norm:.4g}"
