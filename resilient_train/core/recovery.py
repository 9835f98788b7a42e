"""One incident: diagnose its cause, decide what to do, apply the remedies, write it down."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from resilient_train.core.controls import Controls
from resilient_train.core.decide import countable, decide
from resilient_train.core.protocols import NewRegime, Parts, Store
from resilient_train.core.remedies import is_mild
from resilient_train.core.transaction import Transaction, Update
from resilient_train.ground.errors import GaveUp, TrainError
from resilient_train.ground.types import Anomaly, Cause, Decision, Incident, Outcome, Signal
from resilient_train.ground.wording import describe, log, say


class Recovery:
    def __init__(
        self,
        parts: Parts,
        controls: Controls,
        store: Store,
        log: Any,  # an IncidentLog
        *,
        report: Callable[[TrainError], None],
        agree: Callable[[], None],
        recovered_after: int,
    ) -> None:
        """`report` gets what ends the run; `agree` ends it on all ranks if they hold other settings or remedies."""
        self.parts, self.policy, self.controls = parts, parts.policy, controls
        self.diagnoser, self.intentions = parts.diagnoser, parts.intentions
        self.incident_log, self._store, self._report, self._agree = log, store, report, agree
        self._examination = parts.examiner
        self._recovered_after = recovered_after
        self.observes = self.policy.observe  # incidents are reported, and every update lands
        self._ended_damaged = False  # the loop ended before it was healthy again

    def update_accepted(self, *, was_limited: bool) -> None:
        """Count a healthy update. `was_limited`: a remedy kept its learning rate below the schedule's."""
        episode, step, controls = self.parts.checks.episode, self.parts.clock.step, self.controls
        controls.advance(was_limited=was_limited, may_relax=episode.is_at_reference(step))
        if not episode.is_open:  # the loss is back: the state to compare with is no longer needed
            self.parts.ring.release_reference()
            if controls.effects.noted.get("reference") is not None:
                controls.note()
        self.incident_log.update_accepted(step, self._recovered_after, loss_is_off=episode.is_open)

    def treat(
        self, anomaly: Anomaly, update: Update, judged: Transaction | None = None, *, is_scanned: bool = False
    ) -> None:
        """Apply what the policy prescribes, or raise GaveUp. All ranks call it together.

        `update` is the newest one, and `judged`, where its verdict found it; `is_scanned`: a scan of the state before.
        """
        parts, controls, checks, started = self.parts, self.controls, self.parts.checks, time.perf_counter()
        # It is one more of an incident that is only observed.
        if self.observes and self.incident_log.counts_on(parts.clock.tick, parts.clock.step):
            self._distrust(anomaly.since)
            return
        if judged is not None:
            anomaly = self._examination.refined(anomaly, judged, is_scanned=is_scanned)
            judged.nan_is_usual, judged.is_error = checks.nan_is_usual, anomaly.signal is Signal.EXCEPTION
        refused = judged if judged and judged.is_refused else None
        anomaly = replace(anomaly, since=self.diagnoser.trusted(anomaly.signal, anomaly.since, anomaly.landed))
        reached_weights = anomaly.landed or anomaly.since < parts.clock.step  # by this update, or by some before it

        # Drop snapshots and demote checkpoints newer than `since`, before the diagnosis: the process may die during it.
        suspects = parts.updates.first_to_blame(anomaly.since if anomaly.landed else None, update.start), update.stop
        self._distrust(anomaly.since, reached_weights=reached_weights)
        parts.updater.usual_norm = checks.usual_norm or parts.updater.usual_norm

        history = countable(self.incident_log.incidents)
        try:
            diagnosis = self.diagnoser.explain(anomaly, update, refused, history)
        except NewRegime as why:
            self.intentions.learn_again(anomaly, why)
            return
        if not anomaly.ranks:  # averaged gradients are the same on every rank: only a replay names the rank
            anomaly = replace(anomaly, ranks=diagnosis.ranks)

        # Decide. The reference is set first: rungs for the start of a run ask how early it is.
        reached = anomaly.since if anomaly.signal is Signal.NOT_RECOVERED else anomaly.step
        if reached_weights and diagnosis.cause is not Cause.CORRUPTION:
            checks.require_recovery(anomaly.since, reached)
        if anomaly.landed and self.intentions.is_on_purpose(anomaly, diagnosis):
            return
        case = controls.case(anomaly, diagnosis)
        decision = parts.world.on_main(lambda: decide(self.policy, case, history))
        self._set_reference(anomaly.since, reached if reached_weights else None, diagnosis.cause, decision)
        before = self.incident_log.continued(anomaly.signal, diagnosis, decision)
        incident = before or self.incident_log.open(anomaly, diagnosis, decision, effects=controls.effects.changes())
        if decision.gave_up is not None:
            self._give_up(incident)
        if self.observes:
            self.incident_log.record_treatment(replace(incident, seconds=time.perf_counter() - started))
            return
        self.intentions.before_treatment(anomaly.step, anomaly.tick)
        self.carry_out(incident, suspects, started, was_refused=bool(refused), continues=anomaly if before else None)

    def carry_out(
        self,
        incident: Incident,
        suspects: tuple[int, int],
        started: float,
        *,
        was_refused: bool = False,
        continues: Anomaly | None = None,
    ) -> None:
        """Apply what was decided, and write it down. `continues` is an anomaly that the incident counts as one more."""
        controls, log = self.controls, self.incident_log
        treated = controls.apply(incident, suspects, started, was_refused=was_refused)
        self._agree()
        self.intentions.treated(treated)
        if continues is None:
            controls.note(partial(log.record_treatment, treated))
        else:
            controls.note(partial(log.count_again, incident, continues))

    def _distrust(self, since: int, *, reached_weights: bool = True) -> None:
        self.parts.ring.distrust(since)
        if reached_weights:
            self._store.distrust(since)

    @property
    def is_damaged(self) -> bool:
        """Whether the state may hold damage: the loss is not back, or an anomaly was only observed."""
        was_observed = self.incident_log.is_observing or self._ended_damaged or not self._is_back()
        return was_observed if self.observes else self.is_unrecovered()

    def _set_reference(self, since: int, reached: int | None, cause: Cause, decision: Decision) -> None:
        """Of damage that has `reached` a step, require the loss to return to its level at `since`; keep that state."""
        checks, actions = self.parts.checks, decision.actions
        rewinds = any(action.remedy == "rewind" for action in actions)
        if cause is Cause.CORRUPTION and (rewinds or decision.gave_up):
            if checks.episode.is_only_reported:
                checks.episode.end()
            return  # a rewind recomputes the same updates bit for bit, so there is nothing to compare
        if reached is not None:
            is_mild_ladder = all(is_mild(rung.do) for rung in self.policy.ladder(cause))
            is_reported = is_mild_ladder and bool(actions) and is_mild(actions)  # and nothing more will be done
            checks.require_recovery(since, reached, is_only_reported=is_reported)
            if checks.episode.is_open:
                self.parts.ring.keep_reference(since)

    def _give_up(self, incident: Incident) -> NoReturn:
        self.incident_log.close(incident)
        path, _ = self._restore_best(incident.anomaly.since)
        if self.parts.world.is_main:  # the other ranks do not know where the state was written
            log.error("%s", describe(incident, "final", last_good=path))
        self.end(GaveUp(f"gave up at step {incident.anomaly.step}: {say(incident.decision.gave_up or ())}", path))

    def end(self, error: TrainError) -> NoReturn:
        self._report(error)
        raise error

    def _restore_best(self, since: int) -> tuple[Path | None, bool]:
        """Restore the best verified state and leave it on disk; return its path, and whether there was such a state."""
        ring = self.parts.ring
        snapshot = ring.last_good(since) or ring.newest_verified()  # a newer one was verified at the reference's level
        if snapshot is not None:
            ring.restore(snapshot)
            path = self._store.save(snapshot)
        else:  # the run was resumed a moment ago, or memory is short
            path = self._store.restore(since)
            ring.clear()
        self.parts.updates.rewound(self.parts.clock.step)
        self.parts.checks.episode.end()
        return path, snapshot is not None or path is not None

    def finish(self) -> None:
        """The run is complete: close its incidents, as recovered if the loss is back or was never off."""
        episode, is_back = self.parts.checks.episode, self._is_back()
        self._ended_damaged = self.incident_log.is_observing
        outcome = Outcome.RECOVERED if is_back else Outcome.UNRECOVERED
        if is_back and episode.is_open:
            episode.end()
            self.controls.note()
        self.incident_log.close_all(outcome, healthy_since=self.parts.clock.step - self._recovered_after)

    def _is_back(self) -> bool:
        episode = self.parts.checks.episode
        return not episode.is_open or episode.ends_back(self.parts.clock.step)

    def is_unrecovered(self) -> bool:
        return not (self._is_back() or self.parts.checks.episode.is_only_reported or self.observes)

    def end_unrecovered(self) -> GaveUp:
        """End a run whose loss is not back: its result is the best verified state. Returns the error to raise."""
        checks, clock = self.parts.checks, self.parts.clock
        reference = checks.episode.reference
        assert reference is not None
        since, newest = checks.not_recovered_since(clock.step), self.parts.ring.newest_verified()
        self._store.distrust(max(since, newest.step if newest else 0))  # what was left on the way is no result either
        self.incident_log.close_all(Outcome.UNRECOVERED)
        path, is_restored = self._restore_best(since)
        if not is_restored:
            return GaveUp("not recovered, and there is no verified state to return to", None)
        why = f"the loss did not return to {reference.level:.4g}, where it was at step {reference.step:,}"
        return GaveUp(f"not recovered: {why}; the run returned to step {clock.step:,}", path)
