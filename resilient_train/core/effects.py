"""What remedies have changed in a run, and lasts: one list, in `Controls`. It does not rewind; a resume restores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from resilient_train.core.protocols import Data
from resilient_train.core.state import Clock
from resilient_train.errors import in_one_line, unusable


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
        self.noted: Mapping[str, Any] = {}  # all that the journal has

    def state_dict(self) -> dict[str, Any]:
        return {"tick": self._clock.tick, **{effect.name: effect.state() for effect in self._effects}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the effects of an earlier process. Raises ValueError if they are damaged."""
        known = {"tick", *(effect.name for effect in self._effects)}
        if unknown := [name for name in state.keys() - known if state[name]]:
            why = f"{min(unknown)} is in effect in this run, and nothing that is installed here knows it"
            raise unusable("recovery", why)
        self.noted = state
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
        self.noted = state = self.state_dict()
        lists = {name: one for name, one in state.items() if isinstance(one, list)}
        grown = [name for name, noted in self._noted.items() if lists[name][: len(noted)] == noted]
        added = {name: lists[name][len(self._noted[name]) :] for name in grown}
        self._noted = lists
        return {**{name: one for name, one in state.items() if name not in added}, "added": added}

    def agreed(self) -> list[Any]:
        """Return what has to be the same on all ranks."""
        return [effect.agreed() for effect in self._effects]


def skipped_samples(samples: Data) -> Effect:
    def restore(state: Any) -> None:
        for start, stop in state if samples.keeps_places else ():
            samples.skip(int(start), int(stop))

    def undo(state: Any) -> None:
        if samples.rows and state != samples.skipped.added:
            samples.skip_only(state)

    skipped = samples.skipped
    return Effect("skipped", lambda: list(skipped.added), restore, undo, lambda: skipped.spans)
