"""Buffers that a forward made not finite: after a rewind the update that does so is refused, and can be examined.

A forward may write into a buffer what no loss meets before the next one, when nothing is left that could be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class BufferWatch:
    """Makes the loss NaN as soon as a watched buffer is not finite. It watches those that a rewind had to restore."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = [module._buffers for module in model.modules() if module._buffers]
        self._watched: set[tuple[int, str]] = set()  # the number of the module, and the name

    @contextmanager
    def across_rewind(self) -> Iterator[None]:
        """Watch the buffers that are not finite before a rewind and are after it. Waits for the device."""
        broken = {place for place, buffer in self._named() if not buffer.isfinite().all()}
        yield
        self._watched |= {place for place, buffer in self._named() if place in broken and buffer.isfinite().all()}

    def spoil(self, loss: Tensor) -> Tensor:
        """Return the loss as it is, or NaN if a watched buffer is not finite now; the microscope sees why."""
        for number, name in self._watched:
            if (buffer := self._owned[number].get(name)) is not None:
                loss = loss + (0 * buffer.detach()).sum().abs().to(loss)
        return loss

    def _named(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """The buffers of a type that can be not finite; those of one byte cannot be computed with."""
        for number, own in enumerate(self._owned):
            for name, buffer in own.items():
                if buffer is None or buffer.layout is not torch.strided or buffer.element_size() == 1:
                    continue
                if buffer.is_floating_point() or buffer.is_complex():
                    yield (number, name), buffer
