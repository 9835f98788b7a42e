"""Lower learning rates, tried where the loss stands: the run continues with one that overtakes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from resilient_train.core.decide import BY_DECAY, by_signal
from resilient_train.core.protocols import Hook
from resilient_train.core.recovery import Recovery
from resilient_train.types import OUTSIDE, Action, Anomaly, Decision, Signal, fact


class RateSearch(Hook):
    def __init__(self, recovery: Recovery, settle: Callable[[], bool]) -> None:
        """`settle` waits for the verdict on the last update."""
        self._recovery, self._settle = recovery, settle

    def before_update(self) -> None:
        parts = self._recovery.parts
        if parts.checks.asks_for_rates(parts.clock.step, parts.ring.travelled) and self._settle():
            self.search()

    def search(self) -> None:
        recovery, parts, controls = self._recovery, self._recovery.parts, self._recovery.controls
        trials, check, log = controls.trials, parts.checks.no_progress, recovery.incident_log
        step, started, before = parts.clock.step, time.perf_counter(), trials.updates
        found = trials.race(controls)
        was_tried = trials.updates > before
        check.tried(step, is_tried=was_tried or found is not None)
        if found is None:
            if was_tried:
                controls.note()
            return
        parts.checks.require_recovery(step, step)
        if parts.checks.episode.is_open:
            parts.ring.keep_reference(step)
        fell = fact("weights_fell", share=found.left) if found.left < 1 else ()
        anomaly = Anomaly(Signal.NO_PROGRESS, step, parts.clock.tick, found.since, check.evidence + fell)
        recovery.keeper.distrust(found.since)
        decision = Decision((Action("rewind"), found.cut), rung=OUTSIDE)
        diagnosis = by_signal(anomaly) if found.left == 1 else BY_DECAY
        incident = replace(log.open(anomaly, diagnosis, decision), tried=found.tried)
        incident = controls.apply(incident, (0, 0), started, was_refused=False)
        recovery.require_agreement()
        controls.note(partial(log.record_treatment, incident))
