"""One incident: diagnose its cause, decide what to do, apply the remedies, write it down."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.core.controls import Controls
from resilient_train.core.decide import decide, recent
from resilient_train.core.parts import RunParts
from resilient_train.core.policy import Policy
from resilient_train.core.remedies import is_mild
from resilient_train.core.transaction import Transaction
from resilient_train.data.rows import fingerprint
from resilient_train.data.samples import Update
from resilient_train.diagnose.explain import OF_THE_LOSS, ChangedOnPurpose, Explainer, ReferenceInvalid
from resilient_train.errors import GaveUp, RanksDiffer, StorageFailed, TrainError
from resilient_train.ranks.world import odd_ones
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.progress import Doing
from resilient_train.types import (
    ACCEPTED,
    OUTSIDE,
    Action,
    Anomaly,
    Cause,
    Decision,
    Diagnosis,
    Facts,
    Incident,
    Outcome,
    ProcessIncident,
    Signal,
    fact,
)
from resilient_train.watch.purpose import LEARNED, Probe, Rise
from resilient_train.wording import describe, log, say


class Intended:
    """Finds out whether a rise of the loss was on purpose, and lets the run learn again what is usual if it was."""

    def __init__(self, parts: RunParts, incidents: IncidentLog, controls: Controls) -> None:
        self._parts, self._checks, self._incident_log, self._controls = parts, parts.checks, incidents, controls
        self._before: Any = None  # the effects before the incidents of late
        self._began_tick, self._step = 0, -(10**9)  # of the first of them, and of the newest
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

    def began_by_chance(self, anomaly: Anomaly, explainer: Explainer) -> bool:
        """Say whether an alarm compares with a first loss that was low by chance, and forget that loss then."""
        checks = self._checks
        if not (anomaly.signal is Signal.DIVERGENCE and checks.early_divergence.is_thrown):
            return False
        level = explainer.level_at_first(anomaly, checks.config.overshoot.times)
        if level is not None:
            checks.early_divergence.begins_with(level)
            checks.episode.end()
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


class Recovery:
    """Treats incidents, each from its first sign to the update that the run continues with."""

    def __init__(
        self,
        parts: RunParts,
        policy: Policy,
        controls: Controls,
        keeper: CheckpointKeeper,
        report: Callable[[TrainError], None],
        *,
        recovered_after: int,
    ) -> None:
        self.parts, self.policy, self.incident_log = parts, policy, keeper.incident_log
        self.controls, self.keeper, self._report = controls, keeper, report
        self.explainer = Explainer(
            *(parts.world, parts.samples, parts.state, parts.ring, parts.updater.optimizers),
            *(parts.updates, parts.search, parts.beat),
        )
        self._recovered_after = recovered_after
        self.intended = Intended(parts, self.incident_log, controls)
        self.observes = policy.observe  # incidents are reported, and every update lands
        self._observed: int | None = None  # number of the incident that further anomalies count into
        self._anomalous_step = 0  # the newest of them
        self._ended_damaged = False  # the loop ended before it was healthy again

    # With every update.

    def next_update(self) -> Update:
        """Fetch the samples of the next update. If the storage fails for good, save the newest verified state first."""
        try:
            return self.parts.samples.next_update()
        except StorageFailed as error:
            if (snapshot := self.parts.ring.newest_verified()) is not None:
                self.keeper.save_alone(snapshot)  # another rank may have its data
            self.process_ends()
            self.end(error)

    def update_accepted(self, update: Update, *, was_limited: bool) -> None:
        """Count a healthy update. `was_limited`: a remedy kept its learning rate below the schedule's."""
        history, check, step = self.incident_log.run_history, self.parts.checks.episode, self.parts.clock.step
        if self._observed is not None and step >= self._anomalous_step + self._recovered_after:
            self._end_observed()
        self.controls.knobs.advance(was_limited=was_limited, may_relax=check.is_at_reference(step))
        if not check.is_open:  # the loss is back: the state to compare with is no longer needed
            if self.parts.ring.keeps_reference:
                self.parts.ring.release_reference()
            if history.effects.get("reference") is not None:
                self.controls.note()
        self.incident_log.update_accepted(step, self._recovered_after, loss_is_off=check.is_open)
        if self.incident_log.directory is not None and history.data_sample is None and update.keys:
            # Once, what the data set looks like, so that a resume notices when it has changed.
            rows = [key.row for keys in update.keys for key in keys]
            history.note("data_seen", sample=fingerprint(self.parts.samples.dataset, rows))  # type: ignore[attr-defined]

    # One incident.

    def treat(self, anomaly: Anomaly, update: Update, refused: Transaction | None = None) -> None:
        """Apply what the policy prescribes, or raise GaveUp; `update` is the newest one. All ranks call it together."""
        parts, controls, checks = self.parts, self.controls, self.parts.checks
        started = time.perf_counter()
        if self.intended.began_by_chance(anomaly, self.explainer):
            return

        # Drop snapshots and demote checkpoints newer than `since`, before the diagnosis: the process may die during it.
        anomaly, leap = self.explainer.since_leap(anomaly)
        suspects = parts.updates.first_to_blame(anomaly, update.start), update.stop
        parts.ring.distrust(anomaly.since)
        if anomaly.reached_weights:
            self.keeper.distrust(anomaly.since)
        parts.updater.usual_norm = checks.usual_norm or parts.updater.usual_norm

        # Diagnose.
        history = recent(self.policy, self.incident_log.incidents, parts.clock.tick)
        try:
            reference = checks.episode.reference
            diagnosis, leap = self.explainer.explain(anomaly, update, refused, history, reference, leap)
        except ReferenceInvalid as why:
            self.intended.learn_again(anomaly, why)
            return
        if not anomaly.ranks:  # averaged gradients are the same on every rank: only a replay names the rank
            anomaly = replace(anomaly, ranks=diagnosis.ranks)

        # Decide. The loss is measured against the reference first: how far it is above may set the remedy's strength.
        if anomaly.reached_weights and diagnosis.cause is not Cause.CORRUPTION:
            checks.require_recovery(anomaly.since, _reached(anomaly))
        rise = self.intended.rise(anomaly, diagnosis)
        if rise is not None and self.intended.accepts(rise, anomaly):
            return
        case = controls.case(anomaly, diagnosis, leap)
        decision = parts.world.on_main(lambda: decide(self.policy, case, history))
        self._set_reference(anomaly, diagnosis, decision)
        before = self.incident_log.continued(anomaly, diagnosis, decision)
        is_off, effects = checks.episode.is_open, controls.effects
        incident = before or self.incident_log.open(
            anomaly, diagnosis, decision, is_off=is_off, effects=effects.changes()
        )
        if decision.gave_up is not None:
            self._give_up(incident)
        if self.observes:
            self._observed, self._anomalous_step = incident.id, parts.clock.step
            incident = replace(incident, seconds=time.perf_counter() - started)
            self.incident_log.record_treatment(incident, ongoing=True)
            return

        self.intended.before_treatment(anomaly)
        incident = controls.apply(incident, suspects, started, was_refused=refused is not None)
        self.require_agreement()
        self.intended.after_treatment(rise, incident)
        if before is not None:
            controls.note(partial(self.incident_log.count_again, before, anomaly))
        else:
            controls.note(partial(self.incident_log.record_treatment, incident))

    def counts(self, anomaly: Anomaly) -> bool:
        """Count an anomaly into the incident that is observed, as NaN makes only one; False if there is none."""
        if self._observed is None:
            return False
        parts, step = self.parts, self.parts.clock.step
        parts.ring.distrust(anomaly.since)
        self.keeper.distrust(anomaly.since)
        if step > self._anomalous_step:
            self._anomalous_step = step
            self.incident_log.count_further(self._observed, step)
        return True

    def _end_observed(self) -> None:
        """The next anomaly is an incident of its own."""
        if self._observed is not None:
            self.incident_log.ongoing.discard(self._observed)
            self._observed = None

    @property
    def is_damaged(self) -> bool:
        """Whether the state may hold damage: the loss is not back, or an anomaly was only observed."""
        was_observed = self._observed is not None or self._ended_damaged or not self._is_back()
        return was_observed if self.observes else self.is_unrecovered()

    def _set_reference(self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision) -> None:
        """If damage has to be undone, require the loss to return to its level at `since`, and keep that state."""
        checks, actions = self.parts.checks, decision.actions
        rewinds = any(action.remedy == "rewind" for action in actions)
        if diagnosis.cause is Cause.CORRUPTION and (rewinds or decision.gave_up):
            if checks.episode.is_only_reported:
                checks.episode.end()
            return  # a rewind recomputes the same updates bit for bit, so there is nothing to compare
        if anomaly.reached_weights:
            is_mild_ladder = all(is_mild(rung.do) for rung in self.policy.ladder(diagnosis.cause))
            is_reported = is_mild_ladder and bool(actions) and is_mild(actions)  # and nothing more will be done
            checks.require_recovery(anomaly.since, _reached(anomaly), is_only_reported=is_reported)
            if checks.episode.is_open:
                self.parts.ring.keep_reference(anomaly.since)

    def _give_up(self, incident: Incident) -> NoReturn:
        self.incident_log.close(incident)
        path, _ = self._restore_best(incident.anomaly.since)
        if self.parts.world.is_main:  # the other ranks do not know where the state was written
            log.error("%s", describe(incident, "final", last_good=path))
        self.end(GaveUp(f"gave up at step {incident.anomaly.step}: {say(incident.decision.gave_up or ())}", path))

    def end(self, error: TrainError) -> NoReturn:
        """Report an error that ends the run, and raise it."""
        self._report(error)
        raise error

    def _restore_best(self, since: int) -> tuple[Path | None, bool]:
        """Restore the best verified state and leave it on disk; return its path, and whether there was such a state."""
        ring = self.parts.ring
        snapshot = ring.last_good(since) or ring.newest_verified()  # a newer one was verified at the reference's level
        if snapshot is not None:
            ring.restore(snapshot)
            path = self.keeper.save(snapshot)
        else:  # the run was resumed a moment ago, or memory is short
            path = self.keeper.restore(since)
            ring.clear()
        self.parts.updates.rewound(self.parts.clock.step)
        self.parts.checks.episode.end()
        return path, snapshot is not None or path is not None

    def require_agreement(self, differ: str = "decided_differently") -> None:
        """End the run on all ranks if they hold other settings or remedies. It is a collective."""
        digests = self.parts.world.all_of(self.controls.digest()) if self.parts.world.size > 1 else ()
        if odd := odd_ones(digests):
            self._ranks_differ(odd, fact(differ, ranks=[*odd]))

    def _ranks_differ(self, odd: tuple[int, ...], evidence: Facts) -> NoReturn:
        since = self.parts.clock.step
        anomaly = Anomaly(Signal.RANK_MISMATCH, since + 1, self.parts.clock.tick, since, evidence, ranks=odd)
        incident = self.incident_log.open(
            anomaly, Diagnosis(Cause.PROCESS, fact("ranks_decide")), Decision((Action("end"),))
        )
        self.parts.ring.distrust(since)
        snapshot = self.parts.ring.last_good(since)

        def leave() -> None:
            self.incident_log.close(incident, Outcome.GAVE_UP)
            self.keeper.distrust(since)
            if snapshot is not None:
                self.keeper.save_alone(snapshot)

        self.parts.world.main_before_others(leave)
        what = f"{say(evidence)} in update {since + 1}: the run ends before weights drift apart"
        onward = "; the same command resumes from the newest verified state" if since else ""
        self.end(RanksDiffer(what + onward))

    def process_ends(self) -> None:
        """Record an orderly exit, perhaps with an error, so that a resume does not blame the current samples."""
        self.keeper.progress.turned_to(Doing.ENDED, self.parts.clock.tick)

    def hung(self, evidence: Facts, *, in_update: bool) -> None:
        """From another thread: write down that the run hangs, and save what can be saved."""
        progress, step = self.keeper.progress, self.parts.clock.step
        progress.turned_to(Doing.HUNG if in_update and progress.is_updating else Doing.ENDED)
        lost, write = self.keeper.rescue()
        self.keeper.note_incident(ProcessIncident(Signal.HANG, step + 1, step, evidence, "end", steps_lost=lost))
        write()

    # The beginning of a process, and the end of a run.

    def resume(self, *, is_explained: bool) -> bool:
        """Resume from the newest checkpoint that verifies; False if there is none. `is_explained`: by no samples."""
        parts, controls, incident_log = self.parts, self.controls, self.incident_log
        before, make_plan = (incident_log.incidents, self.policy.crashes), self.keeper.resumption.plan
        plan = parts.world.on_main(lambda: make_plan(*before, is_explained=is_explained))
        if not parts.world.is_main:
            incident_log.run_history.adopt(plan.incidents)
        self.keeper.begin(plan)
        try:
            controls.effects.load_state_dict(plan.effects)
        except ValueError as error:
            raise TrainError(f"{plan.path or incident_log.directory}: {error}") from error
        parts.clock.tick = max(parts.clock.tick, plan.tick)
        self.intended.resume()
        for one in [one for one in incident_log.open_incidents if self.observes and one.is_observed]:
            self._observed, self._anomalous_step = one.id, parts.clock.step
            incident_log.ongoing.add(one.id)
        for found in plan.found:
            if plan.skipped is not None and found.remedy == "skip":
                parts.samples.skip(*plan.skipped)
                if 0 < len(found.rows) < parts.samples.slicing.samples // 2:
                    # Few rows were in both updates that ended the process.
                    controls.quarantine_after_crash(found.rows, found.advice, incident_log.next_id)
            controls.note(partial(self.keeper.note_incident, found))
        if controls.patches.has_dropped:
            controls.note()
        if parts.clock.tick:  # so that the same samples are not blamed twice for one end of the process
            self.keeper.progress.turned_to(Doing.BETWEEN)
        return plan.path is not None

    def finish(self) -> None:
        """The run is complete: close its incidents, as recovered if the loss is back or was never off."""
        check, is_back = self.parts.checks.episode, self._is_back()
        self._ended_damaged = self._observed is not None
        self._end_observed()
        outcome = Outcome.RECOVERED if is_back else Outcome.UNRECOVERED
        if is_back and check.is_open:
            check.end()
            self.controls.note()
        self.incident_log.close_all(outcome, healthy_since=self.parts.clock.step - self._recovered_after)

    def _is_back(self) -> bool:
        check = self.parts.checks.episode
        return not check.is_open or check.ends_back(self.parts.clock.step)

    def is_unrecovered(self) -> bool:
        """Say whether the run may not end as it is: the loss is not back, and the policy does more than report that."""
        return not (self._is_back() or self.parts.checks.episode.is_only_reported or self.observes)

    def end_unrecovered(self) -> GaveUp:
        """End a run whose loss is not back: its result is the best verified state. Returns the error to raise."""
        checks, clock = self.parts.checks, self.parts.clock
        reference = checks.episode.reference
        assert reference is not None
        since, newest = checks.not_recovered_since(clock.step), self.parts.ring.newest_verified()
        self.keeper.distrust(max(since, newest.step if newest else 0))  # what was left on the way is no result either
        self.incident_log.close_all(Outcome.UNRECOVERED)
        path, is_restored = self._restore_best(since)
        if not is_restored:
            return GaveUp("not recovered, and there is no verified state to return to", None)
        why = f"the loss did not return to {reference.level:.4g}, where it was at step {reference.step:,}"
        return GaveUp(f"not recovered: {why}; the run returned to step {clock.step:,}", path)


def _reached(anomaly: Anomaly) -> int:
    """Return the step that the run must reach again; for NOT_RECOVERED that is `since`."""
    return anomaly.since if anomaly.signal is Signal.NOT_RECOVERED else anomaly.step
