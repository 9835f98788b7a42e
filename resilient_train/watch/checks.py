"""All checks together: a pure judgement of the vitals of one update after the other. Free of torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from resilient_train.types import Anomaly, Signal, Vitals
from resilient_train.watch.config import ChecksConfig
from resilient_train.watch.limit import NO_LIMIT, GradLimit, LossLimit, Refusals, ScaleCollapse
from resilient_train.watch.loss import Creep, Jump, Level, PlainState, Slow
from resilient_train.watch.rate import EarlyDivergence, RateRise
from resilient_train.watch.reference import Reference, RewindCheck, Standing

_REMEMBERED = 2048  # updates: further back than a ring of snapshots goes
_LATEST = 3  # losses that show how far the loss is from where it was
_AROUND = 2  # steps on either side of a declared change
_BY_LIMIT = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checks say about one update."""

    anomaly: Anomaly | None = None
    remarks: tuple[str, ...] = ()  # worth a line in the log, and nothing else
    repeat: bool = False  # it was refused by mistake: retry the same update, which lands now


_NOTHING = Finding()
_MOST_REPEATS = 2  # of one update that was refused by mistake


class Checks:
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
        self._early_divergence = EarlyDivergence(config.overshoot)
        self._jump = Jump(config.jump, self._level)
        self._creep = Creep(config.creep, self._level)
        self._slow = Slow(config.slow, self._level)
        self._rate_rise = RateRise(config.rate)
        self.rewind_check = RewindCheck(config.probation)
        self._scale = ScaleCollapse(config.scale)
        self._checks: dict[str, PlainState | RewindCheck] = {  # by their names in checkpoints
            "level": self._level,
            "grad_limit": self._grad_limit,
            "loss_limit": self._loss_limit,
            "overshoot": self._early_divergence,
            "jump": self._jump,
            "creep": self._creep,
            "slow": self._slow,
            "rate": self._rate_rise,
            "probation": self.rewind_check,
            "scale": self._scale,
        }
        self._empty = self.state_dict()
        self._path: dict[int, tuple[float, float]] = {}  # loss and norm of accepted updates, by step
        self.is_only_reported = False  # the damage that `rewind_check` is about: nothing is done, so alarms end
        self._refusals = Refusals(config.limit)
        self._declared: set[int] = set()
        self._repeats = 0  # of one update that was refused by mistake
        self._latest: deque[float] = deque(maxlen=_LATEST)  # losses, whatever became of their updates
        for step in config.expect:
            self.expect(step)

    @property
    def usual_norm(self) -> float | None:
        """What gradient norms come to at most; while too little is known, what they began with."""
        return self._grad_limit.largest if self._grad_limit.is_warm else self._early_divergence.first_norm

    def expect(self, step: int) -> None:
        """Declare that something changes on purpose with this step."""
        self._declared.update(range(step - _AROUND, step + _AROUND + 1))

    def patched(self) -> None:
        """Note that a line is patched from now on: what the run began with is no measure any more."""
        self._early_divergence.forget()

    def require_recovery(self, since: int, step: int, *, is_only_reported: bool = False) -> None:
        """Measure the run against where it stood at `since`, as damage came after that and was noticed at `step`."""
        if not self.config.probation.every:
            return
        # While hardly any losses are known, the one that was measured at the state of that step.
        self.rewind_check.begin(self._reference(since) or self._reference(since + 1), step, since)
        self.is_only_reported = is_only_reported

    def _reference(self, until: int) -> Reference | None:
        return Reference.of({step: loss for step, (loss, _) in self._path.items()}, until, self._level.scale)

    @property
    def _is_silent(self) -> bool:
        """Whether everything was reported of damage that nothing is done about."""
        return self.rewind_check.is_open and self.is_only_reported

    def loss_excess(self) -> float:
        """How far the loss is above the reference, in sizes of such losses; 0 where it is not known."""
        reference, latest = self.rewind_check.reference, sorted(self._latest)
        return reference.excess(latest[len(latest) // 2]) if reference is not None and latest else 0.0

    def rewound(self, step: int, since: int, rate: float = 1.0) -> None:
        """Watch whether going back to `step`, whose statistics were loaded before, has helped.

        `rate` is what the learning rate is multiplied by from here on: with less of it the way takes longer.

        What was measured up to `since` stays true, and does not rewind: else a run that goes back to its beginning
        would learn whatever comes as usual.
        """
        # A reference of a course that may have been left: what led to it stays true as well.
        reference = self.rewind_check.reference
        trusted = since if reference is None else max(since, reference.step)
        self._path = {other: seen for other, seen in self._path.items() if other <= trusted}
        self._latest.clear()
        self.rewind_check.rewound(step, {other: loss for other, (loss, _) in self._path.items()}, rate)
        if len(self._path) >= self.config.limit.warmup:
            self._grad_limit.bound(max(norm for _, norm in self._path.values()))
            self.limits = (self._loss_limit.limit, self._grad_limit.limit)

    def judge(self, vitals: Vitals) -> Finding:
        """Say what is wrong with one attempted update, after it was read back."""
        self._latest.append(vitals.loss)
        finding = self._judged(vitals)
        self._repeats = self._repeats + 1 if finding.repeat else 0
        if self._repeats > _MOST_REPEATS and vitals.refused is not None:  # the limit was raised, and refuses it again
            evidence = f"loss {vitals.loss:.4g}, gradient norm {vitals.grad_norm:.4g}: refused {self._repeats} times"
            return replace(finding, anomaly=_refused(vitals, vitals.refused, evidence, vitals.step))
        anomaly, is_new = finding.anomaly, not self.rewind_check.is_open
        if anomaly is not None and anomaly.landed and (is_new or anomaly.signal is not Signal.NOT_RECOVERED):
            # A new one counts as only reported, until more is done about it.
            self.require_recovery(anomaly.since, anomaly.step, is_only_reported=is_new or self.is_only_reported)
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
        found = self._judge_landed(vitals)
        return Finding(found) if found is not None else _NOTHING

    def _judge_landed(self, vitals: Vitals) -> Anomaly | None:
        step, loss = vitals.step, vitals.loss
        if vitals.loss_scale is not None:
            self._scale.landed(vitals.loss_scale)
        if step in self._declared:
            self.start_over()
            return None
        if (diverged := self._early_divergence.see(step, _which(vitals), loss, vitals.grad_norm)) is not None:
            return self._about_level(vitals, Signal.DIVERGENCE, diverged[1], since=diverged[0])
        outside = self._is_outside(loss)
        jumped = self._jump.see(step, loss, outside)
        if not outside:
            if self._level.learn(loss) or not self._level.ready:
                self._loss_limit.refresh()
            self._path.setdefault(step, (loss, vitals.grad_norm))
            if len(self._path) > _REMEMBERED:
                del self._path[next(iter(self._path))]
        risen = self._rate_rise.see(step, loss, vitals.pace, self._reference)
        crept = slowed = None
        if not (outside and self.rewind_check.is_open):
            self._grad_limit.learn(vitals.grad_norm)
            crept, slowed = self._creep.see(step, loss), self._slow.see(step, loss)
        self.limits = (self._loss_limit.limit, self._grad_limit.limit)
        return self._found(vitals, risen, jumped, slowed if crept is None else crept)

    def _is_outside(self, loss: float) -> bool:
        """Whether nothing is to be learned from a loss."""
        jump = self.config.jump
        above = bool(jump.every) and self.rewind_check.is_above(loss, jump.sigmas, jump.share)
        return above or self._jump.is_outside(loss)

    def _found(
        self, vitals: Vitals, risen: tuple[int, str] | None, jumped: int | None, trend: int | None
    ) -> Anomaly | None:
        """An alarm about where the loss is, the first that there is; none for damage that was only reported."""
        check, standing = self.rewind_check, Standing.UNDECIDED
        if check.is_open:
            standing = check.see(vitals.step, vitals.loss)
        if standing is Standing.BACK:
            check.end()
        if trend is not None:
            self._creep.forget()
            self._slow.forget()
        if self._is_silent:
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
        return _landed(vitals, Signal.NOT_RECOVERED, self.rewind_check.evidence(vitals.step), since=since)

    def not_recovered_since(self, step: int) -> int:
        """The newest step that is trusted of a run that is not back."""
        assert self.rewind_check.reference is not None
        stands_on = self.rewind_check.stands_on
        return min(self.rewind_check.reference.step if stands_on is None else stands_on, step)

    def unsettled(self, vitals: Vitals) -> Anomaly | None:
        """At the end of a run: an anomaly where the rate rose so late that its effect was not looked at."""
        risen = None if self._is_silent else self._rate_rise.unsettled(vitals.step)
        return None if risen is None else self._about_level(vitals, Signal.DIVERGENCE, risen[1], since=risen[0])

    def _about_level(self, vitals: Vitals, signal: Signal, evidence: str, since: int) -> Anomaly:
        """An anomaly of the loss. It says nothing about the verified state that the run was taken back to."""
        verified = self.rewind_check.stands_on if self.rewind_check.is_open else None
        since = since if verified is None else max(since, min(verified, vitals.step))
        return _landed(vitals, signal, evidence, since)

    def _judge_refused(self, vitals: Vitals, signal: Signal) -> Finding:
        """Above a limit: an outlier, damage that was there before, or a new regime for which the limit is raised."""
        loss, norm, step = vitals.loss, vitals.grad_norm, vitals.step + 1
        if step in self._declared:
            self.start_over()
            return Finding(repeat=True)
        which = _which(vitals)
        if (diverged := self._early_divergence.see(step, which, loss, norm)) is not None:
            return Finding(self._about_level(vitals, Signal.DIVERGENCE, diverged[1], since=diverged[0]))
        outside, evidence = self._is_outside(loss), f"loss {loss:.4g} where {self._level.usual}"
        if which != self._refusals.latest and outside:  # counted, though it enters no statistic
            jumped = self._jump.see(step, loss, True)
            if jumped is not None and not self._is_silent:
                return Finding(self._about_level(vitals, Signal.LOSS_SPIKE, f"{evidence}, and it stays", since=jumped))
        norms = self._refusals.add(step, which, norm)
        if norms is not None and outside and not self._is_silent:  # it is no new regime: it is damaged
            evidence = f"{evidence}; {len(norms)} updates were refused within a few steps"
            return Finding(self._about_level(vitals, Signal.DIVERGENCE, evidence, since=self._refusals.since))
        if norms is not None:
            self._grad_limit.make_room(norms)
            self._loss_limit.lift()
            self.limits = (self._loss_limit.limit, self._grad_limit.limit)
            return Finding(remarks=(f"{len(norms)} updates exceeded the limit; raising it",), repeat=True)
        if signal is Signal.GRAD_SPIKE:
            evidence = f"gradient norm {norm:.4g} where at most {self._grad_limit.largest:.4g} was usual"
        return Finding(_refused(vitals, signal, evidence, since=vitals.step))

    def start_over(self) -> None:
        """Learn again what is usual: it changes on purpose, or was none."""
        self._level.forget()
        self._path.clear()
        for check in (self._jump, self._rate_rise, self._creep, self._slow, self._loss_limit):
            check.forget()
        self.rewind_check.end()
        self._early_divergence.forget()
        self._grad_limit.forget()
        self.limits = (NO_LIMIT, NO_LIMIT)

    def persistent_state(self) -> dict[str, Any]:
        """What does not rewind, for a process that resumes where this one ended; as plain data of its own."""
        return {
            "path": [[step, *seen] for step, seen in self._path.items()],
            "declared": sorted(self._declared),
            "refusals": self._refusals.state_dict(),
            "suspect": self._early_divergence.is_suspect,
            "only_reported": self.is_only_reported,
        }

    def load_persistent_state(self, state: Mapping[str, Any]) -> None:
        """Remember what an earlier process did."""
        self._path = {int(step): (float(loss), float(norm)) for step, loss, norm in state["path"]}
        self._declared |= {int(step) for step in state["declared"]}
        self._refusals.load_state_dict(state["refusals"])
        self._early_divergence.is_suspect = state["suspect"] is True
        self.is_only_reported = state.get("only_reported") is True

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
    """What identifies an update, however often it is retried: where its samples lie, if that is known."""
    return vitals.start if vitals.stop > vitals.start else vitals.tick


def _landed(vitals: Vitals, signal: Signal, evidence: str, since: int) -> Anomaly:
    return Anomaly(signal, vitals.step, vitals.tick, since=max(0, since), evidence=evidence, ranks=vitals.ranks)


def _refused(vitals: Vitals, signal: Signal, evidence: str, since: int) -> Anomaly:
    step = vitals.step + 1
    return Anomaly(signal, step, vitals.tick, max(0, since), evidence, landed=False, ranks=vitals.ranks)


def _not_finite(vitals: Vitals) -> str:
    return f"loss {vitals.loss:.4g}, gradient norm {vitals.grad_norm:.4g}"
