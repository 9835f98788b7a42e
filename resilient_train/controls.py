"""What remedies change in a run. These changes do not rewind; a resume restores those that last."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from zlib import crc32

import torch

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.diagnose.state import lost_eps
from resilient_train.errors import TrainError, in_one_line
from resilient_train.numerics.armor import Armor, CannotArmor, LineChanged, PatchedLine
from resilient_train.record.quarantine import Quarantine, Quarantined
from resilient_train.recover.decide import update_digest
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import Case, RunControl, is_mild, remedy
from resilient_train.run_parts import RunParts
from resilient_train.secrets import masked_tree
from resilient_train.state.ring import Snapshot
from resilient_train.trials import Trials
from resilient_train.types import Action, Anomaly, Culprit, Diagnosis, Facts, Incident
from resilient_train.watch.vitals import Leap
from resilient_train.wording import log, say

_EARLY_STEPS = 16  # a failure within so many accepted updates counts as one from the start


class Controls(RunControl):
    """Applies remedies to a run.

    An effect that lasts has to be in `state_dict`, `load_state_dict` and `digest`: else a restart loses it.
    """

    _incident: Incident  # the one that is being treated, and what was done so far
    _suspects: tuple[int, int]  # the samples that it may come from

    def __init__(
        self, parts: RunParts, policy: Policy, quarantined: Quarantine, keeper: CheckpointKeeper, trials: Trials
    ) -> None:
        self._parts, self._policy, self._keeper = parts, policy, keeper
        self.quarantined = quarantined
        self.knobs = Knobs(relax_after=policy.relax_after)
        self.micro_batch = 0  # rows of a micro-batch that fit into memory, where it was made smaller
        self._armor = Armor()
        self.changed_lines: list[PatchedLine] = []  # that an earlier process had patched
        # Lines that were patched, or cannot be: file, line, operation; an empty one is all that a line computes.
        self._handled_lines: set[tuple[str, int, str]] = parts.search.tried if parts.search is not None else set()
        self._decided = 0  # a checksum of what was done about incidents in this process
        self._in_effect: int | None = None  # the same with what is left out and patched; None: it may have changed
        self._unnoted: dict[str, list[Any]] = {"skipped": [], "quarantined": []}  # since the journal's last entry
        self._has_put_back = False  # since then: the next entry has all of them
        self.trials = trials

    def apply(self, incident: Incident, suspects: tuple[int, int], started: float, *, was_refused: bool) -> Incident:
        """Apply the remedies of an incident, which may come from [start, stop) of the samples; return what was done."""
        checks, clock, actions = self._parts.checks, self._parts.clock, incident.decision.actions
        step_before, is_mildly_treated = clock.step, is_mild(actions)
        self._incident = replace(incident, rewound_to=None)
        self._suspects = suspects
        if not is_mildly_treated:
            self.knobs.trouble()
        for action in actions:
            remedy(action).apply(self)
        if (step := self._incident.rewound_to) is not None:
            self._keeper.rewound(step)
            checks.rewound(step, incident.anomaly.since, self.knobs.lr)
        elif incident.anomaly.reached_weights and not is_mildly_treated:
            checks.stayed(clock.step, self.knobs.lr)
        done, self._in_effect = (self._incident.decision, self._incident.rewound_to), None
        self._decided = crc32(repr(done).encode(), self._decided)
        self.note()  # first, so that an incident that was treated has them in effect
        seconds = time.perf_counter() - started
        return replace(self._incident, steps_lost=step_before - clock.step + was_refused, seconds=seconds)

    # The methods that remedies call; see `RunControl`.

    def rewind(self, older: int = 0, steps: int = 0) -> None:
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
        step = parts.clock.step
        self._incident = replace(self._incident, rewound_to=step)
        parts.updates.rewound(step)

    def skip(self, updates: int | None = None) -> None:
        samples, (start, stop) = self._parts.samples, self._suspects
        if updates is not None:
            start = start if self._incident.rewound_to is None else samples.position
            stop = max(stop, start + updates * samples.slicing.samples)
        self.skip_samples(start, stop)

    def skip_samples(self, start: int, stop: int) -> None:
        self._parts.samples.skip(start, stop)
        self._unnoted["skipped"].append([start, stop])

    def quarantine(self) -> None:
        incident, diagnosis = self._incident, self._incident.diagnosis
        reasons = dict.fromkeys(diagnosis.rows, say(diagnosis.advice))
        reasons |= {row: say(why, "; ") for row, why in diagnosis.reasons.items() if row in reasons}
        reasons |= dict.fromkeys(reasons, "bad on purpose: a drill") if incident.drill else {}
        self._quarantine(reasons, incident.anomaly.step, incident.id)

    def reset_moments(self) -> None:
        self._parts.updater.reset_moments()
        self._parts.scans.rebase()

    def patch_line(self) -> None:
        culprit = self._incident.diagnosis.broken
        assert culprit is not None
        where = self._to_patch(culprit)
        self._armor.add(*where)
        self._handled_lines.add(where)
        self._parts.checks.early_divergence.is_over = True  # its first updates are no measure any more

    def lower_loss_scale(self, factor: float) -> None:
        scaler = self._parts.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    def try_arms(self, arms: Sequence[Sequence[Action]], steps: int) -> None:
        (start, stop), each = self._suspects, self._parts.samples.slicing.samples
        best, tried = self.trials.best_of(arms, steps, self.knobs, max(stop - start, 0) + steps * each)
        decision = self._incident.decision
        decision = replace(decision, actions=(*decision.actions, *best))
        self._incident = replace(self._incident, decision=decision, tried=tried or self._incident.tried)
        for action in best:
            remedy(action).apply(self)

    def settings_now(self) -> tuple[Knobs, list[tuple[int, int]]]:
        """Return what `put_back` restores: the knobs, and the samples that are skipped."""
        return copy.copy(self.knobs), list(self._parts.samples.skipped.spans)

    def put_back(self, settings: tuple[Knobs, list[tuple[int, int]]]) -> None:
        """Take back what remedies have changed since. Rows stay in quarantine: each has a reason of its own."""
        knobs, skipped = settings
        self.knobs, self._in_effect, self._has_put_back = copy.copy(knobs), None, True
        if self._parts.samples.rows:
            self._parts.samples.skip_only(list(skipped))

    # What they need to know before.

    def case(self, anomaly: Anomaly, diagnosis: Diagnosis, leap: Leap | None) -> Case:
        """Collect what decides which remedies apply. It is a collective: all ranks call it together."""
        parts = self._parts
        verified, reference = parts.ring.verified_until(anomaly.since), parts.checks.rewind_check.reference
        return Case(
            anomaly,
            diagnosis,
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
            lost_eps=lost_eps(parts.updater.optimizers) is not None and not self.knobs.mends_eps,
            loss_excess=parts.checks.loss_excess(),
            trial_updates=self.trials.left(),
            usual_rate=leap.usual if leap else 0.0,
            leapt_to=leap.usual * leap.factor if leap and leap.is_sudden else 0.0,
        )

    def _can_patch(self, diagnosis: Diagnosis) -> bool:
        """Say whether the guilty line can be patched and was not; looked up only if needed: it visits all objects."""
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        where = self._to_patch(culprit)
        is_used = any(one.remedy == "armor" for rung in self._policy.ladder(diagnosis.cause) for one in rung.do)
        if not is_used or where in self._handled_lines:
            return False
        try:
            self._armor.check(*where)
        except CannotArmor as why:
            self._handled_lines.add(where)
            self._handled_lines.add((culprit.file, culprit.line, ""))
            log.warning("cannot patch `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

    def _to_patch(self, culprit: Culprit) -> tuple[str, int, str]:
        """Return the operation in its line, or if that was patched already all that the line computes."""
        where = culprit.file, culprit.line, culprit.op
        return where if where not in self._handled_lines else (culprit.file, culprit.line, "")

    # What outlives a rewind, and the process.

    def snapshot(self, step: int, *, verified: bool = False) -> Snapshot | None:
        snapshot = self._parts.ring.take(step, verified=verified)
        if snapshot is not None:
            snapshot.checks_state, snapshot.remedies = self._parts.checks_state(), self.state_dict()
        return snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return the remedies in effect as plain data. Secrets are masked: it goes into files."""
        skipped = [list(span) for span in self._parts.samples.skipped.spans]
        return {**self._settings(), "skipped": skipped, "quarantined": [*self.quarantined.rows]}

    def note(self) -> None:
        """Write the same into the journal: of skipped samples and of rows, those that are new."""
        new, self._unnoted = self._unnoted, {"skipped": [], "quarantined": []}
        remedies = {**self.state_dict(), "is_whole": True} if self._has_put_back else {**self._settings(), **new}
        self._has_put_back = False
        self._keeper.incident_log.run_history.note("remedies_in_force", remedies=remedies)

    def _settings(self) -> dict[str, Any]:
        updater = self._parts.updater
        state = {
            "tick": self._parts.clock.tick,
            "knobs": self.knobs.state_dict(),
            "armor": [asdict(patch) for patch in self._armor.lines],
            "micro_batch": self.micro_batch,
            "usual_norm": updater.usual_norm,
            "reference": self._parts.checks.rewind_check.persistent_state(),
            "trial_updates": self.trials.updates,
            "raced_in_vain": self.trials.raced_in_vain,
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
            self.trials.updates = max(self.trials.updates, int(state.get("trial_updates", 0)))
            self.trials.raced_in_vain |= state.get("raced_in_vain") is True
            self.micro_batch = int(state["micro_batch"] or 0)
            updater.usual_norm = float(state["usual_norm"] or 0.0) or None
            rows = {row for row in map(int, state["quarantined"]) if row < samples.rows}  # the data set may be smaller
            if lost := sorted(rows - self.quarantined.rows.keys()):
                why = "quarantine.json was lost; restored from a checkpoint or the journal"
                self._quarantine(dict.fromkeys(lost, why), self._parts.clock.step, 0)
            self._parts.checks.rewind_check.load_persistent_state(state.get("reference"))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the remedies in effect cannot be read: {in_one_line(error)}") from error
        for patch in patches:
            try:
                again = self._armor.add_again(patch)
            except LineChanged:
                if patch not in self.changed_lines:  # the journal and a checkpoint may both have it
                    log.info("%s:%d was changed since: its patch is removed", patch.file, patch.line)
                self.changed_lines.append(patch)
            except CannotArmor as why:
                log.warning("can no longer patch `%s` at %s:%d: %s", patch.op, patch.file, patch.line, why)
            else:
                self._handled_lines.add((again.file, again.line, again.op))

    def _quarantine(self, reasons: Mapping[int, str], step: int, incident: int) -> None:
        self._parts.samples.quarantine(reasons)
        self._unnoted["quarantined"] += reasons
        self.quarantined.adopt({row: Quarantined(why, step, incident) for row, why in reasons.items()})

    def quarantine_after_crash(self, rows: Sequence[int], reason: Facts, incident: int) -> None:
        """Quarantine rows common to the updates in which the process died, if the budget allows."""
        count, listed = self._parts.samples.rows, {*rows} | self.quarantined.rows.keys()
        if len(listed - self.quarantined.given) <= self._policy.budget.rows_of(count) and len(listed) < count:
            self._quarantine(dict.fromkeys(rows, say(reason)), self._parts.clock.step, incident)

    def unpatch(self) -> None:
        """Restore the patched lines of the user's code: another run of this process has to find its own faults."""
        self._armor.remove()

    def digest(self, start: int) -> int:
        """Digest what ranks have to agree on before an update whose samples begin at `start`."""
        parts = self._parts
        if self._in_effect is None:
            patches = [(patch.function, patch.text, patch.count, patch.op) for patch in self._armor.lines]
            in_effect = parts.samples.skipped.spans, sorted(self.quarantined.rows), patches
            self._in_effect = crc32(repr(in_effect).encode(), self._decided)
        step, tick, samples = parts.clock.step, parts.clock.tick, parts.samples.slicing.samples
        return update_digest(self._in_effect, step, tick, start, samples, self.knobs.values)
