"""All that remedies may do to a run, and all that decides which of them apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from resilient_train.core.controls import Controls, Effect
from resilient_train.core.policy import Policy
from resilient_train.data.samples import Samples
from resilient_train.durable.keeper import CheckpointKeeper
from resilient_train.extensions.armor.patches import Patches
from resilient_train.extensions.diagnosis.explain import lost_eps
from resilient_train.extensions.lasting import LastingRemedies, built_state, forget_moments
from resilient_train.extensions.quarantine import Quarantine, Quarantined
from resilient_train.extensions.remedies import FullCase
from resilient_train.extensions.run_parts import RunParts
from resilient_train.extensions.trials import Trials
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Action, Diagnosis, Facts

_EARLY_STEPS = 16  # a failure within so many accepted updates counts as one from the start


class AllControls(Controls):
    """Adds quarantine, patched lines, trials, the loss scale, what lasts, and the moments."""

    case_type = FullCase

    def __init__(
        self,
        parts: RunParts,
        policy: Policy,
        quarantined: Quarantine,
        keeper: CheckpointKeeper,
        trials: Trials,
        lasting: LastingRemedies,
        *more: Effect,
    ) -> None:
        self.lasting, self._run, self._keeper, self.trials = lasting, parts, keeper, trials
        self.quarantined, self._rows = quarantined, QuarantinedRows(parts.samples, quarantined)
        self._built = {optimizer: built_state(optimizer) for optimizer in parts.updater.optimizers}
        self.patches = Patches(parts.search.tried if parts.search is not None else set())
        effects = [
            _skipped_samples(parts.samples),
            self._rows.effect(),
            self.patches.effect(),
            Effect("trials", trials.state_dict, trials.load_state_dict),
            lasting.effect(),
            *more,
        ]
        super().__init__(parts, policy, keeper, keeper.incident_log, effects)

    def note(self, write: Callable[..., object] | None = None) -> None:
        super().note(write)
        self.quarantined.write()

    # What further remedies call.

    def reset_moments(self) -> None:
        forget_moments(self._built)
        self._run.scans.rebase()

    def quarantine(self) -> None:
        """Replace the guilty rows for the rest of the run; unless samples are skipped, in this update too."""
        incident, diagnosis = self._incident, self._incident.diagnosis
        reasons = {row: diagnosis.reasons.get(row, diagnosis.advice) for row in diagnosis.rows}
        self._rows.add(reasons, incident.anomaly.step, incident.id)

    def patch_line(self) -> None:
        """Patch the line of the operation that broke, for the rest of the run."""
        culprit = self._incident.diagnosis.broken
        assert culprit is not None
        self.patches.add(*self.patches.target(culprit))

    def lower_loss_scale(self, factor: float) -> None:
        scaler = self._run.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    def try_arms(self, arms: Sequence[Sequence[Action]], steps: int) -> None:
        """Make `steps` updates with each of several remedies, on the same samples, and apply those that did best."""
        (start, stop), each = self._suspects, self._parts.samples.slicing.samples
        best, tried = self.trials.best_of(arms, steps, self, max(stop - start, 0) + steps * each)
        decision = self._incident.decision
        decision = replace(decision, actions=(*decision.actions, *best))
        self._incident = replace(self._incident, decision=decision, tried=tried or self._incident.tried)
        self._apply(best)

    def known(self, diagnosis: Diagnosis, since: int, has_landed: bool) -> dict[str, Any]:
        parts, optimizers = self._run, self._run.updater.optimizers
        verified, reference = parts.ring.verified_until(since), parts.checks.episode.reference
        is_early = max(since, reference.step if reference else 0) < _EARLY_STEPS
        return super().known(diagnosis, since, has_landed) | {
            "began": self._keeper.progress.first or 0,
            # Not after a line was patched: an early failure then does not indicate a wrong learning rate.
            "at_start": is_early and [snapshot.step for snapshot in verified] == [0] and not self.patches.lines,
            "loss_scaler": parts.updater.scaler is not None,
            "rows": parts.samples.rows,
            "quarantined": len(self.quarantined.rows),
            "armor": not has_landed and all(parts.world.all_of(self._can_patch(diagnosis))),
            "share": self.lasting.share_now,
            "own_rates": any(group["lr"] is None for group in parts.updater.groups()),
            "sgd": all(isinstance(one, torch.optim.SGD) for one in optimizers),
            "lost_eps": lost_eps(optimizers) is not None and not self.lasting.mends_eps,
            "trial_updates": self.trials.left(),
        }

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
        if len(listed) <= min(self._policy.budget.rows_of(count), count - 1):
            self._rows.add(dict.fromkeys(rows, reason), self._parts.clock.step, incident)


@dataclass(frozen=True)
class QuarantinedRows:
    """Rows that others stand in for, each with why, at which step and by which incident."""

    samples: Samples
    quarantine: Quarantine

    def add(self, reasons: Mapping[int, Facts], step: int, incident: int) -> None:
        """Take rows out of the data. They are listed in quarantine.json once the journal has them."""
        self.samples.quarantine(reasons)
        masked = {row: tuple(masked_tree([*why])) for row, why in reasons.items()}
        self.quarantine.add({row: Quarantined(why, step, incident) for row, why in masked.items()})

    def effect(self) -> Effect:
        rows = self.quarantine.rows

        def state() -> list[list[Any]]:
            return [[row, [*why.reason], why.step, why.incident] for row, why in rows.items()]

        return Effect("quarantined", state, self._restore, agreed=lambda: sorted(rows))

    def _restore(self, state: Any) -> None:
        """Rows that quarantine.json lost are listed there again; of the others it has the reasons in words only."""
        there = range(self.samples.rows)  # the data set may be smaller now
        for row, reason, step, incident in state:
            if (listed := int(row)) in there:
                self.add({listed: tuple(reason)}, int(step), int(incident))
                self.quarantine.rows[listed] = Quarantined(tuple(reason), int(step), int(incident))
        self.quarantine.write()


def _skipped_samples(samples: Samples) -> Effect:
    def restore(state: Any) -> None:
        for start, stop in state if samples.keeps_places else ():
            samples.skip(int(start), int(stop))

    def undo(state: Any) -> None:
        if samples.rows and state != samples.skipped.added:
            samples.skip_only(state)

    skipped = samples.skipped
    return Effect("skipped", lambda: list(skipped.added), restore, undo, lambda: skipped.spans)
