"""All that remedies may do to a run, and all that decides which of them apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.core.controls import Controls
from resilient_train.core.effects import Effect
from resilient_train.core.policy import Policy
from resilient_train.core.remedies import Case
from resilient_train.diagnose.explain import lost_eps
from resilient_train.effects import Patches, QuarantinedRows
from resilient_train.record.quarantine import Quarantine
from resilient_train.run_parts import RunParts
from resilient_train.trials import Trials
from resilient_train.types import Action, Anomaly, Diagnosis, Facts, fact

_EARLY_STEPS = 16  # a failure within so many accepted updates counts as one from the start


class AllControls(Controls):
    """Adds quarantine, patched lines, trials, the loss scale and the size of micro-batches."""

    def __init__(
        self,
        parts: RunParts,
        policy: Policy,
        quarantined: Quarantine,
        keeper: CheckpointKeeper,
        trials: Trials,
    ) -> None:
        self._run, self._keeper, self.trials = parts, keeper, trials
        self.micro_batch = 0  # rows of a micro-batch that fit into memory, where it was made smaller
        self.quarantined, self._rows = quarantined, QuarantinedRows(parts.samples, quarantined)
        self.patches = Patches(parts.search.tried if parts.search is not None else set())

        def set_micro_batch(rows: Any) -> None:
            self.micro_batch = int(rows)

        more = [
            self._rows.effect(),
            self.patches.effect(),
            Effect("micro_batch", lambda: self.micro_batch, set_micro_batch),
            Effect("trials", trials.state_dict, trials.load_state_dict),
        ]
        super().__init__(parts, policy, keeper, keeper.incident_log, more)

    def note(self, write: Callable[..., object] | None = None) -> None:
        super().note(write)
        self.quarantined.write()

    def quarantine(self) -> None:
        incident, diagnosis = self._incident, self._incident.diagnosis
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        reasons |= dict.fromkeys(reasons, fact("drilled_row")) if incident.drill else {}
        self._rows.add(reasons, incident.anomaly.step, incident.id)

    def patch_line(self) -> None:
        culprit = self._incident.diagnosis.broken
        assert culprit is not None
        self.patches.add(*self.patches.target(culprit))
        self._run.panel.early_divergence.is_over = True  # its first updates are no measure any more

    def lower_loss_scale(self, factor: float) -> None:
        scaler = self._run.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    def try_arms(self, arms: Sequence[Sequence[Action]], steps: int) -> None:
        (start, stop), each = self._suspects, self._parts.samples.slicing.samples
        best, tried = self.trials.best_of(arms, steps, self, max(stop - start, 0) + steps * each)
        decision = self._incident.decision
        decision = replace(decision, actions=(*decision.actions, *best))
        self._incident = replace(self._incident, decision=decision, tried=tried or self._incident.tried)
        self._apply(best)

    def case(self, anomaly: Anomaly, diagnosis: Diagnosis) -> Case:
        parts = self._run
        verified, reference = parts.ring.verified_until(anomaly.since), parts.checks.episode.reference
        return replace(
            super().case(anomaly, diagnosis),
            began=self._keeper.progress.first or 0,
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
            trial_updates=self.trials.left(),
        )

    def _can_patch(self, diagnosis: Diagnosis) -> bool:
        """Say whether the guilty line can be patched and was not; looked up only if a rung of the cause would."""
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        is_used = any(one.remedy == "armor" for rung in self._policy.ladder(diagnosis.cause) for one in rung.do)
        return is_used and self.patches.can_add(culprit)

    def quarantine_after_crash(self, rows: Sequence[int], reason: Facts, incident: int) -> None:
        """Quarantine rows common to the updates in which the process died, if the budget allows."""
        count, listed = self._parts.samples.rows, {*rows} | self.quarantined.rows.keys()
        if len(listed - self.quarantined.given) <= self._policy.budget.rows_of(count) and len(listed) < count:
            self._rows.add(dict.fromkeys(rows, reason), self._parts.clock.step, incident)
