"""What remedies have changed in a run, and lasts: one list, in `Controls`. It does not rewind; a resume restores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from resilient_train.core.state import Clock
from resilient_train.data.samples import Samples
from resilient_train.errors import in_one_line, unusable
from resilient_train.numerics.armor import Armor, CannotArmor, LineChanged, PatchedLine
from resilient_train.record.quarantine import Quarantine, Quarantined
from resilient_train.secrets import masked_tree
from resilient_train.types import Culprit, Facts
from resilient_train.wording import log


def _stays(state: Any) -> None:
    """An effect that is not undone: it has a reason of its own."""


@dataclass(frozen=True)
class Effect:
    """One of them. Of a state that is a list the journal notes what was added, so it may have thousands of entries."""

    name: str
    state: Callable[[], Any]  # plain data without secrets: it goes into files
    restore: Callable[[Any], None]  # the state of an earlier process; raises if it is damaged
    undo: Callable[[Any], None] = _stays  # goes back to an earlier state of this process
    agreed: Callable[[], Any] = lambda: None  # what has to be the same on all ranks


class Effects:
    """The list of them, and what the journal knows of it."""

    def __init__(self, clock: Clock, effects: Sequence[Effect]) -> None:
        self._clock, self._effects = clock, effects
        self._noted: dict[str, list[Any]] = {}  # the lists that the journal has from this process

    def state_dict(self) -> dict[str, Any]:
        return {"tick": self._clock.tick, **{effect.name: effect.state() for effect in self._effects}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the effects of an earlier process. Raises ValueError if they are damaged."""
        known = {"tick", *(effect.name for effect in self._effects)}
        if unknown := [name for name in state.keys() - known if state[name]]:
            why = f"{min(unknown)} is in effect in this run, and nothing that is installed here knows it"
            raise unusable("recovery", why)
        try:
            for effect in self._effects:
                if effect.name in state:  # else its entry of the journal was damaged
                    effect.restore(state[effect.name])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the remedies in effect cannot be read: {in_one_line(error)}") from error

    def undo_to(self, state: Mapping[str, Any]) -> None:
        """Undo what can be undone of all that has changed since `state_dict` returned this."""
        for effect in self._effects:
            if effect.name in state:
                effect.undo(state[effect.name])

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Undo at the end what the block has changed."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.undo_to(before)

    def changes(self) -> dict[str, Any]:
        """Return the state for the journal: of lists what was `added` since the last call, unless some was undone."""
        state = self.state_dict()
        lists = {name: one for name, one in state.items() if isinstance(one, list)}
        grown = [name for name, noted in self._noted.items() if lists[name][: len(noted)] == noted]
        added = {name: state.pop(name)[len(self._noted[name]) :] for name in grown}
        self._noted = lists
        return {**state, "added": added}

    def agreed(self) -> list[Any]:
        """Return what has to be the same on all ranks."""
        return [effect.agreed() for effect in self._effects]


def skipped_samples(samples: Samples) -> Effect:
    def restore(state: Any) -> None:
        for start, stop in state if samples.keeps_places else ():
            samples.skip(int(start), int(stop))

    def undo(state: Any) -> None:
        if samples.rows and state != samples.skipped.added:
            samples.skip_only(state)

    skipped = samples.skipped
    return Effect("skipped", lambda: list(skipped.added), restore, undo, lambda: skipped.spans)


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
