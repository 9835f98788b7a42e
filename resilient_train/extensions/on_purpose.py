"""Was it on purpose? A change of the loss, the model, the data or the weights that is no damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, ClassVar, NamedTuple

from resilient_train.core.checks import Check, Finding, References
from resilient_train.core.limit import LimitConfig
from resilient_train.core.loss import Alarm
from resilient_train.core.protocols import Intentions, NewRegime
from resilient_train.data.history import LEARNED, Rise
from resilient_train.extensions import Extension
from resilient_train.ground.types import (
    ACCEPTED,
    OF_THE_LOSS,
    OUTSIDE,
    SPIKES,
    Action,
    Anomaly,
    Cause,
    Diagnosis,
    Facts,
    Incident,
    Signal,
    Vitals,
    fact,
)
from resilient_train.ground.wording import log, say
from resilient_train.parts.run import Run

PROBE_RATE = 0.1  # of the rate, around the step of a rise that was undone
_BEFORE, _AFTER = 2, 12  # steps around a jump that are made at that rate
_LONGEST = 200  # steps of a climb
_ALIKE = 0.25  # of the higher of two rises, by which they may differ
_NEAR, _NEAR_SHARE = 2, 0.25  # steps, and share of the way from the rewind, by which their steps may differ


class Probe(NamedTuple):
    """A rise that a rewind has undone, and the steps in which the rate is a tenth.

    A rise that comes again there, as high, with other samples, was made by none of weights, rate and samples. So it is,
    with any samples, if it comes at once at the weights of a verified state.
    """

    rise: Rise
    rewound_to: int
    first: int
    last: int

    @classmethod
    def of(cls, rise: Rise, noticed: int, rewound_to: int, *, is_jump: bool) -> Probe:
        """Of a climb most of the way from the rewind is made at the lower rate."""
        first = rise.step - _BEFORE if is_jump else max(rewound_to, noticed - _LONGEST)
        return cls(rise, rewound_to, first, (rise.step if is_jump else noticed) + _AFTER)

    def covers(self, step: int) -> bool:
        return self.first <= step <= self.last

    def is_at(self, step: int) -> bool:
        return self.is_near(step) or step == self.rewound_to + 1

    def is_near(self, step: int) -> bool:
        near = max(_NEAR, round(_NEAR_SHARE * (self.rise.step - self.rewound_to)))
        return abs(step - self.rise.step) <= near

    def confirms(self, again: Rise, step: int, *, was_low: bool) -> bool:
        """Say whether it is the same rise; `was_low`: the loss was, at the state which the run was rewound to."""
        is_alike = abs(again.height - self.rise.height) <= _ALIKE * max(again.height, self.rise.height)
        if again.grows or not is_alike:
            return False
        if again.step == self.rewound_to + 1:
            return was_low
        return self.is_near(again.step) and self.covers(step) and again.start != self.rise.start

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Probe:
        return cls(Rise(*plain[0]), *plain[1:])


class Experiment(Check):
    """The probe of a rise that may be on purpose: around it the rate is a tenth, and no limit hides what comes."""

    persistent = ("probe",)
    records: ClassVar = {"probe": Probe.from_plain}

    def __init__(self, config: LimitConfig) -> None:
        self._lasts = config.regime_of  # steps after it
        self.probe: Probe | None = None

    def landed(self, step: int, vitals: Vitals, reference: References, *, is_learned: bool) -> Alarm | None:
        if self.probe is not None and step > self.probe.last + self._lasts:
            self.probe = None
        return None

    def lifts_limits(self, step: int) -> bool:
        return self.probe is not None and self.probe.is_at(step)

    def rate_factor(self, step: int) -> float:
        return PROBE_RATE if self.probe is not None and self.probe.covers(step) else 1.0

    def forget(self, limit: float = inf) -> None:
        self.probe = None


class OnPurpose(Extension, Intentions):
    """Finds out whether a rise of the loss was on purpose, and lets the run learn again what is usual if it was."""

    def checks(self, settings: Any) -> Mapping[str, Check]:
        self._experiment = Experiment(settings.limit)
        return {"experiment": self._experiment}

    def build(self, run: Run) -> None:
        self._run, self._checks, run.intentions = run, run.checks, self
        self._before: Any = None  # the effects before the incidents of late
        self._began_tick, self._step = 0, -(10**9)  # of the first of them, and of the newest
        self._rise: Rise | None = None  # of the loss, which the newest anomaly is about, if it may be on purpose

    def resumed(self) -> None:
        """Continue with the incidents of the process before. It is a collective."""
        incident_log, first = self._run.incident_log, 0
        for one in incident_log.of_training:
            if one.decision.actions and not one.is_observed and one.decision.rung != OUTSIDE:
                if not self._is_recent(one.anomaly.step):
                    first, self._began_tick = one.id, one.anomaly.tick
                self._step = one.last_step
        self._before = self._run.world.on_main(lambda: incident_log.effects_before(first)) if first else None

    def reviewed(self, vitals: Vitals, finding: Finding) -> Finding:
        """After weights were written on purpose, any update that is finite will do."""
        written, self._run.scans.accepted = self._run.scans.accepted, None
        if written is None:
            return finding
        if written:
            self._close_as_accepted(written, self._run.clock.step)
        losses = self._run.updates.recent_measurements()[0]
        self._checks.start_over(self._run.best.limit(max(losses, default=inf)))
        is_spike = vitals.refused in SPIKES
        return Finding(repeat=is_spike) if vitals.accepted or is_spike else finding

    def is_on_purpose(self, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
        """Say whether a rise of the loss came again in spite of a rewind, and accept it then."""
        may_be = diagnosis.cause in (Cause.EXPLOSION, Cause.RATE, Cause.UNKNOWN)
        may_be |= diagnosis.cause is Cause.DATA and not diagnosis.rows and self._run.samples.is_fed
        may_be &= anomaly.signal in OF_THE_LOSS
        self._rise = rise = self._run.updates.rise(anomaly.since, self._level) if may_be else None
        probe = self._experiment.probe
        if rise is None or probe is None:
            return False
        there = self._checks.level_at(probe.rewound_to)  # it may have been as high, at the beginning of the run
        was_low = there is None or there < self._level + LEARNED * rise.height
        if not probe.confirms(rise, anomaly.step, was_low=was_low):
            return False
        what = fact("rose_again", was=self._level, now=self._level + rise.height, step=rise.step)
        self._accept(anomaly, what, probe.rise.step)  # code that keeps no count of steps changes at once after a rewind
        return True

    def learn_again(self, anomaly: Anomaly, why: NewRegime) -> None:
        self._accept(anomaly, why.what, anomaly.since + 1, why.limit)

    def before_treatment(self, step: int, tick: int) -> None:
        if not self._is_recent(step):
            self._before, self._began_tick = self._run.controls.effects.state_dict(), tick
        self._step = step

    def treated(self, incident: Incident) -> None:
        rise, self._rise, to = self._rise, None, incident.rewound_to
        if rise is None or rise.grows or to is None or incident.diagnosis.cause is Cause.RATE:
            return
        is_jump = incident.anomaly.signal is Signal.LOSS_SPIKE
        self._experiment.probe = Probe.of(rise, incident.anomaly.step, to, is_jump=is_jump)

    def _accept(self, anomaly: Anomaly, what: Facts, step: int, limit: float = inf) -> None:
        """Take what raised the loss for a change on purpose: put back what was done, learn again up to the `limit`."""
        self._rise = None
        if self._experiment.probe is not None and self._before and self._is_recent(anomaly.step):
            self._run.controls.effects.undo_to(self._before)
        if anomaly.signal is Signal.WEIGHTS_JUMP:
            self._run.scans.rebase()
        self._checks.start_over(limit)
        self._run.ring.release_reference()
        self._run.controls.note()
        self._close_as_accepted(what, step)

    def _close_as_accepted(self, what: Facts, step: int) -> None:
        """Say that something was no damage, also in the incidents that took it for that."""
        incident_log, note = self._run.incident_log, fact("on_purpose", what=what, step=step)
        log.warning("step %d: %s", self._run.clock.step, say(note))
        for incident in incident_log.incidents if self._is_recent(self._run.clock.step) else ():
            is_about_rows = bool(incident.diagnosis.rows) or incident.diagnosis.cause is Cause.PROCESS
            if incident.anomaly.tick >= self._began_tick and not (is_about_rows or incident.is_accepted):
                decision = replace(incident.decision, actions=(*incident.decision.actions, Action(ACCEPTED)))
                diagnosis = replace(incident.diagnosis, cause=Cause.UNKNOWN, advice=note, suspects=())
                incident = replace(incident, decision=decision, diagnosis=diagnosis)
                (incident_log.update if incident.outcome is None else incident_log.close)(incident)

    def _is_recent(self, step: int) -> bool:
        return step <= self._step + self._checks.config.limit.regime_of

    @property
    def _level(self) -> float:
        reference = self._checks.episode.reference
        return inf if reference is None else reference.level
