"""What the ranks exchange once per update: one row each of a small table, which is reduced on the device."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch


class Flag(IntEnum):
    """What a rank can signal with an update. All ranks see it with the next one."""

    STOP = 0  # it was asked to stop
    BUSY = 1  # it is writing a checkpoint


DIGEST = 2 + len(Flag)  # the column of the digest in a row, after loss, gradient norm and flags
DIGESTS = 2**24  # digests are below this number: float32 represents such integers exactly


class Agreement:
    """The only collective that the checks of an update cost.

    The host reads a result of the same size for any number of ranks. It reads the rows only after an incident.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor | None] | None, device: torch.device) -> None:
        """`gather` collects a vector from every rank; None if there is only one."""
        self.is_alone = gather is None
        self._gather = gather
        self._values = [0.0] * (len(Flag) + 1)
        self._cells = torch.zeros(len(self._values), device=device)
        self._by_place = self._cells.unbind()

    def set_flag(self, flag: Flag, is_on: bool = True) -> None:
        """Signal a flag with all updates from the next one on, until this changes."""
        self._set(flag, float(is_on))

    def is_set(self, flag: Flag) -> bool:
        """Say whether this rank signals a flag."""
        return self._values[flag] > 0

    def reduce(self, measured: torch.Tensor, digest: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reduce to the mean loss and the largest gradient norm of all ranks. A NaN of any rank stays NaN.

        `measured` is this rank's loss, norm and, if there is one, loss scale, which is returned as it is. `digest` is
        below `DIGESTS`. The result continues with the flags that any rank signals and the largest and least digest.
        The second result is the table with a row for each rank, or None if there is only one.
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
            self._by_place[place].fill_(number)  # a number as an argument: no copy that the host would wait for
