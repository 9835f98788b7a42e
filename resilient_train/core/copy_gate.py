"""Losses that are stepped in turn, as in a GAN: one update, in which optimizers step with losses of their own.

An optimizer has stepped when `update` returns, so that the next loss sees its new weights. The verdict comes when the
loop asks for the next batch. Until then a full mark has the weights and moments from before the turn: if any of its
losses is refused, all of it is undone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.core.gate import Gate, Stepping
from resilient_train.errors import TrainError, named_type
from resilient_train.types import NO_LIMIT


class CopyGate:
    """The gate of losses in turn: any optimizers step, any number of times, and all of it is kept or undone."""

    def __init__(self, gates: Mapping[Optimizer, Gate]) -> None:
        """`gates` has one for each optimizer: a step that is refused leaves the next losses of the turn finite."""
        self._gates = gates
        self._steps = Counter[Optimizer]()  # of the newest update, with losses of their own
        self.loss = self.norm = torch.zeros(())  # the sums so far, of the norms as if they were one vector
        self.rates: list[dict[str, Any]] = []  # the settings of each group, in the step of its highest rate

    def known(self, optimizer: Any) -> Optimizer:
        """Return the optimizer that is meant, which may be in Accelerate's wrapper."""
        for one in self._gates:
            if one in (optimizer, getattr(optimizer, "optimizer", None)):
                return one
        what = f"the guard does not know this optimizer, {named_type(optimizer)}"
        raise TrainError(f"guard.update: {what}: give Guard a list of all optimizers")

    def begin(self) -> None:
        self._steps.clear()
        self.rates = []

    @property
    def has_stepped(self) -> bool:
        return bool(self._steps)

    @property
    def is_complete(self) -> bool:
        """Say whether every optimizer has stepped: a loop that is left before has left the turn."""
        return len(self._steps) == len(self._gates)

    @property
    def times(self) -> int:
        """How often the optimizer that stepped most often has stepped."""
        return max(self._steps.values(), default=1)

    def steps_of(self, optimizer: Optimizer) -> int:
        return self._steps[optimizer]

    def step(
        self,
        optimizer: Optimizer,
        steps: Stepping,
        loss: torch.Tensor,
        norm: torch.Tensor,
        settings: Sequence[Mapping[str, Any]],
        largest: float,
    ) -> None:
        """Let one optimizer make its step: the limit of the loss is for the sum, that of the norm is `largest`."""
        gate, measured = self._gates[optimizer], torch.stack([loss, norm])
        if self._steps:
            loss, norm = self.loss + loss, torch.hypot(self.norm, norm)
        self.loss, self.norm = loss, norm
        self._steps[optimizer] += 1
        pairs = zip([*self.rates, *settings[len(self.rates) :]], settings, strict=True)
        self.rates = [dict(max(pair, key=lambda one: float(one["lr"] or 0.0))) for pair in pairs]
        gate.limit(NO_LIMIT, largest)
        gate.step(measured, [steps])
