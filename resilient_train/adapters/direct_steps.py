"""Optimizer steps that a loop makes itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch.optim import Optimizer

from resilient_train.errors import TrainError
from resilient_train.wording import log


class DirectStepCheck:
    """Notices optimizer steps outside of the guard: an error while the loop has a batch, else one warning."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._running: Literal["loop", "guard"] | None = None
        self.is_over = False  # the guard is closed: steps after it are on purpose; or one was warned of
        for optimizer in optimizers:
            optimizer.step = self._watched(optimizer, optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def running(self, who: Literal["loop", "guard"]) -> Iterator[None]:
        before, self._running = self._running, who
        try:
            yield
        finally:
            self._running = before

    def _watched(self, optimizer: Any, step: Any) -> Any:
        plain = getattr(step, "plain", step)  # without the wrapper of an earlier guard

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._running == "loop":
                raise TrainError(
                    "the loop stepped an optimizer itself, past the gate: remove optimizer.step(), "
                    "guard.step and guard.update do it"
                )
            if self._running is None and not self.is_over:
                self.is_over = True
                log.warning(
                    "optimizer.step() was called outside of guard.batches(): such updates are not protected, and a "
                    "rewind does not know of them; a trainer is guarded by resilient_train.hf.guard(trainer), or "
                    "callbacks=[resilient_train.lightning.Guarded()]"
                )
            optimizer._opt_called = True
            return plain(*args, **kwargs)

        watched.plain = plain  # type: ignore[attr-defined]
        # A scheduler of torch's that is made later would wrap a step of its class, to set that mark, and fails on this.
        watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return watched
