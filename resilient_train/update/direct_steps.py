"""What a loop does by itself, past the guard: it steps an optimizer, or scales losses."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from resilient_train.errors import TrainError
from resilient_train.wording import log


class DirectStepCheck:
    """Notices steps past the gate: while the loop has a batch in hand they are an error, later a warning."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_loops: bool | None = None  # None: it is neither the loop's nor the guard's
        self._is_over = self._has_warned = False
        for optimizer in optimizers:
            optimizer.step = self._watched(optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def of_loop(self) -> Iterator[None]:
        """The loop has a batch in hand."""
        with self._being(True):
            yield

    @contextmanager
    def of_guard(self) -> Iterator[None]:
        """The guard is at work, for as long as this lasts."""
        with self._being(False):
            yield

    def end(self) -> None:
        """The guard is closed: whoever steps now does so on purpose."""
        self._is_over = True

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
            if self._is_loops is None and not (self._is_over or self._has_warned):
                self._has_warned = True
                log.warning("%s", _UNPROTECTED)
            return plain(*args, **kwargs)

        watched.plain = plain  # type: ignore[attr-defined]
        return watched


def warn_of_scalers(ours: GradScaler | None) -> None:
    """Warn where a loss scaler is at work that the guard does not know. A pass over all objects: call it once."""
    found = (one for one in gc.get_objects() if issubclass(type(one), GradScaler) and one is not ours)
    if any(one.is_enabled() and one._scale is not None for one in found):
        log.warning("%s", _SCALED)


_SCALED = (
    "a GradScaler of the program is at work: if it scales this loop's loss, the guard sees gradients many times too "
    "large; remove it, Accelerator(mixed_precision='fp16') has one that the guard knows"
)
_UNPROTECTED = (
    "optimizer.step() was called outside of guard.batches(): such updates are not protected, and a rewind does not "
    "know of them"
)
