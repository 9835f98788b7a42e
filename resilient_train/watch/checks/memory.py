"""What a check has seen, as plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar


class Remembers:
    """Gives away what it has seen as plain data, and takes it back; the two share nothing that could change."""

    remembered: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        values = ((name, getattr(self, name)) for name in self.remembered)
        return {name: list(value) if isinstance(value, deque | list) else value for name, value in values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.remembered:
            held = getattr(self, name)
            if isinstance(held, deque | list):
                held.clear()
                held.extend(state[name])
            else:
                setattr(self, name, state[name])
