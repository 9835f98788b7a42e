"""Changes on purpose: distinguished from damage by an experiment, and accepted."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from resilient_train.controls import Controls
from resilient_train.diagnose.explain import OF_THE_LOSS, ChangedOnPurpose, Explainer, ReferenceInvalid
from resilient_train.record.incident_log import IncidentLog
from resilient_train.run_parts import RunParts
from resilient_train.types import ACCEPTED, Action, Anomaly, Cause, Diagnosis, Facts, Incident, Signal, fact
from resilient_train.watch.purpose import LEARNED, Probe, Rise
from resilient_train.wording import log, say


class Intended:
    """Finds out whether a rise of the loss was on purpose, and lets the run learn again what is usual if it was."""

    def __init__(self, parts: RunParts, incidents: IncidentLog, controls: Controls) -> None:
        self._parts, self._checks, self._incident_log, self._controls = parts, parts.checks, incidents, controls
        self._before: Any = None  # the effects before the incidents of late
        self._began_tick, self._step = 0, -(10**9)  # of the first of them, and of the newest
        self._rose_at = 0  # where the loss rose first: code that keeps no count of steps changes at once after a rewind
        if opened := [one.anomaly for one in incidents.incidents if one.outcome is None]:  # by the process before
            self._began_tick, self._step = opened[0].tick, opened[-1].step

    def began_by_chance(self, anomaly: Anomaly, explainer: Explainer) -> bool:
        """Say whether an alarm compares with a first loss that was low by chance, and forget that loss then."""
        checks = self._checks
        if not (anomaly.signal is Signal.DIVERGENCE and checks.early_divergence.is_thrown):
            return False
        level = explainer.level_at_first(anomaly, checks.config.overshoot.times)
        if level is not None:
            checks.early_divergence.begins_with(level)
            checks.rewind_check.end()
        return level is not None

    def learn_again(self, anomaly: Anomaly, why: ReferenceInvalid) -> None:
        if isinstance(why, ChangedOnPurpose):
            self.accept(anomaly, why.what, why.limit)
        else:
            log.info("note: %s: check statistics were reset", say(why.what))
            self._checks.start_over()
            self._controls.note()

    def rise(self, anomaly: Anomaly, diagnosis: Diagnosis) -> Rise | None:
        """The rise of the loss that an anomaly is about, if it may be on purpose."""
        may_be = diagnosis.cause in (Cause.EXPLOSION, Cause.RATE, Cause.UNKNOWN)
        may_be |= diagnosis.cause is Cause.DATA and not diagnosis.rows and self._parts.samples.is_fed
        is_rise = anomaly.landed and anomaly.signal in OF_THE_LOSS
        return self._parts.updates.rise(anomaly.since, self._level) if may_be and is_rise else None

    def accepts(self, rise: Rise, anomaly: Anomaly) -> bool:
        """Accept a rise that came again in spite of a rewind."""
        probe = self._checks.probe
        if probe is None:
            return False
        there = self._checks.level_at(probe.rewound_to)  # it may have been as high, at the beginning of the run
        was_low = there is None or there < self._level + LEARNED * rise.height
        if not probe.confirms(rise, anomaly.step, was_low=was_low):
            return False
        what = fact("rose_again", was=self._level, now=self._level + rise.height, step=rise.step)
        self.accept(anomaly, what, step=self._rose_at or rise.step)
        return True

    def before_treatment(self, anomaly: Anomaly) -> None:
        if not self._is_recent(anomaly.step):
            self._before, self._began_tick, self._rose_at = self._controls.effects.state_dict(), anomaly.tick, 0
        self._step = anomaly.step

    def after_treatment(self, rise: Rise | None, incident: Incident) -> None:
        to, is_of_rate = incident.rewound_to, incident.diagnosis.cause is Cause.RATE
        if rise is None or rise.grows or to is None or is_of_rate:
            return
        before, is_jump = self._checks.probe, incident.anomaly.signal is Signal.LOSS_SPIKE
        came_again = before is not None and before.is_near(rise.step)
        self._checks.probe = Probe.of(rise, incident.anomaly.step, to, is_jump=is_jump, came_again=came_again)
        self._rose_at = self._rose_at or rise.step

    def accept(self, anomaly: Anomaly, what: Facts, limit: float = inf, step: int = 0) -> None:
        """Take what raised the loss for a change on purpose: put back what was done, learn again up to the `limit`."""
        if self._checks.probe is not None:
            self._put_back(anomaly.step)
        if anomaly.signal is Signal.WEIGHTS_JUMP:
            self._parts.scans.rebase()
        self._checks.start_over(limit)
        self._parts.ring.release_reference()
        self._controls.note()
        self._note(what, step or anomaly.since + 1)

    def accept_written(self) -> bool:
        """Say whether weights that the loop wrote were just taken for intended, and end the incidents about them."""
        accepted, self._parts.scans.accepted = self._parts.scans.accepted, None
        if accepted and not accepted[1]:
            self._put_back(self._parts.clock.step)
            self._controls.note()
            self._note(accepted[0].evidence, self._parts.clock.step)
        return accepted is not None

    def _put_back(self, step: int) -> None:
        if self._before and self._is_recent(step):
            self._controls.effects.undo_to(self._before)

    def _is_recent(self, step: int) -> bool:
        return step <= self._step + self._checks.config.limit.regime_of

    @property
    def _level(self) -> float:
        reference = self._checks.rewind_check.reference
        return inf if reference is None else reference.level

    def _note(self, what: Facts, step: int) -> None:
        """Say that something was taken for a change on purpose, also in the incidents that took it for damage."""
        note = fact("on_purpose", what=what, step=step)
        for incident in self._incident_log.incidents if self._is_recent(self._parts.clock.step) else ():
            is_about_rows = bool(incident.diagnosis.rows) or incident.diagnosis.cause is Cause.PROCESS
            if incident.anomaly.tick >= self._began_tick and not is_about_rows:
                decision = replace(incident.decision, actions=(*incident.decision.actions, Action(ACCEPTED)))
                diagnosis = replace(incident.diagnosis, cause=Cause.UNKNOWN, advice=note, suspects=())
                incident = replace(incident, decision=decision, diagnosis=diagnosis)
                (self._incident_log.update if incident.outcome is None else self._incident_log.close)(incident)
        log.warning("step %d: %s", self._parts.clock.step, say(note))
