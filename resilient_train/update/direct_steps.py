"""What a loop does itself, past the guard: it steps an optimizer, or scales losses."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from resilient_train.errors import TrainError
from resilient_train.wording import log


class DirectStepCheck:
    """Notices optimizer steps outside of the guard: an error while the loop has a batch, else one warning."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._running: Literal["loop", "guard"] | None = None
        self._is_over = False
        self.count = 0  # of steps outside of the guard
        for optimizer in optimizers:
            optimizer.step = self._watched(optimizer, optimizer.step)  # type: ignore[method-assign]

    @contextmanager
    def running(self, who: Literal["loop", "guard"]) -> Iterator[None]:
        """Note who runs: the loop, with a batch, or the guard."""
        before, self._running = self._running, who
        try:
            yield
        finally:
            self._running = before

    def end(self) -> None:
        """Note that the guard is closed: steps after it are on purpose."""
        self._is_over = True

    def _watched(self, optimizer: Any, step: Any) -> Any:
        plain = getattr(step, "plain", step)  # without the wrapper of an earlier guard

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._running == "loop":
                raise TrainError(
                    "the loop stepped an optimizer itself, past the gate: remove optimizer.step(), "
                    "guard.step and guard.update do it"
                )
            if self._running is None and not self._is_over:
                self.count += 1
                if self.count == 1:
                    log.warning(
                        "optimizer.step() was called outside of guard.batches(): such updates are not protected, and a "
                        "rewind does not know of them"
                    )
            optimizer._opt_called = True
            return plain(*args, **kwargs)

        watched.plain = plain  # type: ignore[attr-defined]
        # A scheduler of torch's that is made later would wrap a step of its class, to set that mark, and fails on this.
        watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return watched


def warn_of_scalers(ours: GradScaler | None) -> None:
    """Warn if a loss scaler is in use that the guard does not know. Visits all objects of the process: call it once."""
    found = (one for one in gc.get_objects() if issubclass(type(one), GradScaler) and one is not ours)
    if any(one.is_enabled() and one._scale is not None for one in found):
        log.warning(
            "a GradScaler of the program is in use: if it scales this loop's loss, the guard sees gradients many times "
            "too large; give it as Guard(scaler=...), or use the one of Accelerator(mixed_precision='fp16')"
        )
