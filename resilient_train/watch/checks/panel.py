"""All checks of the vitals together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from resilient_train.events import Anomaly, Signal, Vitals
from resilient_train.watch.checks.convalescence import Convalescence
from resilient_train.watch.checks.jump import Jump, Outliers
from resilient_train.watch.checks.level import Level
from resilient_train.watch.checks.limit import NO_LIMIT, GradLimit, LossLimit, Refusals
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.checks.overshoot import Overshoot
from resilient_train.watch.checks.scale import ScaleCollapse
from resilient_train.watch.checks.trend import Creep, Slow, Stall
from resilient_train.watch.config import ChecksConfig

_REMEMBERED = 2048  # updates: further back than a ring of snapshots goes
_AROUND = 2  # steps on either side of a declared change
_TICKS_OF_PATIENCE = 10  # for each alarm: what passes by itself should not be taken for usual
_SAME_PLACE = 64  # steps between two alarms that are about the same trouble
_BY_LIMIT = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checks say about one update."""

    anomaly: Anomaly | None = None
    remarks: tuple[str, ...] = ()  # worth a line in the log, and nothing else
    repeat: bool = False  # it was refused by mistake: the same update is to be done again, and lands now


_NOTHING = Finding()


class Panel:
    """Judges every attempted update, in order, and sets the limits of the next.

    What it has learned from accepted updates rewinds with the run. What it remembers of its own alarms and of
    refusals does not, nor do declared changes: else a rewind would make it fight the same change for ever.
    """

    def __init__(self, config: ChecksConfig) -> None:
        self.config = config
        self.limits = (NO_LIMIT, NO_LIMIT)  # of the loss and of the gradient norm, exact in float32
        self._level = Level(config.jump)
        self._grad_limit = GradLimit(config.limit)
        self._loss_limit = LossLimit(config.limit, self._level)
        self._overshoot = Overshoot(config.overshoot)
        self._jump = Jump(config.jump, self._level)
        self._creep = Creep(config.creep, self._level)
        self._slow = Slow(config.slow, self._level)
        self._path: dict[int, tuple[float, float]] = {}  # loss and norm of accepted updates, by step
        self._convalescence = Convalescence(config.convalescence)
        self._stall = Stall(config.stall, self._level)
        self._outliers = Outliers(config.outlier, self._level)
        self._scale = ScaleCollapse(config.scale)
        self._checks: dict[str, Remembers] = {
            name.removeprefix("_"): check for name, check in vars(self).items() if isinstance(check, Remembers)
        }
        self._refusals = Refusals(config.limit)
        self._alarms: list[tuple[Signal, int, int]] = []
        self._declared: set[int] = set()
        for step in config.expect:
            self.expect(step)

    @property
    def usual_norm(self) -> float | None:
        """What gradient norms come to at most; while too little is known, what they began with."""
        return self._grad_limit.largest if self._grad_limit.is_warm else self._overshoot.first_norm

    def expect(self, step: int) -> None:
        """Declare that something changes on purpose with this step."""
        self._declared.update(range(step - _AROUND, step + _AROUND + 1))

    def armored(self) -> None:
        """Take note that values are made up from now on, where they broke: what the run began with is no measure."""
        self._overshoot.forget()

    def rewound(self, step: int, since: int, *, comparable: bool = True) -> None:
        """Watch closely whether going back to `step`, whose statistics were loaded before, has helped.

        What was measured up to `since` stays true, and does not rewind: else a run that goes back to its beginning
        would take whatever comes for usual.
        """
        self._path = {other: seen for other, seen in self._path.items() if other <= since}
        losses = {other: loss for other, (loss, _) in self._path.items()}
        self._convalescence.begin(step, losses, comparable=comparable)
        if len(self._path) >= self.config.limit.warmup:
            self._grad_limit.bound(max(norm for _, norm in self._path.values()))
            self.limits = (self._loss_limit.limit, self._grad_limit.limit)

    def judge(self, vitals: Vitals) -> Finding:
        """Say what is wrong with one attempted update, after it was read back."""
        if vitals.overflowed:
            evidence = self._scale.overflowed(vitals)
            if evidence is None:
                return _NOTHING
            # Nothing landed; but the scale is part of the state, and what overflows may be the newest weights.
            anomaly = _refused(vitals, Signal.SCALE_COLLAPSE, evidence, since=vitals.step - 1)
            return Finding(replace(anomaly, landed=True))
        if vitals.refused in _BY_LIMIT:
            return self._judge_refused(vitals, vitals.refused)
        if vitals.refused is not None:
            return Finding(_refused(vitals, vitals.refused, _not_finite(vitals), since=vitals.step))
        if not vitals.accepted:
            return _NOTHING
        if not (isfinite(vitals.loss) and isfinite(vitals.grad_norm)):
            signal = Signal.NONFINITE_GRAD if isfinite(vitals.loss) else Signal.NONFINITE_LOSS
            return Finding(_landed(vitals, signal, _not_finite(vitals), since=vitals.step - 2))
        return self._judge_landed(vitals)

    def _judge_landed(self, vitals: Vitals) -> Finding:
        step, loss = vitals.step, vitals.loss
        if vitals.loss_scale is not None:
            self._scale.landed(vitals.loss_scale)
        if step in self._declared:
            self._forget()
            return _NOTHING
        if (overshot := self._overshoot.see(step, _which(vitals), loss, vitals.grad_norm)) is not None:
            return Finding(_landed(vitals, Signal.DIVERGENCE, overshot[1], since=overshot[0]))
        outside = self._jump.is_outside(loss)
        jumped = self._jump.see(step, loss, outside)
        if not outside and (self._level.learn(loss) or not self._level.ready):
            self._loss_limit.refresh()
        if not outside:
            self._path.setdefault(step, (loss, vitals.grad_norm))
            if len(self._path) > _REMEMBERED:
                del self._path[next(iter(self._path))]
        self._grad_limit.learn(vitals.grad_norm)
        self.limits = (self._loss_limit.limit, self._grad_limit.limit)
        crept = self._creep.see(step, loss)
        slowed = self._slow.see(step, loss)
        stalled = self._stall.see(step, loss)
        if (relapse := self._convalescence.see(step, loss, self._level.scale)) is not None:
            since, evidence = relapse
            if not any(self._is_known(signal, since, vitals.tick) for signal in (Signal.DIVERGENCE, Signal.LOSS_SPIKE)):
                self._alarms.append((Signal.DIVERGENCE, since, vitals.tick))
                return Finding(_landed(vitals, Signal.DIVERGENCE, evidence, since=since))
        if not outside and crept is None and slowed is None and stalled is None:
            return _NOTHING
        told = (stalled, self._outliers.see(step, loss) if outside else None)
        remarks = tuple(remark for remark in told if remark)
        if outside and (finding := self._conclude_jump(vitals, jumped, remarks)):
            return finding
        trend = slowed if crept is None else crept
        if trend is not None:
            return self._conclude_trend(vitals, trend, remarks)
        return Finding(remarks=remarks) if remarks else _NOTHING

    def _conclude_jump(self, vitals: Vitals, jumped: int | None, remarks: tuple[str, ...]) -> Finding | None:
        """An alarm; or the end of alarms, when the loss stays where it jumped to."""
        stays = self._jump.stays()
        rises = stays and self._jump.rises()
        if stays and not rises:
            self._start_over(self._jump.outside())
            return Finding(remarks=(*remarks, f"losses like {vitals.loss:.4g} are taken for usual from now on"))
        if jumped is None or (self._is_known(Signal.LOSS_SPIKE, jumped, vitals.tick) and not rises):
            return None
        self._alarms.append((Signal.LOSS_SPIKE, jumped, vitals.tick))
        evidence = f"loss {vitals.loss:.4g} where {self._level.usual}, and it stays"
        return Finding(_landed(vitals, Signal.LOSS_SPIKE, evidence, since=jumped), remarks)

    def _conclude_trend(self, vitals: Vitals, since: int, remarks: tuple[str, ...]) -> Finding:
        """An alarm; or a remark, when alarms did not help."""
        self._creep.forget()
        self._slow.forget()
        if self._is_known(Signal.DIVERGENCE, since, vitals.tick):
            return Finding(remarks=(*remarks, f"losses like {vitals.loss:.4g} are taken for usual from now on"))
        self._alarms.append((Signal.DIVERGENCE, since, vitals.tick))
        evidence = f"loss {vitals.loss:.4g}, climbing since step {since}; {self._level.usual}"
        return Finding(_landed(vitals, Signal.DIVERGENCE, evidence, since=since), remarks)

    def _judge_refused(self, vitals: Vitals, signal: Signal) -> Finding:
        """Above a limit: an outlier, damage that was there before, or a new regime to which the limit gives way."""
        loss, norm, step = vitals.loss, vitals.grad_norm, vitals.step + 1
        if step in self._declared:
            self._forget()
            return Finding(repeat=True)
        which = _which(vitals)
        if (overshot := self._overshoot.see(step, which, loss, norm)) is not None:
            return Finding(_landed(vitals, Signal.DIVERGENCE, overshot[1], since=overshot[0]))
        if which != self._refusals.latest and self._jump.is_outside(loss):  # counted, though it enters no statistic
            finding = self._conclude_jump(vitals, self._jump.see(step, loss, True), ())
            if finding is not None and finding.anomaly is not None:
                return finding
        norms = self._refusals.add(step, which, norm)
        if norms is not None:
            self._grad_limit.give_way(norms)
            self._loss_limit.give_way()
            self.limits = (self._loss_limit.limit, self._grad_limit.limit)
            return Finding(remarks=(f"{len(norms)} updates were above the limit: it gives way",), repeat=True)
        if signal is Signal.GRAD_SPIKE:
            evidence = f"gradient norm {norm:.4g} where at most {self._grad_limit.largest:.4g} was usual"
        else:
            evidence = f"loss {loss:.4g} where {self._level.usual}"
        return Finding(_refused(vitals, signal, evidence, since=vitals.step))

    def _is_known(self, signal: Signal, since: int, tick: int) -> bool:
        """Whether there were so many alarms here, for so long, that one more would not help."""
        here = [then for other, step, then in self._alarms if other is signal and abs(step - since) <= _SAME_PLACE]
        return len(here) >= self.config.patience and tick - here[0] >= _TICKS_OF_PATIENCE * self.config.patience

    def _start_over(self, losses: Sequence[float] = ()) -> None:
        """Learn anew what is usual."""
        self._level.forget(losses)
        self._path.clear()
        for check in (self._jump, self._creep, self._slow, self._stall, self._loss_limit):
            check.forget()

    def _forget(self) -> None:
        self._start_over()
        self._overshoot.forget()
        self._grad_limit.forget()
        self.limits = (NO_LIMIT, NO_LIMIT)

    def memory(self) -> dict[str, Any]:
        """What does not rewind, for a process that goes on where this one ended; as plain data of its own."""
        return {
            "path": [[step, *seen] for step, seen in self._path.items()],
            "alarms": [[str(signal), step, tick] for signal, step, tick in self._alarms],
            "declared": sorted(self._declared),
            "refusals": self._refusals.memory(),
            "convalescence": self._convalescence.memory(),
            "suspect": self._overshoot.is_suspect,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Remember what an earlier process did."""
        self._path = {int(step): (float(loss), float(norm)) for step, loss, norm in memory["path"]}
        self._alarms = [(Signal(signal), int(step), int(tick)) for signal, step, tick in memory["alarms"]]
        self._declared |= {int(step) for step in memory["declared"]}
        self._refusals.recall(memory["refusals"])
        self._convalescence.recall(memory["convalescence"])
        self._overshoot.is_suspect = memory["suspect"] is True

    def state_dict(self) -> dict[str, Any]:
        """What rewinds with the run, as plain data of its own."""
        return {name: check.state_dict() for name, check in self._checks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, check in self._checks.items():
            check.load_state_dict(state[name])
        self.limits = (self._loss_limit.limit, self._grad_limit.limit)


def _which(vitals: Vitals) -> int:
    """What tells an update from another one, whatever it is tried as: where its samples lie, if they are known."""
    return vitals.start if vitals.stop > vitals.start else vitals.tick


def _landed(vitals: Vitals, signal: Signal, evidence: str, since: int) -> Anomaly:
    return Anomaly(signal, vitals.step, vitals.tick, since=max(0, since), evidence=evidence, ranks=vitals.ranks)


def _refused(vitals: Vitals, signal: Signal, evidence: str, since: int) -> Anomaly:
    step = vitals.step + 1
    return Anomaly(signal, step, vitals.tick, max(0, since), evidence, landed=False, ranks=vitals.ranks)


def _not_finite(vitals: Vitals) -> str:
    return f"loss {vitals.loss:.4g}, gradient norm {vitals.grad_norm:.4g}"
