"""Steps that a loop takes by itself, past the gate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from resilient_train.errors import TrainError


class Turn:
    """Whose turn it is: while the loop has a batch in hand, nobody but the guard may step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Make a step that the loop takes by itself, past the gate, an error."""
        self._is_loops = False
        for optimizer in optimizers:
            optimizer.step = self._watched(optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def of_loop(self) -> Iterator[None]:
        """It is the loop's."""
        with self._being(True):
            yield

    @contextmanager
    def of_guard(self) -> Iterator[None]:
        """It is the guard's, for as long as this lasts."""
        with self._being(False):
            yield

    @contextmanager
    def _being(self, is_loops: bool) -> Iterator[None]:
        before, self._is_loops = self._is_loops, is_loops
        try:
            yield
        finally:
            self._is_loops = before

    def _watched(self, step: Any) -> Any:
        plain = getattr(step, "plain", step)  # an earlier guard's watch is replaced

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_loops:
                raise TrainError(
                    "the loop stepped an optimizer itself, past the gate: remove optimizer.step(), "
                    "guard.step and guard.update do it"
                )
            return plain(*args, **kwargs)

        watched.plain = plain  # type: ignore[attr-defined]
        return watched
