"""Was it on purpose? A change of the loss, the model, the data or the weights that is no damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, ClassVar, NamedTuple

from resilient_train.core.checks import Check, Finding, References
from resilient_train.core.limit import LimitConfig
from resilient_train.core.loss import Alarm, Level
from resilient_train.core.protocols import Diagnoser, NewRegime
from resilient_train.core.transaction import Transaction, Update
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
    came_again: bool = False  # there, but not as high

    @classmethod
    def of(cls, rise: Rise, noticed: int, rewound_to: int, *, is_jump: bool, came_again: bool = False) -> Probe:
        """Of a climb most of the way from the rewind is made at the lower rate."""
        first = rise.step - _BEFORE if is_jump else max(rewound_to, noticed - _LONGEST)
        return cls(rise, rewound_to, first, (rise.step if is_jump else noticed) + _AFTER, came_again)

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
        if again.grows or not (is_alike or self.came_again):
            return False
        if again.step == self.rewound_to + 1:
            return was_low and is_alike
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


class OnPurpose(Extension, Diagnoser):
    """Finds out whether a rise of the loss was on purpose, and lets the run learn again what is usual if it was."""

    def checks(self, settings: Any, level: Level) -> Mapping[str, Check]:
        self._experiment = Experiment(settings.limit)
        return {"experiment": self._experiment}

    def build(self, run: Run) -> None:
        self._run, self._checks, self._incident_log = run, run.checks, run.incident_log
        self._cause, run.diagnoser = run.diagnoser, self  # the one that finds causes
        self._before: Any = None  # the effects before the incidents of late
        self._began_tick, self._step = 0, -(10**9)  # of the first of them, and of the newest
        self._rise: Rise | None = None  # of the loss, which the newest anomaly is about, if it may be on purpose
        self._rose_at = 0  # where the loss rose first: code that keeps no count of steps changes at once after a rewind

    def trusted(self, signal: Signal, since: int, has_landed: bool) -> int:
        return self._cause.trusted(signal, since, has_landed)

    def explain(
        self, anomaly: Anomaly, update: Update, refused: Transaction | None, history: Sequence[Incident]
    ) -> Diagnosis:
        return self._cause.explain(anomaly, update, refused, history)

    def resume(self) -> None:
        """Continue with the incidents of the process before. It is a collective."""
        first, done = 0, [one for one in self._incident_log.of_training if one.decision.actions and not one.is_observed]
        for one in done:
            if one.decision.rung != OUTSIDE:
                first = first if self._is_recent(one.anomaly.step) else one.id
                self._began_tick = one.anomaly.tick if first == one.id else self._began_tick
                self._step = one.last_step
        history = self._incident_log.run_history
        self._before = self._run.world.on_main(lambda: history.effects_before(first)) if first else None

    def reviewed(self, vitals: Vitals, finding: Finding) -> Finding:
        """After weights were written on purpose, any update that is finite will do."""
        if not self._accepts_written():
            return finding
        is_spike = vitals.refused in SPIKES
        return Finding(repeat=is_spike) if vitals.accepted or is_spike else finding

    def is_on_purpose(self, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
        """Say whether a rise of the loss came again in spite of a rewind, and accept it then."""
        may_be = diagnosis.cause in (Cause.EXPLOSION, Cause.RATE, Cause.UNKNOWN)
        may_be |= diagnosis.cause is Cause.DATA and not diagnosis.rows and self._run.samples.is_fed
        may_be &= anomaly.signal in OF_THE_LOSS
        self._rise = rise = self._run.updates.rise(anomaly.since, self._level) if may_be else None
        return rise is not None and self.accepts(rise, anomaly)

    def learn_again(self, anomaly: Anomaly, why: NewRegime) -> None:
        self.accept(anomaly, why.what, why.limit)

    def accepts(self, rise: Rise, anomaly: Anomaly) -> bool:
        probe = self._experiment.probe
        if probe is None:
            return False
        there = self._checks.level_at(probe.rewound_to)  # it may have been as high, at the beginning of the run
        was_low = there is None or there < self._level + LEARNED * rise.height
        if not probe.confirms(rise, anomaly.step, was_low=was_low):
            return False
        what = fact("rose_again", was=self._level, now=self._level + rise.height, step=rise.step)
        self.accept(anomaly, what, step=self._rose_at or rise.step)
        return True

    def before_treatment(self, step: int, tick: int) -> None:
        if not self._is_recent(step):
            self._before, self._began_tick, self._rose_at = self._run.controls.effects.state_dict(), tick, 0
        self._step = step

    def treated(self, incident: Incident) -> None:
        rise, self._rise = self._rise, None
        to, is_of_rate = incident.rewound_to, incident.diagnosis.cause is Cause.RATE
        if rise is None or rise.grows or to is None or is_of_rate:
            return
        before, is_jump = self._experiment.probe, incident.anomaly.signal is Signal.LOSS_SPIKE
        came_again = before is not None and before.is_near(rise.step)
        probe = Probe.of(rise, incident.anomaly.step, to, is_jump=is_jump, came_again=came_again)
        self._experiment.probe = probe
        self._rose_at = self._rose_at or rise.step

    def accept(self, anomaly: Anomaly, what: Facts, limit: float = inf, step: int = 0) -> None:
        """Take what raised the loss for a change on purpose: put back what was done, learn again up to the `limit`."""
        self._rise = None
        if self._experiment.probe is not None:
            self._put_back(anomaly.step)
        if anomaly.signal is Signal.WEIGHTS_JUMP:
            self._run.scans.rebase()
        self._checks.start_over(limit)
        self._run.ring.release_reference()
        self._run.controls.note()
        self._note(what, step or anomaly.since + 1)

    def _accepts_written(self) -> bool:
        """Say whether weights that the loop wrote were just taken for intended, and end the incidents about them."""
        accepted, self._run.scans.accepted = self._run.scans.accepted, None
        if accepted is None:
            return False
        found, was_declared = accepted
        if not was_declared:
            self._put_back(self._run.clock.step)
            self._run.controls.note()
            self._note(found.evidence, self._run.clock.step)
        losses = self._run.updates.recent_measurements()[0]
        self._checks.start_over(self._run.best.limit(max(losses, default=inf)))
        return True

    def _put_back(self, step: int) -> None:
        if self._before and self._is_recent(step):
            self._run.controls.effects.undo_to(self._before)

    def _is_recent(self, step: int) -> bool:
        return step <= self._step + self._checks.config.limit.regime_of

    @property
    def _level(self) -> float:
        reference = self._checks.episode.reference
        return inf if reference is None else reference.level

    def _note(self, what: Facts, step: int) -> None:
        """Say that something was taken for a change on purpose, also in the incidents that took it for damage."""
        note = fact("on_purpose", what=what, step=step)
        for incident in self._incident_log.incidents if self._is_recent(self._run.clock.step) else ():
            is_about_rows = bool(incident.diagnosis.rows) or incident.diagnosis.cause is Cause.PROCESS
            if incident.anomaly.tick >= self._began_tick and not (is_about_rows or incident.is_accepted):
                decision = replace(incident.decision, actions=(*incident.decision.actions, Action(ACCEPTED)))
                diagnosis = replace(incident.diagnosis, cause=Cause.UNKNOWN, advice=note, suspects=())
                incident = replace(incident, decision=decision, diagnosis=diagnosis)
                (self._incident_log.update if incident.outcome is None else self._incident_log.close)(incident)
        log.warning("step %d: %s", self._run.clock.step, say(note))
