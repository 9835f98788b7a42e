"""The line of an operation that breaks is patched for the rest of the run."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from resilient_train.core.controls import Controls
from resilient_train.core.protocols import Computed, Effect, OnError
from resilient_train.core.remedies import Case, Remedy
from resilient_train.core.transaction import Transaction
from resilient_train.extensions import Extension
from resilient_train.extensions.armor.armor import Armor, CannotArmor, LineChanged, PatchedLine, is_patched
from resilient_train.extensions.armor.domains import has_value
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Culprit, Diagnosis, Incident
from resilient_train.ground.wording import IN_FILE_ONLY, log
from resilient_train.parts.code_lines import Line, line_of
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_lost_device


class Patches(Armor):
    """Those of one run: each line is tried once, by one operation and then as a whole, and resumes find them again."""

    def __init__(self, handled: set[tuple[str, int, str]]) -> None:
        """`handled`: lines that were patched, or cannot be: file, line, operation; an empty one is all of the line."""
        super().__init__()
        self._handled = handled

    def add(self, file: str, line: int, op: str) -> PatchedLine:
        patched = super().add(file, line, op)
        self._handled.add((file, line, op))
        return patched

    def can_add(self, culprit: Culprit) -> bool:
        """Say whether the line of a culprit can be patched and was not. That is slow: it visits all objects."""
        where = self.target(culprit)
        if where in self._handled:
            return False
        try:
            self.check(*where)
        except CannotArmor as why:
            self._handled |= {where, (culprit.file, culprit.line, "")}
            log.warning("cannot patch `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

    def target(self, culprit: Culprit) -> tuple[str, int, str]:
        """Return the operation in its line, or if that was patched already all that the line computes."""
        where = culprit.file, culprit.line, culprit.op
        return where if where not in self._handled else (culprit.file, culprit.line, "")

    def effect(self) -> Effect:
        def state() -> Any:
            return masked_tree([asdict(patch) for patch in self.lines])

        def agreed() -> Any:  # not the paths: each host may have its own
            return [(patch.function, patch.text, patch.count, patch.op) for patch in self.lines]

        return Effect("armor", state, self._restore, agreed=agreed)

    def _restore(self, state: Any) -> bool:
        """Patch the lines of an earlier process; return whether one was changed since."""
        has_dropped = False
        for patch in [PatchedLine(**patch) for patch in state]:
            try:
                self.add_again(patch)
            except LineChanged:
                log.info("%s:%d was changed since: its patch is removed", patch.file, patch.line)
                has_dropped = True
            except CannotArmor as why:
                log.warning("can no longer patch `%s` at %s:%d: %s", patch.op, patch.file, patch.line, why)
        return has_dropped


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
        self._logged: set[str] = set()
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
        if not (is_plain and is_new and (has_value(error) or found.of_distribution)) or is_lost_device(error):
            return None
        if run.policy.observe or not any(run.policy.ladders.values()):
            return None
        begun.raised.append(text := in_one_line(error))
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", "".join(traceback.format_exception(error)), extra=IN_FILE_ONLY)
        for weight in run.updater.weights:
            weight.grad = torch.zeros_like(weight)
        return torch.full((), math.nan, device=run.world.device), {}

    def close(self) -> None:
        self.patches.remove()
