"""Effects of remedies that are more than a number: rows in quarantine, patched lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from resilient_train.core.effects import Effect
from resilient_train.data.samples import Samples
from resilient_train.numerics.armor import Armor, CannotArmor, LineChanged, PatchedLine
from resilient_train.record.quarantine import Quarantine, Quarantined
from resilient_train.secrets import masked_tree
from resilient_train.types import Culprit, Facts
from resilient_train.wording import log


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


class Patches(Armor):
    """Patched lines of the user's code."""

    def __init__(self, handled: set[tuple[str, int, str]]) -> None:
        """`handled`: lines that were patched, or cannot be: file, line, operation; an empty one is all of the line."""
        super().__init__()
        self._handled = handled
        self.has_dropped = False  # patches of an earlier process whose lines were changed since

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

    def _restore(self, state: Any) -> None:
        for patch in [PatchedLine(**patch) for patch in state]:
            try:
                self.add_again(patch)
            except LineChanged:
                log.info("%s:%d was changed since: its patch is removed", patch.file, patch.line)
                self.has_dropped = True
            except CannotArmor as why:
                log.warning("can no longer patch `%s` at %s:%d: %s", patch.op, patch.file, patch.line, why)
