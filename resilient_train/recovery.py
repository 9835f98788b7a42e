"""What is done about an incident, from its first sign to the update that the run goes on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from resilient_train.data.samples import Update
from resilient_train.diagnose.damage import lost_eps
from resilient_train.diagnose.explain import Explainer, NoMeasure
from resilient_train.diagnose.search import Refused
from resilient_train.errors import GaveUp, RanksDiffer, TrainError, in_one_line
from resilient_train.numerics.armor import Armor, CannotArmor, PatchedLine
from resilient_train.passed import Leap, PassedUpdates
from resilient_train.ranks.world import odd_ones
from resilient_train.record.drills import made_by
from resilient_train.record.incidents import IncidentBook, describe, describe_outcome, farewell
from resilient_train.record.quarantine import Quarantine
from resilient_train.record.surroundings import DECIDE, DIAGNOSE, REMEDY, REWIND, Phases, Surroundings
from resilient_train.recover.causes import by_signal
from resilient_train.recover.decide import decide, decisions_digest, update_digest
from resilient_train.recover.history import History
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import PatchOperation, RunFacts, passes_over, remedy
from resilient_train.secrets import masked_tree
from resilient_train.state.ring import Held
from resilient_train.types import Action, Anomaly, Cause, Decision, Diagnosis, Incident, Outcome, Signal, Vitals
from resilient_train.ward import OnDisk, Ward
from resilient_train.watch.reference import Standing
from resilient_train.wording import log, rank_names

_BEGINNING = 16  # accepted updates: what breaks so soon was wrong from the start
_IN_UPDATE = (Signal.HANG, Signal.OUT_OF_MEMORY)  # of the process, and met while an update was made


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that happened to the process, the disk or the files of a run, and what was done about it."""

    signal: Signal
    step: int
    since: int
    evidence: str
    remedy: str
    advice: str = ""
    rows: tuple[int, ...] = ()
    rewound_to: int | None = None
    steps_lost: int = 0
    ranks: tuple[int, ...] = ()


class Treatment:
    """Diagnoses, decides, acts, and writes down each of it. To the remedies it is the patient."""

    def __init__(
        self, ward: Ward, policy: Policy, book: IncidentBook, quarantined: Quarantine, *, recovered_after: int
    ) -> None:
        self.ward, self.policy, self.book, self.quarantined = ward, policy, book, quarantined
        self.knobs = Knobs(relax_after=policy.relax_after)
        self.history = History(book.incidents, recovered_after=recovered_after)
        self.passed = PassedUpdates()
        self.explainer = Explainer(
            *(ward.world, ward.samples, ward.state, ward.ring, ward.updater.optimizers),
            *(self.passed, ward.search, ward.beat),
        )
        self.surroundings = Surroundings(book.directory, book.incidents)
        self.update_began: float | None = None  # the newest update, on the monotonic clock
        self._anomaly: Anomaly | None = None
        self._diagnosis: Diagnosis | None = None
        self._armor = Armor()
        self._armored: set[tuple[str, int, str]] = set()  # by file, line and operation; also where it could not be
        self._blamed = (0, 0)
        self.on_disk: OnDisk | None = None
        self.ends_with: Callable[[TrainError], None] = lambda error: None  # told before it is raised
        self.micro_batch: int | None = None  # rows that memory was found to have room for
        self._rewound: int | None = None
        self._trace = 0  # of the updates that the rewind has taken back
        self._decisions: int | None = None  # their digest; None since something was decided

    def digest(self, start: int) -> int:
        """Digest all that ranks have to have decided alike for an update whose samples begin at `start`."""
        if self._decisions is None:
            in_force = {
                "skipped": self.ward.samples.passed_over(),
                "quarantined": sorted(self.quarantined.rows),
                "armor": [(plate.function, plate.text, plate.count, plate.op) for plate in self._armor.lines],
                "mends_eps": self.ward.updater.mends_eps,
            }
            self._decisions = decisions_digest(self.history.incidents, in_force)
        clock, samples = self.ward.clock, self.ward.slicing.samples
        return update_digest(self._decisions, clock.step, clock.tick, start, samples, self.knobs.values)

    def heard(self, vitals: Vitals) -> None:
        """Note an update that was attempted, in case it is to blame for something later."""
        self.passed.add(vitals)
        self.surroundings.heard(vitals)

    def healthy(self, *, was_limited: bool) -> None:
        """Note that an update landed without trouble, with a rate that a limit held below what the schedule asks."""
        panel = self.ward.panel
        may_relax = panel.rewind_check.allows_proof(self.ward.clock.step)
        self.knobs.advance(was_limited=was_limited, may_relax=may_relax)
        self.book.went_on()
        was_held = self.book.remedies is not None and self.book.remedies.get("reference") is not None
        is_held = panel.rewind_check.is_open
        self._close(self.history.accepted(self.ward.clock.step, is_held=is_held), self.history.recovered_after)
        if was_held and not is_held:
            self.ward.ring.unpin()
            self.book.in_force(self.remedies())

    def treat(
        self, anomaly: Anomaly, update: Update, refused: Refused | None = None, *, began: float | None = None
    ) -> None:
        """Do what the policy prescribes about the newest update, which began at `began` of the monotonic clock.

        Raises GaveUp where it has nothing left.
        """
        phases = Phases(began)
        started, before, ward = time.perf_counter(), self.ward.clock.step, self.ward
        self._decisions = None
        anomaly, leap = self.explainer.since_leap(anomaly)
        self._anomaly = anomaly
        self._rewound, self._trace = None, 0
        self._blamed = self.passed.first_to_blame(anomaly, update.start), update.stop
        ward.ring.distrust(anomaly.since)
        if self.on_disk is not None and anomaly.is_in_weights:  # before a diagnosis, in which the process may end
            self.on_disk.distrust(anomaly.since)
        ward.updater.usual_norm = ward.panel.usual_norm or ward.updater.usual_norm
        try:
            reference = ward.panel.rewind_check.reference
            diagnosis, leap = self.explainer.explain(
                anomaly, update, refused, self.history.of_training, reference, leap
            )
        except NoMeasure as why:
            log.info("note: %s: what is usual is learned again", why)
            ward.panel.start_over()
            return
        self._diagnosis = diagnosis
        if not anomaly.ranks:  # gradients are on every rank alike once they were averaged: a replay tells more
            self._anomaly = anomaly = replace(anomaly, ranks=diagnosis.ranks)
        phases.ended(DIAGNOSE)
        if anomaly.is_in_weights and diagnosis.cause is not Cause.CORRUPTION:
            ward.panel.hold(anomaly.since, reached(anomaly))
        history = self.history.of_training
        last = history[-1].rewound_to if history else None
        decision = decide(
            *(self.policy, anomaly, diagnosis, history, ward.clock.tick),
            self._applicable(anomaly, diagnosis, leap),
            trace=self.passed.trace(last) if last is not None else 0,
        )
        self._hold(anomaly, diagnosis, decision)
        is_off = ward.panel.rewind_check.is_open
        incident, closed = self._open(anomaly, diagnosis, decision, is_off=is_off)
        self._close(closed)
        self.book.opened(incident)
        phases.ended(DECIDE)
        if decision.gave_up is not None:
            self._give_up(incident, phases)
        if not passes_over(decision.actions):
            self.knobs.trouble()
        for action in decision.actions:
            had_rewound = self._rewound is not None
            remedy(action).apply(self)
            phases.ended(REMEDY if had_rewound or self._rewound is None else REWIND)
        if self.on_disk is not None and self._rewound is not None:
            self.on_disk.rewound(self._rewound)
        if self._rewound is not None:
            ward.panel.rewound(self._rewound, anomaly.since, self.knobs.lr)
        incident = replace(
            incident,
            rewound_to=self._rewound,
            steps_lost=before - ward.clock.step + (refused is not None),
            seconds=time.perf_counter() - started,
            trace=self._trace,
        )
        phases.lasted()
        self.history.treated(incident)
        self.book.in_force(self.remedies())  # first: what was treated has its remedies in force
        self.book.treated(incident, phases.timed)
        self.surroundings.treated(incident)
        log.warning("%s", describe(incident))

    def _open(
        self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision, *, is_off: bool = False
    ) -> tuple[Incident, list[Incident]]:
        """Add an incident to the history; of what was made on purpose there is nothing to advise."""
        drill = made_by(self.book.struck, anomaly, diagnosis, self.history.incidents)
        diagnosis = replace(diagnosis, advice="") if drill else diagnosis
        return self.history.open(anomaly, diagnosis, decision, is_off=is_off, drill=drill)

    def _hold(self, anomaly: Anomaly, diagnosis: Diagnosis, decision: Decision) -> None:
        """Measure the run against where it stood from now on, and keep that state, where damage has to be undone."""
        panel, actions = self.ward.panel, decision.actions
        rewinds = any(action.remedy == "rewind" for action in actions)
        if diagnosis.cause is Cause.CORRUPTION and (rewinds or decision.gave_up):
            if panel.is_only_reported:  # as far as the checks could tell
                panel.rewind_check.end()
            return  # a rewind makes the same updates again, to the last bit
        if anomaly.is_in_weights:
            rungs = self.policy.ladder(diagnosis.cause)  # where one of them does more, alarms lead there
            is_all = all(passes_over(one.action for one in rung.do) for rung in rungs)
            is_reported = is_all and bool(actions) and passes_over(actions)
            panel.hold(anomaly.since, reached(anomaly), is_only_reported=is_reported)
            if panel.rewind_check.is_open:
                self.ward.ring.pin(anomaly.since)

    def ranks_differ(self, digests: Sequence[float], *, began: float | None = None) -> NoReturn:
        """End the run on all ranks, as they did not decide alike: what they would do together now may wait for ever.

        `digests` are those of all ranks with the update in flight: what landed before it, they have made alike. It
        began at `began` of the monotonic clock.
        """
        phases = Phases(began)
        ward, odd = self.ward, odd_ones(digests)
        step, since = ward.clock.step + 1, ward.clock.step
        others = len(digests) - len(odd)
        evidence = f"{rank_names(odd)} decided " + (
            f"otherwise than the {others:,} others" if others else "differently"
        )
        anomaly = Anomaly(Signal.RANK_MISMATCH, step, ward.clock.tick, since, evidence, ranks=odd)
        incident, _ = self._open(anomaly, Diagnosis(Cause.PROCESS, _DIFFER), Decision((Action("end"),)))
        self.book.opened(incident)
        incident = self.history.ended(incident.id)
        ward.ring.distrust(since)
        held = ward.ring.last_good(since)

        def leave() -> None:
            self.book.closed(incident, phases.timed)
            self.surroundings.treated(incident)
            if self.on_disk is not None:
                self.on_disk.distrust(since)
                if held is not None:
                    self.on_disk.leave_alone(held)

        ward.world.main_before_others(leave)
        error = RanksDiffer(f"{evidence} in update {step}: the run ends before weights drift apart; {_ALIKE_AGAIN}")
        self.ends_with(error)
        raise error

    def convict(self, ranks: tuple[int, ...]) -> None:
        """Name the ranks whose weights were changed, now that the others came to the same ones for a second time."""
        open_ones = (one for one in reversed(self.history.incidents) if one.outcome is None)
        incident = next((one for one in open_ones if one.anomaly.signal is Signal.RANK_MISMATCH), None)
        if incident is not None:
            incident = replace(incident, anomaly=replace(incident.anomaly, ranks=ranks))
            self.history.treated(incident)
            self.book.treated(incident)
            log.info(
                "incident %d began on %s: the others came to the same weights again", incident.id, rank_names(ranks)
            )

    def over(self, number: int) -> None:
        """Take note that an incident does not last any more: from now on healthy updates count."""
        self.history.lasting.discard(number)

    def end_lasting(self, number: int) -> None:
        """The run is complete: what still lasts is not got over."""
        self._close(self.history.end_lasting(number))

    def note(self, trouble: Trouble, *, lasts: bool = False) -> int:
        """Write down an incident of the process, not of the training: what is done about it is done already."""
        tick = self.ward.clock.tick
        phases = Phases(self.update_began if trouble.signal in _IN_UPDATE else None)
        anomaly = Anomaly(trouble.signal, trouble.step, tick, trouble.since, trouble.evidence, ranks=trouble.ranks)
        known = by_signal(anomaly)
        diagnosis = replace(known, advice=trouble.advice or known.advice, rows=trouble.rows)
        incident, closed = self._open(anomaly, diagnosis, Decision((Action(trouble.remedy),)))
        self._close(closed)
        self.book.opened(incident)
        incident = replace(incident, rewound_to=trouble.rewound_to, steps_lost=trouble.steps_lost)
        self.history.treated(incident)
        self.book.treated(incident, phases.timed)
        self.surroundings.treated(incident)
        if lasts:
            self.history.lasting.add(incident.id)
        log.warning("%s", describe(incident))
        return incident.id

    # What outlives the process.

    def remedies(self) -> dict[str, Any]:
        """What is in force now, as plain data: it does not rewind, and a resume takes it up."""
        in_force = {
            "tick": self.ward.clock.tick,
            "knobs": self.knobs.state_dict(),
            "skipped": [list(span) for span in self.ward.samples.passed_over()],
            "quarantined": sorted(self.quarantined.rows),
            "armor": [asdict(plate) for plate in self._armor.lines],
            "armored": sorted(map(list, self._armored)),
            "mends_eps": self.ward.updater.mends_eps,
            "micro_batch": self.micro_batch,
            "usual_norm": self.ward.updater.usual_norm,
            "reference": self.ward.panel.rewind_check.memory(),
        }
        return masked_tree(in_force)  # type: ignore[no-any-return]  # it goes into files: armor knows a masked line again

    def know(self, incidents: Iterable[Incident]) -> None:
        """Take up the history that rank 0 has read from its journal: all ranks decide by the same one."""
        self._decisions = None
        if not self.ward.world.is_main:
            self.history = History(incidents, recovered_after=self.history.recovered_after)

    def take_up(self, remedies: Mapping[str, Any]) -> None:
        """Put in force what was before the process ended. Raises ValueError where these are no remedies."""
        self._decisions = None
        try:
            self.knobs.load_state_dict(remedies["knobs"])
            for start, stop in remedies["skipped"]:
                self.ward.samples.skip(int(start), int(stop))
            plates = [PatchedLine(**plate) for plate in remedies["armor"]]
            self._armored |= {(str(file), int(line), str(op)) for file, line, op in remedies["armored"]}
            usual, micro = remedies["usual_norm"], remedies["micro_batch"]
            self.micro_batch = None if micro is None else int(micro)
            self.ward.updater.mends_eps = remedies["mends_eps"] is True
            self.ward.updater.usual_norm = None if usual is None else float(usual)
            self._recall_rows(frozenset(map(int, remedies["quarantined"])))
            self.ward.panel.rewind_check.recall(remedies.get("reference"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the remedies in force cannot be read: {in_one_line(error)}") from error
        for plate in plates:
            self._wear(plate)

    @staticmethod
    def try_knobs(remedies: Mapping[str, Any]) -> None:
        """Raise ValueError where no run has such knobs; nothing is put in force."""
        try:
            Knobs().load_state_dict(remedies["knobs"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(in_one_line(error)) from error

    def _recall_rows(self, rows: frozenset[int]) -> None:
        """Keep rows in quarantine whose list is lost or damaged."""
        known = {row for row in rows if row < self.ward.samples.rows}  # there may be fewer than there were
        if lost := sorted(known - self.quarantined.rows.keys()):
            self.ward.samples.quarantine(lost)
            self.quarantined.add(lost, "its list was lost; a checkpoint or the journal had it", self.ward.clock.step, 0)

    def put_away(self, rows: Sequence[int], reason: str) -> None:
        """Put rows in quarantine that end the process, wherever they come, as far as the budget allows."""
        self._decisions = None
        allowed = self.policy.budget.rows_of(self.ward.samples.rows)
        if len({*rows} | self.quarantined.rows.keys()) <= allowed:
            self.ward.samples.quarantine(rows)
            self.quarantined.add(rows, reason, self.ward.clock.step, self.history.incidents[-1].id)

    def may_slim(self) -> bool:
        """Say whether the policy allows for smaller micro-batches once more."""
        met = sum(one.anomaly.signal is Signal.OUT_OF_MEMORY for one in self.history.incidents)
        return met < self.policy.halvings

    def slimmed(self, step: int, evidence: str, ranks: tuple[int, ...] = ()) -> None:
        """Note that updates are made in smaller micro-batches from now on."""
        self.micro_batch = self.ward.slicing.batch_size
        self.note(Trouble(Signal.OUT_OF_MEMORY, step, step - 1, evidence, "smaller_batch", ranks=ranks))
        self.book.in_force(self.remedies())

    def skip_samples(self, start: int, stop: int) -> None:
        """Pass over samples that ended the process."""
        self._decisions = None
        self.ward.samples.skip(start, stop)
        self.book.in_force(self.remedies())

    def _wear(self, plate: PatchedLine) -> None:
        try:
            worn = self._armor.add_again(plate)
        except CannotArmor as why:
            log.warning("no armor around `%s` at %s:%d any more: %s", plate.op, plate.file, plate.line, why)
            return
        where = (worn.file, worn.line, worn.op)
        self._armored.add(where)
        if self.ward.search is not None:
            self.ward.search.armored.add(where)

    def disarm(self) -> None:
        """Give the user's code back as it was: another run of this process is to find its own faults."""
        self._armor.remove()

    def finish(self) -> None:
        """The run has come to its end: what is open has recovered where the loss is back, or none was to come back."""
        is_back = self.is_back()
        self._close(self.history.finish(Outcome.RECOVERED if is_back else Outcome.UNRECOVERED))
        if is_back and self.ward.panel.rewind_check.is_open:
            self.ward.panel.rewind_check.end()
            self.book.in_force(self.remedies())

    def is_back(self) -> bool:
        """Say whether the loss is where it was before the last damage, as far as the losses since tell."""
        check = self.ward.panel.rewind_check
        return not check.is_open or check.final(self.ward.clock.step) is Standing.BACK

    def has_to_return(self) -> bool:
        """Say whether the run, should it end now, has to end on the state that it is measured against.

        Not where the policy only reports what landed.
        """
        return not self.is_back() and not self.ward.panel.is_only_reported

    def return_unrecovered(self) -> GaveUp:
        """End the run off its reference: back to the newest proven state, which is its result."""
        reference = self.ward.panel.rewind_check.reference
        assert reference is not None
        since = self.ward.panel.not_recovered_since(self.ward.clock.step)
        self._close(self.history.finish(Outcome.UNRECOVERED))
        path, is_there = self._restore_best(since)
        self.ward.panel.rewind_check.end()
        if not is_there:
            return GaveUp("not recovered, and there is no proven state to return to", None)
        why = f"the loss did not come back to {reference.level:.4g}, where it was at step {reference.step:,}"
        return GaveUp(f"not recovered: {why}; the run returned to step {self.ward.clock.step:,}", path)

    def _restore_best(self, since: int) -> tuple[Path | None, bool]:
        """Go back to the best proven state, and leave it on disk; say where, and whether there was one."""
        ward = self.ward
        held = ward.ring.last_good(since) or ward.ring.newest_proven()  # proven in the meantime: at the reference
        if held is None:
            return None, False
        ward.ring.restore(held)
        self.passed.rewound(held.step)  # of what came after it, nothing is left
        return (self.on_disk.leave(held) if self.on_disk is not None else None), True

    # What remedies may do.

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        """Go back to a proven state: the newest one, an older one, or one at least `steps` back."""
        assert self._anomaly is not None
        proven = self.ward.ring.proven(self._anomaly.since)
        if not proven:
            step = self.on_disk.restore(self._anomaly.since) if self.on_disk is not None else None
            if step is None:
                raise TrainError(f"no proven state of before step {self._anomaly.since + 1} can be read any more")
            self._arrived(step)
            return
        far_enough = [held for held in proven if held.step <= self._anomaly.step - steps] or proven[-1:]
        held = far_enough[min(older, len(far_enough) - 1)]
        self.ward.ring.restore(held)
        self.ward.panel.load_state_dict(held.statistics["panel"])
        self.ward.scans.load_state_dict(held.statistics["scans"])
        self._arrived(held.step)

    def _arrived(self, step: int) -> None:
        """Take note of where a rewind has led."""
        self._trace = self.passed.trace(step)
        self.passed.rewound(step)
        self._rewound = step

    def skip(self, updates: int | None = None) -> None:
        """Pass over the samples to blame, or over as many updates' worth from where the run stands now."""
        start, stop = self._blamed
        if updates is not None:
            start = start if self._rewound is None else self.ward.samples.position
            stop = max(stop, start + updates * self.ward.slicing.samples)
        self.ward.samples.skip(start, stop)

    def reset_moments(self) -> None:
        """Let the optimizers begin anew."""
        self.ward.updater.reset_moments()
        self.ward.scans.rebase()

    def quarantine(self) -> None:
        """Take the guilty rows out of the data."""
        assert self._diagnosis is not None
        assert self._anomaly is not None
        rows = self._diagnosis.rows
        self.ward.samples.quarantine(rows)
        why = "bad on purpose: a drill" if self.history.incidents[-1].drill else self._diagnosis.advice
        self.quarantined.add(rows, why, self._anomaly.step, self.history.incidents[-1].id)

    def armor(self) -> None:
        """Put armor around the guilty operation, for the rest of the run."""
        assert self._diagnosis is not None
        culprit = self._diagnosis.broken
        assert culprit is not None
        where = (culprit.file, culprit.line, culprit.op)
        self._armored.add(where)
        self._armor.add(*where)
        self.ward.panel.armored()
        if self.ward.search is not None:
            self.ward.search.armored.add(where)

    def mend_eps(self) -> None:
        """Raise an epsilon that is lost in its type to what the type can hold, for the rest of the run."""
        self.ward.updater.mends_eps = True

    def lower_loss_scale(self, factor: float) -> None:
        """Scale the loss by less from now on."""
        scaler = self.ward.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    # How it is done.

    def _applicable(self, anomaly: Anomaly, diagnosis: Diagnosis, leap: Leap | None) -> RunFacts:
        ward = self.ward
        proven, reference = ward.ring.proven(anomaly.since), ward.panel.rewind_check.reference
        return RunFacts(
            snapshots=self._snapshots(proven, anomaly.since),
            # Where armor makes values up, what is out of range at the beginning tells nothing about the rate.
            at_start=max(anomaly.since, reference.step if reference else 0) < _BEGINNING
            and [held.step for held in proven] == [0]
            and not self._armor.lines,
            mixed_precision=ward.precision.is_mixed,
            loss_scaler=ward.updater.scaler is not None,
            rows=ward.samples.rows,
            quarantined=len(self.quarantined.rows) - self.quarantined.given,
            armor=not anomaly.landed and all(ward.world.all_of(self._can_be_armored(diagnosis))),
            lost_eps=lost_eps(ward.updater.optimizers) is not None and not ward.updater.mends_eps,
            off=ward.panel.off(),
            usual_rate=leap.usual if leap else 0.0,
            leapt_to=leap.usual * leap.factor if leap and leap.is_sudden else 0.0,
        )

    def _snapshots(self, proven: Sequence[Held], since: int) -> int:
        """How many proven states are in reach; those on disk only where there are none in memory."""
        return len(proven) or int(self.on_disk is not None and self.on_disk.has_proven(since))

    def _can_be_armored(self, diagnosis: Diagnosis) -> bool:
        """Say whether it fits, unless it was tried before: what does not help once does not help twice.

        Only where the policy could put it on: to look for a line takes a pass over all objects.
        """
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.mendable:
            return False
        rungs = self.policy.ladder(diagnosis.cause)
        if all(one.action.remedy != PatchOperation.name for rung in rungs for one in rung.do):
            return False
        where = (culprit.file, culprit.line, culprit.op)
        if where in self._armored:
            return False
        try:
            self._armor.check(*where)
        except CannotArmor as why:
            self._armored.add(where)
            log.warning("no armor around `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

    def _give_up(self, incident: Incident, phases: Phases) -> NoReturn:
        """End the run on its newest proven state, and leave that on disk."""
        ward, book = self.ward, self.book
        book.closed(incident, phases.timed)
        self.surroundings.treated(incident)
        path, is_back = self._restore_best(incident.anomaly.since)
        ward.panel.rewind_check.end()  # there is nothing left to wait for
        if is_back:
            phases.ended(REWIND)
            book.came_after(incident.id, phases.timed[-1])
        if ward.world.is_main:  # every rank comes here, and one knows where the state was written
            log.error("%s", farewell(incident, path, self.history.incidents[:-1]))
        error = GaveUp(f"gave up at step {incident.anomaly.step}: {incident.decision.gave_up}", path)
        self.ends_with(error)
        raise error

    def _close(self, incidents: Iterable[Incident], healthy_steps: int | None = None) -> None:
        for incident in incidents:
            self.book.closed(incident)
            self.surroundings.closed(incident)
            if incident.outcome is Outcome.RECOVERED:  # what recurs is told by the incident that it recurs in
                log.info("%s", describe_outcome(incident, healthy_steps))


def reached(anomaly: Anomaly) -> int:
    """Where a run had come to: by quiet steps off the reference it has come to nothing."""
    return anomaly.since if anomaly.signal is Signal.NOT_RECOVERED else anomaly.step


_DIFFER = (
    "The ranks did not decide alike: look for code, data or settings that differ from rank to rank, such as another "
    "version of a file on another host, or a state that only some ranks change."
)
_ALIKE_AGAIN = "the same command goes on from the newest proven state"
