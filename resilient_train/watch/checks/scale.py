"""The loss scale of half precision."""

from __future__ import annotations

from resilient_train.types import Vitals
from resilient_train.watch.checks.memory import Remembers
from resilient_train.watch.config import ScaleConfig


class ScaleCollapse(Remembers):
    """The loss scale falls without end: nothing lands any more, or only with a scale that is of no use.

    A scaler halves its scale at each overflow and begins at 2**16: ten in a row are an ordinary start, twenty say
    that no scale is small enough.
    """

    remembered = ("_in_a_row", "_told")

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self._in_a_row = 0
        self._told = False

    def overflowed(self, vitals: Vitals) -> str | None:
        """Count an overflow; the evidence, once it is a collapse."""
        if not self.config.every:
            return None
        self._in_a_row += 1
        scale = vitals.loss_scale
        if self._in_a_row >= self.config.in_a_row:
            count, self._in_a_row = self._in_a_row, 0  # said again after as many more
            return f"{count} updates overflowed one after the other; the loss scale is {scale}"
        if scale is not None and scale < self.config.lowest and not self._told:
            self._told = True
            return f"the loss scale fell to {scale:.3g}"
        return None

    def landed(self, scale: float | None) -> None:
        self._in_a_row = 0
        if self._told and (scale is None or scale >= self.config.lowest):
            self._told = False
