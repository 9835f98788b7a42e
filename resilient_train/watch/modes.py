"""Autograd's anomaly mode, which user code may set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from resilient_train.wording import log


class AnomalyMode:
    """Turns off the NaN check of autograd's anomaly mode during an update.

    The check would end a run at a NaN that the gate refuses and that a replay explains.
    """

    def __init__(self, backward: Callable[[Tensor], None]) -> None:
        self._backward, self._has_warned = backward, False

    @contextmanager
    def without_nan_check(self) -> Iterator[None]:
        """Turn the check off, also if user code turns the mode on in here, for a backward or for good."""
        set_mode, wanted = torch.set_anomaly_enabled, torch.is_anomaly_check_nan_enabled()

        def set_without_check(enabled: bool, check_nan: bool = True) -> None:
            nonlocal wanted
            if enabled and check_nan:
                wanted = True
                if not self._has_warned:
                    log.warning(_COSTLY)
                self._has_warned = True
            set_mode(enabled, False)

        if torch.is_anomaly_enabled() and wanted:
            set_without_check(True)
        torch.set_anomaly_enabled = set_without_check
        try:
            yield
        finally:
            torch.set_anomaly_enabled = set_mode
            if torch.is_anomaly_enabled() and wanted:  # as user code has left it
                set_mode(True, True)

    def backward(self, loss: Tensor) -> None:
        """Run backward. The objective may have set the mode itself, so it is checked again here."""
        with self.without_nan_check():
            self._backward(loss)


_COSTLY = (
    "torch.autograd anomaly mode is on: it makes each step 2 to 5 times as slow and is not needed here, because a "
    "replay finds the line that breaks; its check for NaN is off inside the loop, since it would end the run"
)
