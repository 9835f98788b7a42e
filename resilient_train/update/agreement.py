"""What ranks exchange once an update: one row each of a small table, which is reduced on the device."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch


class Flag(IntEnum):
    """What a rank can raise with an update, and all see with the next."""

    STOP = 0  # it was asked to stop
    BUSY = 1  # it is writing a checkpoint


DIGEST = 2 + len(Flag)  # its column in a row, after loss, gradient norm and flags
DIGESTS = 2**24  # digests are below it: such whole numbers are exact in float32


class Agreement:
    """The one collective that watching an update costs.

    What the host reads of it has the same size for any number of ranks; the rows are read after an incident only.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor | None] | None, device: torch.device) -> None:
        """`gather` collects a vector from every rank, if there are several."""
        self._gather = gather
        self._values = [0.0] * (len(Flag) + 1)
        self._cells = torch.zeros(len(self._values), device=device)
        self._by_place = self._cells.unbind()

    @property
    def is_alone(self) -> bool:
        """Say whether there is only one rank."""
        return self._gather is None

    def set_flag(self, flag: Flag, is_on: bool = True) -> None:
        """Let every rank know with the next update, and with all that follow until this changes."""
        self._set(flag, float(is_on))

    def is_set(self, flag: Flag) -> bool:
        """Say whether this rank raises a flag now."""
        return self._values[flag] > 0

    def reduce(self, measured: torch.Tensor, digest: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reduce to the mean loss and the largest gradient norm of all ranks, a NaN of any included.

        `measured` is of this rank: loss, norm, and the loss scale if there is one, which stays; `digest` is of all that
        ranks decide by, below `DIGESTS`. After them come the flags that any rank raises, and the largest and the least
        digest. The second result is the table with a row for each rank; None where there is only one.
        """
        if self._gather is None:
            return measured, None
        self._set(len(Flag), float(digest))
        table = self._gather(torch.cat([measured[:2], self._cells]))
        if table is None:
            return measured, None
        least, largest = table.aminmax(dim=0)
        return torch.cat([table[:, :1].mean(0), largest[1:2], measured[2:], largest[2:], least[-1:]]), table

    def _set(self, place: int, number: float) -> None:
        if self._values[place] != number:
            self._values[place] = number
            self._by_place[place].fill_(number)  # as an argument: no copy that the host would wait for
