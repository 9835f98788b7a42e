"""One incident: diagnose, decide, act, write down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.controls import Controls
from resilient_train.data.rows import sampled
from resilient_train.data.samples import Update
from resilient_train.diagnose.explain import Explainer, NoMeasure
from resilient_train.diagnose.search import Refused
from resilient_train.errors import GaveUp, RanksDiffer, StorageFailed, TrainError
from resilient_train.ranks.world import odd_ones
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.progress import Doing
from resilient_train.record.surroundings import DECIDE, DIAGNOSE, REMEDY, REWIND, Phases
from resilient_train.recover.causes import by_signal
from resilient_train.recover.decide import decide
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import is_mild, remedy
from resilient_train.run_parts import RunParts
from resilient_train.types import (
    Action,
    Anomaly,
    Cause,
    Decision,
    Diagnosis,
    Incident,
    Outcome,
    ProcessIncident,
    Signal,
    Vitals,
)
from resilient_train.wording import farewell, log, rank_names

_IN_UPDATE = (Signal.HANG, Signal.OUT_OF_MEMORY)  # of the process, and met while an update was made


class Recovery:
    """Treats incidents, each from its first sign to the update that the run continues with."""

    def __init__(
        self,
        parts: RunParts,
        policy: Policy,
        incidents: IncidentLog,
        controls: Controls,
        keeper: CheckpointKeeper,
        *,
        recovered_after: int,
    ) -> None:
        self.parts, self.policy, self.incident_log = parts, policy, incidents
        self.controls, self.keeper = controls, keeper
        self.explainer = Explainer(
            *(parts.world, parts.samples, parts.state, parts.ring, parts.updater.optimizers),
            *(parts.updates, parts.search, parts.beat),
        )
        self._recovered_after = recovered_after
        self._saving_fails: int | None = None  # number of the newest incident of that kind

    # What every update says.

    def measured(self, vitals: Vitals) -> None:
        """Note an update that was attempted, in case it is to blame for something later."""
        self.parts.updates.add(vitals)
        self.incident_log.add_vitals(vitals)

    def fetched(self) -> Update:
        """Fetch the samples of the next update. Where the storage fails for good, leave the newest verified state."""
        try:
            return self.parts.samples.next_update(self.parts.beat)
        except StorageFailed:
            if (snapshot := self.parts.ring.newest_verified()) is not None:
                self.keeper.leave_alone(snapshot)  # another rank may have its data
                self.note_saves()
            self.ended()
            raise

    def note_data(self, update: Update) -> None:
        """Note, once, what the data set looks like, so that a resume notices when it has changed."""
        if (
            self.incident_log.directory is not None
            and self.incident_log.run_history.data_sample is None
            and update.keys
        ):
            rows = [key.row for keys in update.keys for key in keys]
            self.incident_log.run_history.note_data(sampled(self.parts.samples.dataset, rows))  # type: ignore[attr-defined]

    def healthy(self, *, was_limited: bool) -> None:
        """Note that an update landed without trouble, with a rate that a limit held below what the schedule asks."""
        history = self.incident_log.run_history
        probation, step = self.parts.checks.rewind_check, self.parts.clock.step
        self.controls.knobs.advance(was_limited=was_limited, may_relax=probation.is_at_reference(step))
        was_held = history.remedies is not None and history.remedies.get("reference") is not None
        self.incident_log.update_accepted(step, recovered_after=self._recovered_after, loss_is_off=probation.is_open)
        if not probation.is_open:
            if self.parts.ring.keeps_reference:  # on every rank; what was in force only rank 0 knows after a resume
                self.parts.ring.release_reference()
            if was_held:
                self._write_in_force()

    # One incident.

    def treat(
        self, anomaly: Anomaly, update: Update, refused: Refused | None = None, *, began: float | None = None
    ) -> None:
        """Do what the policy prescribes about the newest update, which began at `began` of the monotonic clock.

        Raises GaveUp where it has nothing left.
        """
        phases, started = Phases(began), time.perf_counter()
        parts, controls, before = self.parts, self.controls, self.parts.clock.step
        anomaly, leap = self.explainer.since_leap(anomaly)
        blamed = parts.updates.first_to_blame(anomaly, update.start), update.stop
        parts.ring.distrust(anomaly.since)
        if anomaly.reached_weights:  # before a diagnosis, in which the process may end
            self.keeper.distrust(anomaly.since)
            self.note_saves()
        parts.updater.usual_norm = parts.checks.usual_norm or parts.updater.usual_norm

        history = self.incident_log.training_incidents
        try:
            reference = parts.checks.rewind_check.reference
            diagnosis, leap = self.explainer.explain(anomaly, update, refused, history, reference, leap)
        except NoMeasure as why:
            log.info("note: %s: what is usual is learned again", why)
            parts.checks.start_over()
            return
        if not anomaly.ranks:  # gradients are on every rank alike once they were averaged: a replay tells more
            anomaly = replace(anomaly, ranks=diagnosis.ranks)
        phases.ended(DIAGNOSE)

        if anomaly.reached_weights and diagnosis.cause is not Cause.CORRUPTION:
            parts.checks.require_recovery(anomaly.since, _reached(anomaly))
        last = history[-1].rewound_to if history else None
        decision = decide(
            *(self.policy, anomaly, diagnosis, history, parts.clock.tick),
            controls.circumstances(anomaly, diagnosis, leap),
            trace=parts.updates.trace(last) if last is not None else 0,
        )
        self._hold(anomaly, diagnosis, decision)
        incident = self.incident_log.open(anomaly, diagnosis, decision, is_off=parts.checks.rewind_check.is_open)
        phases.ended(DECIDE)
        if decision.gave_up is not None:
            self._give_up(incident, phases)

        controls.begin(incident, blamed)
        if not is_mild(decision.actions):
            controls.knobs.trouble()
        for action in decision.actions:
            had_rewound = controls.rewound_to is not None
            remedy(action).apply(controls)
            phases.ended(REMEDY if had_rewound or controls.rewound_to is None else REWIND)
        if controls.rewound_to is not None:
            self.keeper.rewound(controls.rewound_to)
            parts.checks.rewound(controls.rewound_to, anomaly.since, controls.knobs.lr)

        incident = replace(
            incident,
            rewound_to=controls.rewound_to,
            steps_lost=before - parts.clock.step + (refused is not None),
            seconds=time.perf_counter() - started,
            trace=controls.trace,
        )
        phases.extend_last()
        self._write_in_force()  # first: what was treated has its remedies in force
        self.incident_log.record_treatment(incident, phases.timed)

    def _hold(self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision) -> None:
        """Measure the run against where it stood from now on, and keep that state, where damage has to be undone."""
        checks, actions = self.parts.checks, decision.actions
        rewinds = any(action.remedy == "rewind" for action in actions)
        if diagnosis.cause is Cause.CORRUPTION and (rewinds or decision.gave_up):
            if checks.is_only_reported:  # as far as the checks could tell
                checks.rewind_check.end()
            return  # a rewind makes the same updates again, to the last bit
        if anomaly.reached_weights:
            rungs = self.policy.ladder(diagnosis.cause)  # where one of them does more, alarms lead there
            is_all = all(is_mild(rung.do) for rung in rungs)
            is_reported = is_all and bool(actions) and is_mild(actions)
            checks.require_recovery(anomaly.since, _reached(anomaly), is_only_reported=is_reported)
            if checks.rewind_check.is_open:
                self.parts.ring.keep_reference(anomaly.since)

    def _give_up(self, incident: Incident, phases: Phases) -> NoReturn:
        """End the run on its newest verified state, and leave that on disk."""
        self.incident_log.close(incident, phases=phases.timed, ends_run=True)
        earlier = self.incident_log.incidents[:-1]
        path, is_back = self._restore_best(incident.anomaly.since)
        self.parts.checks.rewind_check.end()  # there is nothing left to wait for
        if is_back:
            phases.ended(REWIND)
            self.incident_log.add_phase(incident.id, phases.timed[-1])
        if self.parts.world.is_main:  # every rank comes here, and one knows where the state was written
            log.error("%s", farewell(incident, path, earlier))
        raise GaveUp(f"gave up at step {incident.anomaly.step}: {incident.decision.gave_up}", path)

    def _restore_best(self, since: int) -> tuple[Path | None, bool]:
        """Go back to the best verified state, and leave it on disk; say where, and whether there was one."""
        ring = self.parts.ring
        snapshot = ring.last_good(since) or ring.newest_verified()  # verified in the meantime: at the reference
        if snapshot is None:
            self.note_saves()
            return None, False
        ring.restore(snapshot)
        self.parts.updates.rewound(snapshot.step)  # of what came after it, nothing is left
        left = self.keeper.leave(snapshot)
        self.note_saves()
        return left, True

    # Incidents of the process, not of the training: what is done about them is done already.

    def note(self, found: ProcessIncident, *, began: float | None = None, ongoing: bool = False) -> int:
        """Write one down; return its number. `began`: when the newest update did, on the monotonic clock."""
        phases = Phases(began if found.signal in _IN_UPDATE else None)
        tick = self.parts.clock.tick
        anomaly = Anomaly(found.signal, found.step, tick, found.since, found.evidence, ranks=found.ranks)
        known = by_signal(anomaly)
        diagnosis = replace(known, advice=found.advice or known.advice, rows=found.rows)
        incident = self.incident_log.open(anomaly, diagnosis, Decision((Action(found.remedy),)))
        incident = replace(incident, rewound_to=found.rewound_to, steps_lost=found.steps_lost)
        self.incident_log.record_treatment(incident, phases.timed, ongoing=ongoing)
        return incident.id

    def note_saves(self) -> None:
        """Write down what became of checkpoints: that they fail is one incident, which lasts until one is saved."""
        for failure in self.keeper.save_events():
            if failure is not None:
                self._saving_fails = self.note(failure, ongoing=True)
            elif self._saving_fails is not None:
                self.incident_log.clear_ongoing(self._saving_fails)

    def end_saving(self) -> None:
        """The run is complete: say what became of an incident in which saving failed, if there is one."""
        self.note_saves()
        if self._saving_fails is not None:
            self.incident_log.close_ongoing(self._saving_fails)

    def note_shrunk(self, step: int, evidence: str, ranks: tuple[int, ...] = (), *, began: float | None = None) -> None:
        """Note that updates are made in smaller micro-batches from now on."""
        self.controls.note_micro_batch(self.parts.samples.slicing.batch_size)
        found = ProcessIncident(Signal.OUT_OF_MEMORY, step, step - 1, evidence, "smaller_batch", ranks=ranks)
        self.note(found, began=began)
        self._write_in_force()

    def may_shrink_batches(self) -> bool:
        """Say whether the policy allows for smaller micro-batches once more."""
        met = sum(one.anomaly.signal is Signal.OUT_OF_MEMORY for one in self.incident_log.incidents)
        return met < self.policy.halvings

    def ended(self, *, was_killed: bool = False) -> None:
        """Note that the process ends in order, be it with an error: no samples are to blame for it.

        `was_killed`: another process of the run was, and the record stays as if it had been this one.
        """
        self.incident_log.write_tables()
        if not was_killed:
            self.keeper.progress.turned_to(Doing.ENDED, self.parts.clock.tick)

    def hung(self, evidence: str, *, in_update: bool, began: float | None) -> None:
        """From another thread: write down that the run hangs, and save what can be saved."""
        progress, step = self.keeper.progress, self.parts.clock.step
        progress.turned_to(Doing.HUNG if in_update and progress.is_updating else Doing.ENDED)
        lost, write = self.keeper.rescue()
        self.note(ProcessIncident(Signal.HANG, step + 1, step, evidence, "end", steps_lost=lost), began=began)
        write()

    def leave_newest(self) -> tuple[int, Path | None]:
        """From another thread: leave the newest verified state; return the step a resume begins at, and where it is."""
        left = self.keeper.leave_newest()
        self.note_saves()
        return left

    def ranks_differ(self, digests: Sequence[float], *, began: float | None = None) -> NoReturn:
        """End the run on all ranks, as they did not decide alike: what they would do together now may wait for ever.

        `digests` are those of all ranks with the update in flight: what landed before it, they have made alike. It
        began at `began` of the monotonic clock.
        """
        phases, odd, since = Phases(began), odd_ones(digests), self.parts.clock.step
        others = len(digests) - len(odd)
        how = f"otherwise than the {others:,} others" if others else "differently"
        evidence = f"{rank_names(odd)} decided {how}"
        tick = self.parts.clock.tick
        anomaly = Anomaly(Signal.RANK_MISMATCH, since + 1, tick, since, evidence, ranks=odd)
        incident = self.incident_log.open(anomaly, Diagnosis(Cause.PROCESS, _DIFFER), Decision((Action("end"),)))
        self.parts.ring.distrust(since)
        snapshot = self.parts.ring.last_good(since)

        def leave() -> None:
            self.incident_log.close(incident, Outcome.GAVE_UP, phases.timed, ends_run=True)
            self.keeper.distrust(since)
            if snapshot is not None:
                self.keeper.leave_alone(snapshot)
            self.note_saves()

        self.parts.world.main_before_others(leave)
        raise RanksDiffer(f"{evidence} in update {since + 1}: the run ends before weights drift apart; {_ALIKE_AGAIN}")

    def name_guilty_ranks(self, ranks: tuple[int, ...]) -> None:
        """Name the ranks whose weights were changed, now that the others came to the same ones for a second time."""
        differing = [one for one in self.incident_log.open_incidents if one.anomaly.signal is Signal.RANK_MISMATCH]
        if differing:
            incident = replace(differing[-1], anomaly=replace(differing[-1].anomaly, ranks=ranks))
            self.incident_log.update(incident)
            began_on = rank_names(ranks)
            log.info("incident %d began on %s: the others came to the same weights again", incident.id, began_on)

    # The beginning of a process, and the end of a run.

    def resume(self, *, is_explained: bool) -> bool:
        """Resume from the newest checkpoint that verifies; False where the run begins. Every rank comes here.

        `is_explained`: it is known why the previous process ended, and no samples are to blame.
        """
        parts, controls, history = self.parts, self.controls, self.incident_log.run_history
        plan = parts.world.on_main(
            lambda: self.keeper.resumption.plan(
                self.incident_log.incidents, self.policy.crashes, is_explained=is_explained
            )
        )
        if not parts.world.is_main:
            self.incident_log.adopt(plan.incidents)
        self.keeper.begin(plan)
        try:
            for remedies in plan.remedies:
                controls.load_state_dict(remedies)
        except ValueError as error:
            raise TrainError(f"{plan.path or self.incident_log.directory}: {error}") from error
        parts.clock.tick = max(parts.clock.tick, plan.tick)
        if plan.skipped is not None:
            parts.samples.skip(*plan.skipped)
            history.note_remedies(controls.state_dict())
        for found in plan.found:
            number = self.note(found)
            if found.remedy == "skip" and 0 < len(found.rows) < parts.samples.slicing.samples // 2:
                controls.quarantine_after_crash(found.rows, found.advice, number)  # met twice in different company
        if parts.clock.tick:  # the next samples at work are others: these are not to be blamed twice for one end
            self.keeper.progress.turned_to(Doing.BETWEEN)
        return plan.path is not None

    def finish(self) -> None:
        """The run has come to its end: what is open has recovered where the loss is back, or was never off."""
        is_back = self.is_back()
        self.incident_log.close_all(Outcome.RECOVERED if is_back else Outcome.UNRECOVERED)
        if is_back and self.parts.checks.rewind_check.is_open:
            self.parts.checks.rewind_check.end()
            self._write_in_force()

    def is_back(self) -> bool:
        """Say whether the loss is where it was before the last damage, as far as the losses since tell."""
        probation = self.parts.checks.rewind_check
        return not probation.is_open or probation.ends_back(self.parts.clock.step)

    def has_to_return(self) -> bool:
        """Say whether the run, should it end now, has to end on the state that it is measured against.

        Not where the policy only reports what landed.
        """
        return not self.is_back() and not self.parts.checks.is_only_reported

    def return_unrecovered(self) -> GaveUp:
        """End the run off its reference: back to the newest verified state, which is its result."""
        checks, clock = self.parts.checks, self.parts.clock
        reference = checks.rewind_check.reference
        assert reference is not None
        since = checks.not_recovered_since(clock.step)
        self.incident_log.close_all(Outcome.UNRECOVERED)
        path, is_there = self._restore_best(since)
        checks.rewind_check.end()
        if not is_there:
            return GaveUp("not recovered, and there is no verified state to return to", None)
        why = f"the loss did not come back to {reference.level:.4g}, where it was at step {reference.step:,}"
        return GaveUp(f"not recovered: {why}; the run returned to step {clock.step:,}", path)

    def _write_in_force(self) -> None:
        self.incident_log.run_history.note_remedies(self.controls.state_dict())


def _reached(anomaly: Anomaly) -> int:
    """Where a run had come to: by quiet steps off the reference it has come to nothing."""
    return anomaly.since if anomaly.signal is Signal.NOT_RECOVERED else anomaly.step


_DIFFER = (
    "The ranks did not decide alike: look for code, data or settings that differ from rank to rank, such as another "
    "version of a file on another host, or a state that only some ranks change."
)
_ALIKE_AGAIN = "the same command resumes from the newest verified state"
