"""What remedies change in a run. These changes do not rewind; a resume restores those that last."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple
from zlib import crc32

import torch

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.diagnose.search import lost_eps
from resilient_train.errors import TrainError, in_one_line
from resilient_train.numerics.armor import Armor, CannotArmor, PatchedLine
from resilient_train.record.incident_log import IncidentLog
from resilient_train.record.quarantine import Quarantine, Quarantined
from resilient_train.recover.decide import decisions_digest, update_digest
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import Circumstances, RunControl, remedy
from resilient_train.recover.trials import JUDGED, best_arm, cost_of, fastest, holds, is_far_lower, may_win
from resilient_train.run_parts import RunParts
from resilient_train.secrets import masked_tree
from resilient_train.state.ring import Snapshot
from resilient_train.trials import Course, Trials, TrialStopped
from resilient_train.types import Action, Anomaly, Diagnosis, Incident, Tried
from resilient_train.watch.vitals import Leap
from resilient_train.wording import counted, log

_LONGEST_RACE = 48  # updates of an arm in a short run
_EARLY_STEPS = 16  # a failure within so many accepted updates counts as one from the start


class Faster(NamedTuple):
    """A lower rate that overtook the run."""

    since: int  # the step from which it did
    cut: Action
    tried: tuple[Tried, ...]


class Controls(RunControl):
    """Applies remedies to a run.

    An effect that lasts has to be in `state_dict`, `load_state_dict` and `digest`: else a restart loses it.
    """

    def __init__(
        self,
        parts: RunParts,
        policy: Policy,
        quarantined: Quarantine,
        keeper: CheckpointKeeper,
        trials: Trials | None = None,
    ) -> None:
        self._parts, self._policy, self._keeper = parts, policy, keeper
        self.quarantined = quarantined
        self.knobs = Knobs(relax_after=policy.relax_after)
        self.micro_batch: int | None = None  # rows of a micro-batch that fit into memory, where it was made smaller
        self._armor = Armor()
        # Lines that were patched, or cannot be: file, line, operation; an empty one is all that a line computes.
        self._tried: set[tuple[str, int, str]] = parts.search.tried if parts.search is not None else set()
        self._incident: Incident | None = None  # the one that is being treated
        self._suspects = (0, 0)  # the samples that it may come from
        self.rewound_to: int | None = None  # the step that its treatment rewound to
        self.trace = 0  # digest of the updates that the rewind undid
        self._decisions_digest: int | None = None  # cached; None after a new decision
        self._settled = (0, 0)  # how many incidents, all but the newest, are in a digest, and this digest
        self._unnoted: dict[str, list[Any]] = {"skipped": [], "quarantined": []}  # since the journal's last entry
        self._trials, self._is_trial = trials, False
        self.tried: tuple[Tried, ...] = ()  # the arms of the trial in its treatment, if there is one, and ...
        self.chosen: tuple[Action, ...] = ()  # ... the remedies of the best
        self.trial_updates = 0  # that were made in trials since the beginning of the run
        self._raced_in_vain = False  # no lower rate did better where the loss stood

    def begin(self, incident: Incident, suspects: tuple[int, int]) -> None:
        """Begin to treat an incident; it may come from the samples at positions [start, stop) of `suspects`."""
        self._incident, self._suspects = incident, suspects
        self.rewound_to, self.trace, self._decisions_digest = None, 0, None
        self.tried, self.chosen = (), ()

    # The methods that remedies call; see `RunControl`.

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        assert self._incident is not None
        parts, anomaly = self._parts, self._incident.anomaly
        with parts.buffers.across_rewind():
            if verified := parts.ring.verified_until(anomaly.since):
                far_enough = [one for one in verified if one.step <= anomaly.step - steps] or verified[-1:]
                snapshot = far_enough[min(older, len(far_enough) - 1)]
                parts.ring.restore(snapshot)
                parts.restore_checks_state(snapshot.checks_state)
            elif self._keeper.restore(anomaly.since):
                parts.ring.clear()
                self.snapshot(parts.clock.step, verified=True)
            else:
                raise TrainError(f"no verified state from before step {anomaly.since + 1} can still be read")
        parts.updater.gate.limit(*parts.checks.limits)  # as they were then, for a trial from here
        self.rewound_to = parts.clock.step
        self.trace = parts.updates.trace(self.rewound_to)
        parts.updates.rewound(self.rewound_to)

    def skip(self, updates: int | None = None) -> None:
        samples, (start, stop) = self._parts.samples, self._suspects
        if updates is not None:
            start = start if self.rewound_to is None else samples.position
            stop = max(stop, start + updates * samples.slicing.samples)
        self.skip_samples(start, stop)

    def skip_samples(self, start: int, stop: int) -> None:
        """Skip these positions of the stream from now on."""
        self._parts.samples.skip(start, stop)
        self._unnoted["skipped"].append([start, stop])

    def quarantine(self) -> None:
        incident = self._incident
        assert incident is not None
        diagnosis, step = incident.diagnosis, incident.anomaly.step
        self._parts.samples.quarantine(diagnosis.rows)
        if self._is_trial:
            return
        self._unnoted["quarantined"] += diagnosis.rows
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        reasons |= dict.fromkeys(reasons, "bad on purpose: a drill") if incident.drill else {}
        self.quarantined.adopt({row: Quarantined(why, step, incident.id) for row, why in reasons.items()})

    def reset_moments(self) -> None:
        self._parts.updater.reset_moments()
        if not self._is_trial:
            self._parts.scans.rebase()

    def patch_line(self) -> None:
        assert self._incident is not None
        culprit = self._incident.diagnosis.broken
        assert culprit is not None
        where = (culprit.file, culprit.line, culprit.op)
        if where in self._tried:  # it broke again there: all that this line computes
            where = (culprit.file, culprit.line, "")
        self._armor.add(*where)
        if not self._is_trial:
            self._note_patched(where)
            self._parts.checks.patched()

    def raise_zero_eps(self) -> None:
        self._parts.updater.mends_eps = True

    def lower_loss_scale(self, factor: float) -> None:
        scaler = self._parts.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    def try_arms(self, arms: Sequence[Sequence[Action]], steps: int) -> None:
        assert self._trials is not None
        assert self._incident is not None
        rows, (start, stop) = self._incident.diagnosis.rows, self._suspects
        widest = max(int(one.settings.get("updates") or 0) for arm in arms for one in arm)
        skipped, best = max(stop - start, 0) + (widest + steps) * self._parts.samples.slicing.samples, 0
        with suppress(TrialStopped), self._course(skipped, rows) as course:
            before, again = course.run((), self, 0), course.run((), self, 0)
            if not before.equals(again):
                log.info("note: nothing is tried: the losses of later updates cannot be reproduced")
                raise TrialStopped
            results = [course.run(arm, self, steps).risen_from(before) for arm in arms]
            best = best_arm(results, steps, self._policy.budget.trial_gain)
            self.tried = tuple(one.tried(won=place == best) for place, one in enumerate(results))
        self.chosen = tuple(arms[best])
        for action in self.chosen:
            remedy(action).apply(self)

    def overtaken(self) -> Faster | None:
        """Return a rate that overtakes the run, if there is one: then the loss has to come below where it is."""
        step, before, check = self._parts.clock.step, self.trial_updates, self._parts.checks.no_progress
        began = time.monotonic()
        found, is_whole = self._race(check.first)
        made = self.trial_updates - before
        check.tried(step, is_tried=made > 0)
        if found is None and is_whole:
            self._raced_in_vain = True
            took = f"{counted(made, 'update')} and {time.monotonic() - began:.2f} s"
            log.info("note: step %d: %s; lower rates were tried from an earlier state", step, check.evidence)
            log.info("  none did better; that took %s, which are not part of the run's", took)
        elif found is not None:
            self._parts.checks.require_recovery(step, step)
            if self._parts.checks.rewind_check.is_open:
                self._parts.ring.keep_reference(step)
        return found

    def _race(self, first: float) -> tuple[Faster | None, bool]:
        """Try lower rates from the oldest verified state: does one overtake the run, with half its updates or fewer?

        Returns it, and whether all was tried that was to be. `first` is the loss that the run began with. Cut at the
        present state, a rate looks better for a while even where it was right; in this comparison it looks worse. The
        winner also has to beat the present rate from that state: some losses grow with training, whatever the rate. If
        it does not by more than age explains, it is made as old as the run, and has to be far below it.
        """
        parts, step = self._parts, self._parts.clock.step
        left, verified = self._updates_left(in_vain=self._raced_in_vain), parts.ring.verified_until(step)
        steps = min(step // 2, max(_LONGEST_RACE, left // 6))  # in a long run all rates may be tried for longer
        each = cost_of(steps, JUDGED)
        if not verified or verified[-1].step > step // 4 or left < 2 * each + cost_of(1, JUDGED):
            return None, False
        since, made = verified[-1], parts.updates.next_after(verified[-1].step)
        recorded = made.loss if made is not None else parts.checks.loss_at(since.step + 1)  # of an earlier process
        if recorded is None:
            return None, False
        with suppress(TrialStopped), self._course(0, (), lifts_limits=True) as course:
            if not course.reproduces(recorded, since, self.knobs):
                log.info("note: no lower rates are tried: the loss of update %d cannot be reproduced", since.step + 1)
                parts.checks.no_progress.stop()
                return None, False
            arms = [course.run((), self, 0)]  # as it is
            rates = [Action("lower_lr", {"factor": rate, "lasting": True}) for rate in self._policy.rates]
            while rates and not fastest(arms) and left - course.cost >= 2 * each and may_win(arms, first):
                arms.append(course.run((rates.pop(0),), self, steps, since=since))
            if not (best := fastest(arms)):
                return None, True
            control = course.run((), self, steps, since=since)
            if is_held := holds(arms[best], control, arms[0], first):
                while rates and left - course.cost >= each:
                    arms.append(course.run((rates.pop(0),), self, steps, since=since))
                refined = fastest(arms)
                best = refined if holds(arms[refined], control, arms[0], first) else best
            elif left - course.cost >= cost_of(step - since.step, JUDGED):
                # The run has risen since it was as old as that: does the lower rate, when it is as old as the run?
                grown = course.run(arms[best].actions, self, step - since.step, since=since)
                is_held, arms[best] = is_far_lower(grown, arms[0]), grown
            if is_held:
                arms.append(replace(control, actions=(Action("rewind"),)))
                tried = tuple(one.tried(won=place == best) for place, one in enumerate(arms))
                return Faster(since.step, arms[best].actions[0], tried), True
            return None, True
        return None, False  # it was stopped

    @contextmanager
    def _course(self, skipped: int, rows: Sequence[int], *, lifts_limits: bool = False) -> Iterator[Course]:
        """Run a trial, and count what it cost, however it ends."""
        assert self._trials is not None
        with self._trials.course(skipped, rows, lifts_limits=lifts_limits) as course:
            try:
                yield course
            finally:
                self.trial_updates += course.cost

    @property
    def tries_rates(self) -> bool:
        """Say whether lower learning rates are tried where the loss stands."""
        return self._trials is not None and bool(self._policy.rates) and not self._policy.observe

    def _updates_left(self, *, in_vain: bool = False) -> int:
        """Return how many updates trials may still make; 0 where none can be made."""
        if self._trials is None:
            return 0
        steps = max(self._trials.planned() or 0, self._parts.clock.step)
        return max(0, self._policy.budget.trial_updates(steps, in_vain=in_vain) - self.trial_updates)

    @contextmanager
    def tentatively(self) -> Iterator[None]:
        """Take back, at the end of the block, what remedies change in it, except for the state; nothing is written."""
        updater, samples = self._parts.updater, self._parts.samples
        knobs, patched, mends, left_out = self.knobs, len(self._armor.lines), updater.mends_eps, samples.left_out()
        unnoted, self._unnoted = self._unnoted, {"skipped": [], "quarantined": []}
        self.knobs, self._is_trial = copy.copy(knobs), True
        try:
            yield
        finally:
            self.knobs, self._is_trial, updater.mends_eps, self._unnoted = knobs, False, mends, unnoted
            if len(self._armor.lines) > patched:
                self._armor.remove(patched)
            samples.leave_out(left_out)

    # What they need to know before.

    def circumstances(self, anomaly: Anomaly, diagnosis: Diagnosis, leap: Leap | None) -> Circumstances:
        """Collect what decides which remedies apply. It is a collective: all ranks call it together."""
        parts = self._parts
        verified, reference = parts.ring.verified_until(anomaly.since), parts.checks.rewind_check.reference
        return Circumstances(
            snapshots=len(verified) or int(self._keeper.has_verified(anomaly.since)),
            # Not after a line was patched: an early failure then does not indicate a wrong learning rate.
            at_start=max(anomaly.since, reference.step if reference else 0) < _EARLY_STEPS
            and [snapshot.step for snapshot in verified] == [0]
            and not self._armor.lines,
            mixed_precision=parts.precision.is_mixed,
            loss_scaler=parts.updater.scaler is not None,
            rows=parts.samples.rows,
            quarantined=len(self.quarantined.rows) - len(self.quarantined.given),
            given=len(self.quarantined.given),
            armor=not anomaly.landed and all(parts.world.all_of(self._can_patch(diagnosis))),
            share=self.knobs.values.share,
            sgd=all(isinstance(one, torch.optim.SGD) for one in parts.updater.optimizers),
            lost_eps=lost_eps(parts.updater.optimizers) is not None and not parts.updater.mends_eps,
            loss_excess=parts.checks.loss_excess(),
            trial_updates=self._updates_left(),
            usual_rate=leap.usual if leap else 0.0,
            leapt_to=leap.usual * leap.factor if leap and leap.is_sudden else 0.0,
        )

    def _can_patch(self, diagnosis: Diagnosis) -> bool:
        """Say whether the guilty line can be patched and was not tried before.

        Looked up only where the policy may use it, since that takes a pass over all objects.
        """
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        where = (culprit.file, culprit.line, culprit.op)
        is_used = any(one.remedy == "armor" for rung in self._policy.ladder(diagnosis.cause) for one in rung.do)
        if where in self._tried:
            where = (culprit.file, culprit.line, "")
        if not is_used or where in self._tried:
            return False
        try:
            self._armor.check(*where)
        except CannotArmor as why:
            self._tried.add(where)
            self._tried.add((culprit.file, culprit.line, ""))
            log.warning("cannot patch `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

    # What outlives a rewind, and the process.

    def snapshot(self, step: int, *, verified: bool = False) -> Snapshot | None:
        """Take a snapshot, with the state of the checks and the remedies in effect."""
        snapshot = self._parts.ring.take(step, verified=verified)
        if snapshot is not None:
            snapshot.checks_state, snapshot.remedies = self._parts.checks_state(), self.state_dict()
        return snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return the remedies in effect as plain data. Secrets are masked: it goes into files."""
        skipped = [list(span) for span in self._parts.samples.skipped.spans]
        return {**self._settings(), "skipped": skipped, "quarantined": [*self.quarantined.rows]}

    def to_note(self) -> dict[str, Any]:
        """Return the same for the journal: of skipped samples and of rows, those that the last call did not return."""
        new, self._unnoted = self._unnoted, {"skipped": [], "quarantined": []}
        return {**self._settings(), **new}

    def _settings(self) -> dict[str, Any]:
        updater = self._parts.updater
        state = {
            "tick": self._parts.clock.tick,
            "knobs": self.knobs.state_dict(),
            "armor": [asdict(patch) for patch in self._armor.lines],  # recognizes its line also when it is masked
            "armored": sorted(map(list, self._tried)),
            "mends_eps": updater.mends_eps,
            "micro_batch": self.micro_batch,
            "usual_norm": updater.usual_norm,
            "reference": self._parts.checks.rewind_check.persistent_state(),
            "trial_updates": self.trial_updates,
            "raced_in_vain": self._raced_in_vain,
        }
        return masked_tree(state)  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the remedies that were in effect in an earlier process. Raises ValueError where it is damaged."""
        samples, updater = self._parts.samples, self._parts.updater
        try:
            self.knobs.load_state_dict(state["knobs"])
            for start, stop in state["skipped"] if samples.keeps_places else ():
                samples.skip(int(start), int(stop))
            patches = [PatchedLine(**patch) for patch in state["armor"]]
            self._tried |= {(str(file), int(line), str(op)) for file, line, op in state["armored"]}
            usual, micro = state["usual_norm"], state["micro_batch"]
            self.trial_updates = max(self.trial_updates, int(state.get("trial_updates", 0)))
            self._raced_in_vain |= state.get("raced_in_vain") is True
            self.micro_batch = None if micro is None else int(micro)
            updater.mends_eps = state["mends_eps"] is True
            updater.usual_norm = None if usual is None else float(usual)
            rows = {row for row in map(int, state["quarantined"]) if row < samples.rows}  # the data set may be smaller
            if lost := sorted(rows - self.quarantined.rows.keys()):
                self._quarantine_rows(lost, "quarantine.json was lost; restored from a checkpoint or the journal", 0)
            self._parts.checks.rewind_check.load_persistent_state(state.get("reference"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the remedies in effect cannot be read: {in_one_line(error)}") from error
        for patch in patches:
            try:
                again = self._armor.add_again(patch)
            except CannotArmor as why:
                log.warning("can no longer patch `%s` at %s:%d: %s", patch.op, patch.file, patch.line, why)
            else:
                self._note_patched((again.file, again.line, again.op))

    def _note_patched(self, where: tuple[str, int, str]) -> None:
        self._tried.add(where)
        if self._parts.search is not None:
            self._parts.search.armored.add(where)

    def _quarantine_rows(self, rows: Sequence[int], reason: str, incident: int) -> None:
        self._parts.samples.quarantine(rows)
        self._unnoted["quarantined"] += rows
        self.quarantined.add(rows, reason, self._parts.clock.step, incident)

    def quarantine_after_crash(self, rows: Sequence[int], reason: str, incident: int) -> None:
        """Quarantine rows common to the updates in which the process died, if the budget allows."""
        count, listed = self._parts.samples.rows, {*rows} | self.quarantined.rows.keys()
        if len(listed - self.quarantined.given) <= self._policy.budget.rows_of(count) and len(listed) < count:
            self._quarantine_rows(rows, reason, incident)

    def note_micro_batch(self, rows: int) -> None:
        """Note how many rows of a micro-batch fit into memory."""
        self.micro_batch = rows

    def unpatch(self) -> None:
        """Restore the patched lines of the user's code: another run of this process has to find its own faults."""
        self._armor.remove()

    def digest(self, start: int, incidents: IncidentLog) -> int:
        """Digest the decisions on which ranks have to agree before an update whose samples begin at `start`."""
        parts = self._parts
        if self._decisions_digest is None:  # they change with an incident only
            made, (count, settled) = incidents.training_incidents, self._settled
            settled = decisions_digest(made[count:-1], settled)
            self._settled = max(0, len(made) - 1), settled  # what is done about the newest may still be added
            in_effect = {
                "skipped": parts.samples.skipped.digest,
                "quarantined": self.quarantined.digest,
                "armor": [(patch.function, patch.text, patch.count, patch.op) for patch in self._armor.lines],
                "mends_eps": parts.updater.mends_eps,
            }
            decisions = decisions_digest(made[-1:], settled)
            self._decisions_digest = crc32(json.dumps(in_effect, sort_keys=True).encode(), decisions)
        step, tick, samples = parts.clock.step, parts.clock.tick, parts.samples.slicing.samples
        return update_digest(self._decisions_digest, step, tick, start, samples, self.knobs.values)
