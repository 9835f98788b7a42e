"""What ranks tell each other once an update: a row each of one small table, which is reduced where it lies."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch


class Flag(IntEnum):
    """What a rank can tell the others with an update, and all hear with the next."""

    STOP = 0  # somebody asked it to stop
    BUSY = 1  # its writer of checkpoints is at work


DIGEST = 2 + len(Flag)  # its place in a row, behind loss, gradient norm and flags
DIGESTS = 2**24  # of them there are: whole numbers below it are exact in float32


class Agreement:
    """The one collective that watching an update costs.

    What the host reads of it has the same size for any number of ranks; who said what is asked after trouble only.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor | None] | None, device: torch.device) -> None:
        """`gather` collects a vector from every rank, if there are several."""
        self._gather = gather
        self._said = [0.0] * (len(Flag) + 1)
        self._cells = torch.zeros(len(self._said), device=device)
        self._by_place = self._cells.unbind()

    @property
    def is_alone(self) -> bool:
        """Say whether there is nobody to agree with."""
        return self._gather is None

    def tell(self, flag: Flag, is_so: bool = True) -> None:
        """Let every rank know with the next update, and all that follow until it is told otherwise."""
        self._say(flag, float(is_so))

    def tells(self, flag: Flag) -> bool:
        """Say what this rank tells the others now."""
        return self._said[flag] > 0

    def reached(self, measured: torch.Tensor, digest: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The mean loss and the largest gradient norm of all ranks, a NaN of any included: no rank decides alone.

        `measured` is of this rank: loss, norm, and the loss scale if there is one, which stays; `digest` is of all that
        ranks decide by, below `DIGESTS`. Behind them come the flags that any rank raises, and the largest and the least
        digest. The second is the table with a row of each rank; None where there is nobody else.
        """
        if self._gather is None:
            return measured, None
        self._say(len(Flag), float(digest))
        table = self._gather(torch.cat([measured[:2], self._cells]))
        if table is None:
            return measured, None
        least, largest = table.aminmax(dim=0)
        return torch.cat([table[:, :1].mean(0), largest[1:2], measured[2:], largest[2:], least[-1:]]), table

    def _say(self, place: int, number: float) -> None:
        if self._said[place] != number:
            self._said[place] = number
            self._by_place[place].fill_(number)  # as an argument: no copy that the host would wait for
