"""Was it on purpose? A change of the loss, the model, the data or the weights that is no damage."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from resilient_train.core.checks import Finding
from resilient_train.core.protocols import NewRegime
from resilient_train.core.transaction import Transaction
from resilient_train.data.history import Rise
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.extensions.checks.best import LEARNED, Probe
from resilient_train.extensions.diagnosis.explain import OF_THE_LOSS, ChangedOnPurpose, Explainer
from resilient_train.extensions.remedial import AllControls
from resilient_train.extensions.run_parts import RunParts
from resilient_train.ground.types import (
    ACCEPTED,
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


class Intended:
    """Finds out whether a rise of the loss was on purpose, and lets the run learn again what is usual if it was."""

    def __init__(self, parts: RunParts, explainer: Explainer, incidents: IncidentLog, controls: AllControls) -> None:
        self._parts, self._checks, self._incident_log, self._controls = parts, parts.checks, incidents, controls
        self._panel, self.trusted, self.explain = parts.panel, explainer.trusted, explainer.explain
        self._explainer = explainer
        self._before: Any = None  # the effects before the incidents of late
        self._began_tick, self._step = 0, -(10**9)  # of the first of them, and of the newest
        self._rise: Rise | None = None  # of the loss, which the newest anomaly is about, if it may be on purpose
        self._rose_at = 0  # where the loss rose first: code that keeps no count of steps changes at once after a rewind

    def resume(self) -> None:
        """Continue with the incidents of the process before. It is a collective."""
        first, done = 0, [one for one in self._incident_log.of_training if one.decision.actions and not one.is_observed]
        for one in done:
            if one.decision.rung != OUTSIDE:
                first = first if self._is_recent(one.anomaly.step) else one.id
                self._began_tick = one.anomaly.tick if first == one.id else self._began_tick
                self._step = one.last_step
        history = self._incident_log.run_history
        self._before = self._parts.world.on_main(lambda: history.effects_before(first)) if first else None

    def reviewed(self, vitals: Vitals, finding: Finding) -> Finding:
        """After weights were written on purpose, any update that is finite will do."""
        if not self._accepts_written():
            return finding
        is_spike = vitals.refused in SPIKES
        return Finding(repeat=is_spike) if vitals.accepted or is_spike else finding

    def noticed(self, update: Transaction, vitals: Vitals) -> Anomaly | None:
        return self._explainer.check_first_updates(vitals, update.inputs)

    def is_on_purpose(self, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
        """Say whether a rise of the loss came again in spite of a rewind, and accept it then."""
        may_be = diagnosis.cause in (Cause.EXPLOSION, Cause.RATE, Cause.UNKNOWN)
        may_be |= diagnosis.cause is Cause.DATA and not diagnosis.rows and self._parts.samples.is_fed
        may_be &= anomaly.signal in OF_THE_LOSS
        self._rise = rise = self._parts.updates.rise(anomaly.since, self._level) if may_be else None
        return rise is not None and self.accepts(rise, anomaly)

    def learn_again(self, anomaly: Anomaly, why: NewRegime) -> None:
        if isinstance(why, ChangedOnPurpose):
            self.accept(anomaly, why.what, why.limit)
        else:
            log.info("note: %s: check statistics were reset", say(why.what))
            self._checks.start_over()
            self._controls.note()

    def accepts(self, rise: Rise, anomaly: Anomaly) -> bool:
        probe = self._panel.experiment.probe
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
            self._before, self._began_tick, self._rose_at = self._controls.effects.state_dict(), tick, 0
        self._step = step

    def treated(self, incident: Incident) -> None:
        rise, self._rise = self._rise, None
        to, is_of_rate = incident.rewound_to, incident.diagnosis.cause is Cause.RATE
        if rise is None or rise.grows or to is None or is_of_rate:
            return
        before, is_jump = self._panel.experiment.probe, incident.anomaly.signal is Signal.LOSS_SPIKE
        came_again = before is not None and before.is_near(rise.step)
        probe = Probe.of(rise, incident.anomaly.step, to, is_jump=is_jump, came_again=came_again)
        self._panel.experiment.probe = probe
        self._rose_at = self._rose_at or rise.step

    def accept(self, anomaly: Anomaly, what: Facts, limit: float = inf, step: int = 0) -> None:
        """Take what raised the loss for a change on purpose: put back what was done, learn again up to the `limit`."""
        self._rise = None
        if self._panel.experiment.probe is not None:
            self._put_back(anomaly.step)
        if anomaly.signal is Signal.WEIGHTS_JUMP:
            self._parts.scans.rebase()
        self._checks.start_over(limit)
        self._parts.ring.release_reference()
        self._controls.note()
        self._note(what, step or anomaly.since + 1)

    def _accepts_written(self) -> bool:
        """Say whether weights that the loop wrote were just taken for intended, and end the incidents about them."""
        accepted, self._parts.scans.accepted = self._parts.scans.accepted, None
        if accepted is None:
            return False
        found, was_declared = accepted
        if not was_declared:
            self._put_back(self._parts.clock.step)
            self._controls.note()
            self._note(found.evidence, self._parts.clock.step)
        losses = self._parts.updates.recent_measurements()[0]
        self._checks.start_over(self._panel.best.limit(max(losses, default=inf)))
        return True

    def _put_back(self, step: int) -> None:
        if self._before and self._is_recent(step):
            self._controls.effects.undo_to(self._before)

    def _is_recent(self, step: int) -> bool:
        return step <= self._step + self._checks.config.limit.regime_of

    @property
    def _level(self) -> float:
        reference = self._checks.episode.reference
        return inf if reference is None else reference.level

    def _note(self, what: Facts, step: int) -> None:
        """Say that something was taken for a change on purpose, also in the incidents that took it for damage."""
        note = fact("on_purpose", what=what, step=step)
        for incident in self._incident_log.incidents if self._is_recent(self._parts.clock.step) else ():
            is_about_rows = bool(incident.diagnosis.rows) or incident.diagnosis.cause is Cause.PROCESS
            if incident.anomaly.tick >= self._began_tick and not (is_about_rows or incident.is_accepted):
                decision = replace(incident.decision, actions=(*incident.decision.actions, Action(ACCEPTED)))
                diagnosis = replace(incident.diagnosis, cause=Cause.UNKNOWN, advice=note, suspects=())
                incident = replace(incident, decision=decision, diagnosis=diagnosis)
                (self._incident_log.update if incident.outcome is None else self._incident_log.close)(incident)
        log.warning("step %d: %s", self._parts.clock.step, say(note))
