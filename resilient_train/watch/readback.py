"""Small vectors on their way to the host: sent when they are measured, read one update later."""

from __future__ import annotations

import torch


class Sent:
    """A vector that was sent. Reading it waits for its own copy and for nothing that was queued after it."""

    def __init__(self, vector: torch.Tensor, numbers: list[float] | None = None) -> None:
        self._numbers = numbers
        self._vector = vector
        self._arrived: torch.cuda.Event | None = None
        if numbers is None and vector.is_cuda:
            self._vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)  # torch caches pinned memory
            self._vector.copy_(vector, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers: the one place of a healthy update where the host may wait for the device."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._vector.tolist()
        return self._numbers
