"""The patches of a run, as its effects: they last, no rewind undoes them, and a resume patches the lines again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from resilient_train.core.protocols import Effect
from resilient_train.extensions.armor.armor import Armor, CannotArmor, LineChanged, PatchedLine
from resilient_train.ground.secrets import masked_tree
from resilient_train.ground.types import Culprit
from resilient_train.ground.wording import log


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
