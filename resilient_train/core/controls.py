"""What remedies change in a run, and what has to be known to choose them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from struct import pack
from typing import Any
from zlib import crc32

import torch

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.core.knobs import Knobs
from resilient_train.core.parts import RunParts
from resilient_train.core.policy import Policy
from resilient_train.core.remedies import Case, RunControl, is_mild, remedy
from resilient_train.core.ring import Snapshot
from resilient_train.core.vitals import Leap
from resilient_train.diagnose.explain import lost_eps
from resilient_train.effects import Effect, Effects, Patches, QuarantinedRows, skipped_samples
from resilient_train.errors import TrainError
from resilient_train.record.quarantine import Quarantine
from resilient_train.trials import Trials
from resilient_train.types import Action, Anomaly, Diagnosis, Facts, Incident, fact

_EARLY_STEPS = 16  # a failure within so many accepted updates counts as one from the start


class Controls(RunControl):
    """Applies remedies to a run. What of that lasts is in its list of effects."""

    _incident: Incident  # the one that is being treated, and what was done so far
    _suspects: tuple[int, int]  # the samples that it may come from

    def __init__(
        self, parts: RunParts, policy: Policy, quarantined: Quarantine, keeper: CheckpointKeeper, trials: Trials
    ) -> None:
        self._parts, self._policy, self._keeper, self.trials = parts, policy, keeper, trials
        self.knobs = knobs = Knobs(relax_after=policy.relax_after)
        self.micro_batch = 0  # rows of a micro-batch that fit into memory, where it was made smaller
        self.quarantined, self._rows = quarantined, QuarantinedRows(parts.samples, quarantined)
        self.patches = Patches(parts.search.tried if parts.search is not None else set())
        updater, reference = parts.updater, parts.checks.episode

        def set_micro_batch(rows: Any) -> None:
            self.micro_batch = int(rows)

        def set_usual_norm(norm: Any) -> None:
            updater.usual_norm = float(norm or 0.0) or None

        self.effects = Effects(
            parts.clock,
            [
                Effect("knobs", knobs.state_dict, knobs.load_state_dict, undo=knobs.load_state_dict),
                skipped_samples(parts.samples),
                self._rows.effect(),
                self.patches.effect(),
                Effect("micro_batch", lambda: self.micro_batch, set_micro_batch),
                Effect("usual_norm", lambda: updater.usual_norm, set_usual_norm),
                Effect("reference", reference.persistent_state, reference.load_persistent_state),
                Effect("trials", trials.state_dict, trials.load_state_dict),
            ],
        )

    def apply(self, incident: Incident, suspects: tuple[int, int], started: float, *, was_refused: bool) -> Incident:
        """Apply the remedies of an incident, which may come from [start, stop) of the samples; return what was done.

        Whoever calls this notes it: then the journal has an incident as treated at once with the effects.
        """
        checks, clock, actions = self._parts.checks, self._parts.clock, incident.decision.actions
        step_before, is_mildly_treated = clock.step, is_mild(actions)
        self._incident, self._suspects = replace(incident, rewound_to=None), suspects
        if not is_mildly_treated:
            self.knobs.trouble()
        self._apply(actions)
        treated = self._incident
        if treated.rewound_to is not None:
            self._keeper.rewound(treated.rewound_to)
            checks.rewound(treated.rewound_to, incident.anomaly.since, self.knobs.lr)
        elif incident.anomaly.reached_weights and not is_mildly_treated:
            checks.stayed(clock.step, self.knobs.lr)
        seconds = time.perf_counter() - started
        return replace(treated, steps_lost=step_before - clock.step + was_refused, seconds=seconds)

    def _apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            remedy(action).apply(self)

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
        samples.skip(start, stop)

    def quarantine(self) -> None:
        incident, diagnosis = self._incident, self._incident.diagnosis
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        reasons |= dict.fromkeys(reasons, fact("drilled_row")) if incident.drill else {}
        self._rows.add(reasons, incident.anomaly.step, incident.id)

    def reset_moments(self) -> None:
        self._parts.updater.reset_moments()
        self._parts.scans.rebase()

    def patch_line(self) -> None:
        culprit = self._incident.diagnosis.broken
        assert culprit is not None
        self.patches.add(*self.patches.target(culprit))
        self._parts.checks.early_divergence.is_over = True  # its first updates are no measure any more

    def lower_loss_scale(self, factor: float) -> None:
        scaler = self._parts.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    def try_arms(self, arms: Sequence[Sequence[Action]], steps: int) -> None:
        (start, stop), each = self._suspects, self._parts.samples.slicing.samples
        best, tried = self.trials.best_of(arms, steps, self, max(stop - start, 0) + steps * each)
        decision = self._incident.decision
        decision = replace(decision, actions=(*decision.actions, *best))
        self._incident = replace(self._incident, decision=decision, tried=tried or self._incident.tried)
        self._apply(best)

    # What they need to know before.

    def case(self, anomaly: Anomaly, diagnosis: Diagnosis, leap: Leap | None) -> Case:
        """Collect what decides which remedies apply. It is a collective: all ranks call it together."""
        parts = self._parts
        verified, reference = parts.ring.verified_until(anomaly.since), parts.checks.episode.reference
        return Case(
            anomaly,
            diagnosis,
            began=self._keeper.progress.first or 0,
            snapshots=len(verified) or int(self._keeper.has_verified(anomaly.since)),
            # Not after a line was patched: an early failure then does not indicate a wrong learning rate.
            at_start=max(anomaly.since, reference.step if reference else 0) < _EARLY_STEPS
            and [snapshot.step for snapshot in verified] == [0]
            and not self.patches.lines,
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
        """Say whether the guilty line can be patched and was not; looked up only if a rung of the cause would."""
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        is_used = any(one.remedy == "armor" for rung in self._policy.ladder(diagnosis.cause) for one in rung.do)
        return is_used and self.patches.can_add(culprit)

    # What outlives a rewind, and the process.

    def snapshot(self, step: int, *, verified: bool = False) -> Snapshot | None:
        snapshot = self._parts.ring.take(step, verified=verified)
        if snapshot is not None:
            snapshot.checks_state, snapshot.effects = self._parts.checks_state(), self.effects.state_dict()
        return snapshot

    def note(self, write: Callable[..., object] | None = None) -> None:
        """Write into the journal which effects have changed: in one entry with an incident, if `write` writes that."""
        write = write or partial(self._keeper.incident_log.run_history.note, "effects_changed")
        write(effects=self.effects.changes())
        self.quarantined.write()

    def quarantine_after_crash(self, rows: Sequence[int], reason: Facts, incident: int) -> None:
        """Quarantine rows common to the updates in which the process died, if the budget allows."""
        count, listed = self._parts.samples.rows, {*rows} | self.quarantined.rows.keys()
        if len(listed - self.quarantined.given) <= self._policy.budget.rows_of(count) and len(listed) < count:
            self._rows.add(dict.fromkeys(rows, reason), self._parts.clock.step, incident)

    def digest(self) -> int:
        """Digest what ranks have to agree on. Knobs as float32, as their last digit may differ between machines."""
        clock, samples, knobs = self._parts.clock, self._parts.samples, self.knobs.values
        place = clock.step, clock.tick, samples.position, samples.slicing.samples
        more = self.effects.agreed(), self._parts.updater.rates()
        return crc32(repr(more).encode(), crc32(pack(f"<4q{len(knobs)}f", *place, *knobs)))
