"""Lower learning rates, tried where the loss stands: the run continues with one that overtakes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from resilient_train.core.decide import BY_DECAY, by_signal
from resilient_train.core.protocols import Hook, Store
from resilient_train.core.recovery import Recovery
from resilient_train.remedial import AllControls
from resilient_train.run_parts import RunParts
from resilient_train.types import OUTSIDE, Action, Anomaly, Decision, Signal, fact


class RateSearch(Hook):
    def __init__(
        self, parts: RunParts, recovery: Recovery, controls: AllControls, store: Store, settle: Callable[[], bool]
    ) -> None:
        """`settle` waits for the verdict on the last update."""
        self._parts, self._recovery, self._controls, self._store = parts, recovery, controls, store
        self._settle = settle

    def before_update(self) -> None:
        """Look where the loss stands; not while an incident is open, nor around a declared change."""
        step, checks, panel = self._parts.clock.step, self._parts.checks, self._parts.panel
        may_ask, is_suspect = not checks.episode.is_open, panel.early_divergence.is_suspect
        if not may_ask or step in checks.declared:
            return
        if panel.no_progress.asks(step, self._parts.ring.travelled, is_suspect=is_suspect) and self._settle():
            self.search()

    def search(self) -> None:
        recovery, parts, controls = self._recovery, self._parts, self._controls
        trials, check, log = controls.trials, parts.panel.no_progress, recovery.incident_log
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
        self._store.distrust(found.since)
        decision = Decision((Action("rewind"), found.cut), rung=OUTSIDE)
        diagnosis = by_signal(anomaly) if found.left == 1 else BY_DECAY
        incident = replace(log.open(anomaly, diagnosis, decision), tried=found.tried)
        recovery.carry_out(incident, (0, 0), started)
