"""Torch's anomaly mode, often set in user code: its check for NaN would end a run that the gate protects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_log = logging.getLogger("resilient_train")


class AnomalyMode:
    """Turns off that check alone, and only during an update: the gate refuses the NaN, a replay explains it."""

    def __init__(self, backward: Callable[[torch.Tensor], None]) -> None:
        self._backward, self._has_warned = backward, False

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Let no backward raise at a NaN; then set the mode as it was, unless user code has left it meanwhile."""
        if is_on := torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            if not self._has_warned:
                _log.warning(_COSTLY)
            self._has_warned = True
            torch.autograd.set_detect_anomaly(True, check_nan=False)
        try:
            yield
        finally:
            if is_on and torch.is_anomaly_enabled():
                torch.autograd.set_detect_anomaly(True)

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward, also of an objective that sets the mode itself."""
        with self.unchecked():
            self._backward(loss)


_COSTLY = (
    "torch.autograd anomaly mode is on: it makes each step 2 to 5 times as slow and is not needed here, because a "
    "replay finds the line that breaks; its check for NaN is off inside the loop, since it would end the run"
)
