"""What a capability may be, for the engine that knows none of them: each method is called from one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from resilient_train.core.objective import Metrics
from resilient_train.core.transaction import Transaction

Computed = tuple[torch.Tensor, Metrics]  # a loss whose backward was made, and what the objective reports
Retry = Callable[[], None]  # called once the update was given up; then it is retried


class Hook:
    """Takes part in every update. What a class leaves out is not called."""

    def before_update(self) -> None:
        """Called before anything of the next update is done. It may settle the last one, and change the state."""

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        """Surround forward and backward of a micro-batch, `update.inputs[-1]`, which it may replace."""
        yield

    def accepted(self, update: Transaction) -> None:
        """Called after an update was accepted."""


class OnError(Protocol):
    """Knows what to do about an exception that forward or backward raised."""

    def loss_instead(self, error: Exception, open_updates: Sequence[Transaction]) -> Computed | Retry | None:
        """Return what takes the place of the loss, or that the update is to be retried; None: another knows, or nobody.

        The newest of the open updates raised it. If it is noted in `raised` there, the update will not land.
        """
