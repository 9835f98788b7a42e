"""All checks of the vitals together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from resilient_train.types import Anomaly, Signal, Vitals
from resilient_train.watch.checks.jump import Jump, Outliers
from resilient_train.watch.checks.level import Level
from resilient_train.watch.checks.limit import NO_LIMIT, GradLimit, LossLimit, Refusals
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.checks.overshoot import Overshoot
from resilient_train.watch.checks.probation import Probation
from resilient_train.watch.checks.rate import Rate
from resilient_train.watch.checks.scale import ScaleCollapse
from resilient_train.watch.checks.trend import Creep, Slow, Stall
from resilient_train.watch.config import ChecksConfig
from resilient_train.watch.reference import Reference, Standing

_REMEMBERED = 2048  # updates: further back than a ring of snapshots goes
_LATEST = 3  # losses that tell how far the loss is from where it was
_AROUND = 2  # steps on either side of a declared change
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

    What it has learned from accepted updates rewinds with the run. What it remembers of refusals does not, nor do
    declared changes. From damage on, until the loss is back where it was, nothing above that is learned.
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
        self._rate = Rate(config.rate)
        self.probation = Probation(config.probation)
        self.is_only_reported = False  # the damage that the probation is about: nothing is done, so alarms end
        self._stall = Stall(config.stall, self._level)
        self._outliers = Outliers(config.outlier, self._level)
        self._scale = ScaleCollapse(config.scale)
        self._checks: dict[str, Remembers] = {
            name.removeprefix("_"): check for name, check in vars(self).items() if isinstance(check, Remembers)
        }
        self._empty = self.state_dict()
        self._refusals = Refusals(config.limit)
        self._declared: set[int] = set()
        self._latest: deque[float] = deque(maxlen=_LATEST)  # losses, whatever became of their updates
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

    def hold(self, since: int, step: int, *, is_only_reported: bool = False) -> None:
        """Measure the run against where it stood at `since`, as damage came after that and was noticed at `step`."""
        if not self.config.probation.every:
            return
        # While hardly any losses are known, the one that was measured at the state of that step.
        self.probation.begin(self._reference(since) or self._reference(since + 1), step, since)
        self.is_only_reported = is_only_reported

    def _reference(self, until: int) -> Reference | None:
        return Reference.of({step: loss for step, (loss, _) in self._path.items()}, until, self._level.scale)

    @property
    def _is_deaf(self) -> bool:
        """Whether all was said of damage that nothing is done about."""
        return self.probation.is_open and self.is_only_reported

    def off(self) -> float:
        """How far the loss is above the reference, in sizes of such losses; 0 where it is not known."""
        reference, latest = self.probation.reference, sorted(self._latest)
        return reference.off(latest[len(latest) // 2]) if reference is not None and latest else 0.0

    def rewound(self, step: int, since: int, rate: float = 1.0) -> None:
        """Watch whether going back to `step`, whose statistics were loaded before, has helped.

        `rate` is what the learning rate is multiplied by from here on: with less of it the way takes longer.

        What was measured up to `since` stays true, and does not rewind: else a run that goes back to its beginning
        would take whatever comes for usual.
        """
        reference = self.probation.reference  # of a course that may have been left: what led to it stays true as well
        trusted = since if reference is None else max(since, reference.step)
        self._path = {other: seen for other, seen in self._path.items() if other <= trusted}
        self._latest.clear()
        self.probation.rewound(step, {other: loss for other, (loss, _) in self._path.items()}, rate)
        if len(self._path) >= self.config.limit.warmup:
            self._grad_limit.bound(max(norm for _, norm in self._path.values()))
            self.limits = (self._loss_limit.limit, self._grad_limit.limit)

    def judge(self, vitals: Vitals) -> Finding:
        """Say what is wrong with one attempted update, after it was read back."""
        self._latest.append(vitals.loss)
        finding = self._judged(vitals)
        if finding.anomaly is not None and finding.anomaly.landed:  # a new one is only reported, unless more is done
            is_new = not self.probation.is_open
            if is_new or finding.anomaly.signal is not Signal.NOT_RECOVERED:
                since, step = finding.anomaly.since, finding.anomaly.step
                self.hold(since, step, is_only_reported=is_new or self.is_only_reported)
        return finding

    def _judged(self, vitals: Vitals) -> Finding:
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
            self.start_over()
            return _NOTHING
        if (overshot := self._overshoot.see(step, _which(vitals), loss, vitals.grad_norm)) is not None:
            return Finding(self._about_level(vitals, Signal.DIVERGENCE, overshot[1], since=overshot[0]))
        outside = self._is_outside(loss)
        jumped = self._jump.see(step, loss, outside)
        if not outside:
            self._learn(step, loss, vitals.grad_norm)
        risen = self._rate.see(step, loss, vitals.pace, self._reference)
        crept = slowed = None
        if not (outside and self.probation.is_open):
            self._grad_limit.learn(vitals.grad_norm)
            crept, slowed = self._creep.see(step, loss), self._slow.see(step, loss)
        self.limits = (self._loss_limit.limit, self._grad_limit.limit)
        stalled = self._stall.see(step, loss)
        told = (stalled, self._outliers.see(step, loss) if outside else None)
        remarks = tuple(remark for remark in told if remark)
        anomaly = self._found(vitals, risen, jumped, slowed if crept is None else crept)
        return Finding(anomaly, remarks) if anomaly is not None or remarks else _NOTHING

    def _is_outside(self, loss: float) -> bool:
        """Whether nothing is to be learned from a loss."""
        jump = self.config.jump
        above = bool(jump.every) and self.probation.is_above(loss, jump.sigmas, jump.share)
        return above or self._jump.is_outside(loss)

    def _learn(self, step: int, loss: float, norm: float) -> None:
        if self._level.learn(loss) or not self._level.ready:
            self._loss_limit.refresh()
        self._path.setdefault(step, (loss, norm))
        if len(self._path) > _REMEMBERED:
            del self._path[next(iter(self._path))]

    def _found(
        self, vitals: Vitals, risen: tuple[int, str] | None, jumped: int | None, trend: int | None
    ) -> Anomaly | None:
        """An alarm about where the loss is, the first that there is; none for damage that was only reported."""
        probation, standing = self.probation, Standing.UNDECIDED
        if probation.is_open:
            standing = probation.see(vitals.step, vitals.loss)
        if standing is Standing.BACK:
            probation.end()
        if trend is not None:
            self._creep.forget()
            self._slow.forget()
        if self._is_deaf:
            return None
        if risen is not None:
            return self._about_level(vitals, Signal.DIVERGENCE, risen[1], since=risen[0])
        if jumped is not None:
            evidence = f"loss {vitals.loss:.4g} where {self._level.usual}, and it stays"
            return self._about_level(vitals, Signal.LOSS_SPIKE, evidence, since=jumped)
        if trend is not None:
            evidence = f"loss {vitals.loss:.4g}, climbing since step {trend}; {self._level.usual}"
            return self._about_level(vitals, Signal.DIVERGENCE, evidence, since=trend)
        return self.not_recovered(vitals) if standing is Standing.OFF else None

    def not_recovered(self, vitals: Vitals) -> Anomaly:
        """The anomaly of a run that is quiet, and not back where it was: what it has done since does not count."""
        since = self.not_recovered_since(vitals.step)
        return _landed(vitals, Signal.NOT_RECOVERED, self.probation.evidence(vitals.step), since=since)

    def not_recovered_since(self, step: int) -> int:
        """The newest step that is trusted of a run that is not back."""
        assert self.probation.reference is not None
        stands_on = self.probation.stands_on
        return min(self.probation.reference.step if stands_on is None else stands_on, step)

    def unsettled(self, vitals: Vitals) -> Anomaly | None:
        """At the end of a run: an anomaly where the rate rose so late that its effect was not looked at."""
        risen = None if self._is_deaf else self._rate.unsettled(vitals.step)
        return None if risen is None else self._about_level(vitals, Signal.DIVERGENCE, risen[1], since=risen[0])

    def _about_level(self, vitals: Vitals, signal: Signal, evidence: str, since: int) -> Anomaly:
        """An anomaly of the loss. It says nothing about the proven state that the run was taken back to."""
        proven = self.probation.stands_on if self.probation.is_open else None
        since = since if proven is None else max(since, min(proven, vitals.step))
        return _landed(vitals, signal, evidence, since)

    def _judge_refused(self, vitals: Vitals, signal: Signal) -> Finding:
        """Above a limit: an outlier, damage that was there before, or a new regime to which the limit gives way."""
        loss, norm, step = vitals.loss, vitals.grad_norm, vitals.step + 1
        if step in self._declared:
            self.start_over()
            return Finding(repeat=True)
        which = _which(vitals)
        if (overshot := self._overshoot.see(step, which, loss, norm)) is not None:
            return Finding(self._about_level(vitals, Signal.DIVERGENCE, overshot[1], since=overshot[0]))
        outside, evidence = self._is_outside(loss), f"loss {loss:.4g} where {self._level.usual}"
        if which != self._refusals.latest and outside:  # counted, though it enters no statistic
            jumped = self._jump.see(step, loss, True)
            if jumped is not None and not self._is_deaf:
                return Finding(self._about_level(vitals, Signal.LOSS_SPIKE, f"{evidence}, and it stays", since=jumped))
        norms = self._refusals.add(step, which, norm)
        if norms is not None and outside and not self._is_deaf:  # it is no new regime: it is damaged
            evidence = f"{evidence}; {len(norms)} updates were refused within a few steps"
            return Finding(self._about_level(vitals, Signal.DIVERGENCE, evidence, since=self._refusals.since))
        if norms is not None:
            self._grad_limit.give_way(norms)
            self._loss_limit.give_way()
            self.limits = (self._loss_limit.limit, self._grad_limit.limit)
            return Finding(remarks=(f"{len(norms)} updates were above the limit: it gives way",), repeat=True)
        if signal is Signal.GRAD_SPIKE:
            evidence = f"gradient norm {norm:.4g} where at most {self._grad_limit.largest:.4g} was usual"
        return Finding(_refused(vitals, signal, evidence, since=vitals.step))

    def start_over(self) -> None:
        """Learn again what is usual: it changes on purpose, or was none."""
        self._level.forget()
        self._path.clear()
        for check in (self._jump, self._rate, self._creep, self._slow, self._stall, self._loss_limit):
            check.forget()
        self.probation.end()
        self._overshoot.forget()
        self._grad_limit.forget()
        self.limits = (NO_LIMIT, NO_LIMIT)

    def memory(self) -> dict[str, Any]:
        """What does not rewind, for a process that goes on where this one ended; as plain data of its own."""
        return {
            "path": [[step, *seen] for step, seen in self._path.items()],
            "declared": sorted(self._declared),
            "refusals": self._refusals.memory(),
            "suspect": self._overshoot.is_suspect,
            "only_reported": self.is_only_reported,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Remember what an earlier process did."""
        self._path = {int(step): (float(loss), float(norm)) for step, loss, norm in memory["path"]}
        self._declared |= {int(step) for step in memory["declared"]}
        self._refusals.recall(memory["refusals"])
        self._overshoot.is_suspect = memory["suspect"] is True
        self.is_only_reported = memory.get("only_reported") is True

    def state_dict(self) -> dict[str, Any]:
        """What rewinds with the run, as plain data of its own."""
        return {name: check.state_dict() for name, check in self._checks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take it back; return the checks of which another version kept less: what these have seen starts empty."""
        lacking = [name for name, empty in self._empty.items() if empty.keys() - state.get(name, {}).keys()]
        for name, check in self._checks.items():
            check.load_state_dict(self._empty[name] if name in lacking else state[name])
        self.limits = (self._loss_limit.limit, self._grad_limit.limit)
        return lacking


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
