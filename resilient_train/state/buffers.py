"""Buffers that a forward made not finite: after a rewind the update that does so is refused, and can be examined.

A forward may write into a buffer what no loss meets before the next one, when nothing is left that could be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class BufferWatch:
    """Makes the loss NaN as soon as a watched buffer is not finite. It watches those that a rewind had to restore."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = [module._buffers for module in model.modules() if module._buffers]
        self._watched: list[tuple[dict[str, Tensor | None], str]] = []

    @contextmanager
    def across_rewind(self) -> Iterator[None]:
        """Watch the buffers that are not finite before a rewind and are after it. Waits for the device."""
        broken = [one for one in self._named() if one not in self._watched and not _is_finite(one)]
        yield
        self._watched += [one for one in broken if _is_finite(one)]

    def spoil(self, loss: Tensor) -> Tensor:
        """Return the loss as it is, or NaN if a watched buffer is not finite now; the microscope sees why."""
        for own, name in self._watched:
            if (buffer := own.get(name)) is not None:
                loss = loss + (0 * buffer.detach()).sum().abs().to(loss)
        return loss

    def _named(self) -> Iterator[tuple[dict[str, Tensor | None], str]]:
        for own in self._owned:
            for name, buffer in own.items():
                if buffer is not None and (buffer.is_floating_point() or buffer.is_complex()):
                    yield own, name


def _is_finite(place: tuple[dict[str, Tensor | None], str]) -> bool:
    own, name = place
    return (buffer := own.get(name)) is None or bool(buffer.isfinite().all())
