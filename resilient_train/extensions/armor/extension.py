"""The line of an operation that breaks is patched for the rest of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from resilient_train.core.controls import Controls
from resilient_train.core.protocols import Computed, OnError
from resilient_train.core.remedies import Case, Remedy
from resilient_train.core.transaction import Transaction
from resilient_train.extensions import Extension
from resilient_train.extensions.armor.armor import is_patched
from resilient_train.extensions.armor.domains import has_value
from resilient_train.extensions.armor.patches import Patches
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.types import Diagnosis, Incident
from resilient_train.parts.code_lines import Line, line_of
from resilient_train.parts.run import Run


@dataclass(frozen=True)
class PatchOperation(Remedy):
    """Patch the operation that broke, in its own line only, for the rest of the run; healthy elements stay as is."""

    order = 130

    def applies(self, case: Case) -> bool:
        return bool(case.facts["armor"])

    def apply(self, run: Controls) -> None:
        run.extension(PatchedLines).patch(run.incident)


class PatchedLines(Extension, OnError):
    remedies = MappingProxyType({"armor": PatchOperation})

    def build(self, run: Run) -> None:
        self._run, self.patches, run.is_patched = run, Patches(run.handled_lines), is_patched
        self._examined: dict[tuple[Line | None, int], int] = {}  # by line and rewinds before: the first tick
        run.effects.append(self.patches.effect())
        run.on_error.append(self)

    def facts(self, diagnosis: Diagnosis, since: int, has_landed: bool) -> Mapping[str, Any]:
        can_patch = not has_landed and all(self._run.world.all_of(self._can_patch(diagnosis)))
        # After a line was patched an early failure does not indicate a wrong learning rate.
        return {"armor": can_patch, **({"at_start": False} if self.patches.lines else {})}

    def patch(self, incident: Incident) -> None:
        culprit = incident.diagnosis.broken
        assert culprit is not None
        self.patches.add(*self.patches.target(culprit))

    def _can_patch(self, diagnosis: Diagnosis) -> bool:
        """Say whether the line can be patched and was not; looked up only if a rung of the cause would."""
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        ladder = self._run.policy.ladder(diagnosis.cause)
        return any(one.remedy == "armor" for rung in ladder for one in rung.do) and self.patches.can_add(culprit)

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Computed | None:
        """Where every batch raises, refuse the update if a patch may help, and was not tried there already since the
        last rewind. Not with other ranks, which wait in its collectives, nor with a loss scaler, for its gradients.
        """
        begun, run = open_updates[-1], self._run
        found = line_of(error, {})
        first = self._examined.setdefault((found.line, run.updates.rewinds), begun.tick)
        is_new = begun.tick <= first + 1  # the verdict on an update comes after the next one
        is_plain = run.world.size == 1 and run.updater.scaler is None
        if not (is_plain and is_new and (has_value(error) or found.of_distribution)):
            return None
        if run.policy.observe or not any(run.policy.ladders.values()):
            return None
        begun.raised.append(in_one_line(error))
        for weight in run.updater.weights:
            weight.grad = torch.zeros_like(weight)
        return torch.full((), math.nan, device=run.world.device), {}

    def close(self) -> None:
        self.patches.remove()
