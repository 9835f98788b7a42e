"""The line of an operation that breaks is patched for the rest of the run."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from resilient_train.core.controls import Controls
from resilient_train.core.protocols import Effect
from resilient_train.core.remedies import Case, Remedy
from resilient_train.extensions import Extension
from resilient_train.extensions.armor import armor
from resilient_train.extensions.armor.ast_patch import CannotArmor
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Culprit, Diagnosis, Incident
from resilient_train.ground.wording import log
from resilient_train.parts.run import Run


@dataclass(frozen=True)
class PatchOperation(Remedy):
    """Patch the operation that broke, in its own line only, for the rest of the run; healthy elements stay as is."""

    order = 130

    def applies(self, case: Case) -> bool:
        return bool(case.facts["armor"])

    def apply(self, run: Controls) -> None:
        run.extension(PatchedLines).patch(run.incident)


class PatchedLines(Extension):
    """Each line is tried once, by one operation and then as a whole, and resumes find it again if it is as it was."""

    remedies = MappingProxyType({"armor": PatchOperation})

    def build(self, run: Run) -> None:
        self._run = run
        self._handled = run.handled_lines  # that were patched, or cannot be: file, line, operation; "": all of the line
        run.is_patched = armor.is_patched
        run.effects.append(Effect("armor", self._state, self._restore, agreed=self._agreed))

    def facts(self, diagnosis: Diagnosis, since: int, has_landed: bool) -> Mapping[str, Any]:
        can_patch = not has_landed and all(self._run.world.all_of(self._can_patch(diagnosis)))
        # After a line was patched an early failure does not indicate a wrong learning rate.
        has_patched = any((one.file, one.line, one.op) in self._handled for one in armor.PATCHED)  # not an earlier run
        return {"armor": can_patch, **({"at_start": False} if has_patched else {})}

    def patch(self, incident: Incident) -> None:
        culprit = incident.diagnosis.broken
        assert culprit is not None
        self._add(culprit.file, culprit.line, self._op(culprit))

    def _add(self, file: str, line: int, op: str) -> None:
        armor.add(file, line, op)
        self._handled.add((file, line, op))

    def _op(self, culprit: Culprit) -> str:
        """Return the operation of a culprit, or if that was patched already "": all that its line computes."""
        return culprit.op if (culprit.file, culprit.line, culprit.op) not in self._handled else ""

    def _can_patch(self, diagnosis: Diagnosis) -> bool:
        """Say whether the line can be patched and was not; looked up only if a rung of the cause would, as that visits
        all objects.
        """
        culprit = diagnosis.broken
        if culprit is None or not culprit.line or not diagnosis.patchable:
            return False
        ladder = self._run.policy.ladder(diagnosis.cause)
        where = culprit.file, culprit.line, self._op(culprit)
        if where in self._handled or not any(one.remedy == "armor" for rung in ladder for one in rung.do):
            return False
        try:
            armor.check(*where)
        except CannotArmor as why:
            self._handled |= {where, (culprit.file, culprit.line, "")}
            log.warning("cannot patch `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

    def _state(self) -> Any:
        return masked_tree([asdict(patched) for patched in armor.PATCHED])

    def _agreed(self) -> Any:  # not the paths: each host may have its own
        return [(patched.line, patched.text, patched.op) for patched in armor.PATCHED]

    def _restore(self, state: Any) -> bool:
        """Patch the lines of an earlier process; return whether one was changed since."""
        has_dropped = False
        for file, line, text, op in [(one["file"], int(one["line"]), one["text"], one["op"]) for one in state]:
            linecache.checkcache(file)
            if linecache.getline(file, line).strip() != text:
                log.info("%s:%d was changed since: its patch is removed", file, line)
                has_dropped = True
                continue
            try:
                self._add(file, line, op)
            except CannotArmor as why:
                log.warning("can no longer patch `%s` at %s:%d: %s", op, file, line, why)
        return has_dropped

    def close(self) -> None:
        armor.remove()
