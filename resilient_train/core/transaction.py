"""One update, from its samples to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from resilient_train.core.mark import Mark
from resilient_train.core.ring import Snapshot
from resilient_train.core.updater import Attempt
from resilient_train.core.vitals import Metrics, Sent, where_not_finite
from resilient_train.ground.types import Signal, UpdateResult, Vitals


@dataclass(frozen=True, slots=True)
class Update:
    """What one update trains on: positions `[start, stop)` of the stream, as this rank's micro-batches."""

    start: int
    stop: int
    batches: list[Any]
    keys: list[Sequence[Any]] = field(default_factory=list)  # of each batch; empty if rows have no index
    failed: list[Any] = field(default_factory=list)  # rows that raised, and were replaced by others


@dataclass(eq=False)
class Transaction:
    """An update. At most two are open: the pending one, whose verdict is not read yet, and the next one."""

    update: Update
    tick: int
    step: int  # its number if it is accepted
    mark: Mark  # what it may change, as it was
    inputs: list[Any] = field(default_factory=list)  # its micro-batches, as the model saw them
    versions: list[Any] = field(default_factory=list)  # Tensor._version of each tensor before the forward pass
    raised: list[str] = field(default_factory=list)  # exceptions of its forwards and backwards, each in one line
    losses: list[torch.Tensor] = field(default_factory=list)  # of the micro-batches so far
    reported: list[Metrics] = field(default_factory=list)  # by the objective, of each
    result: UpdateResult | None = None  # for the loop
    snapshot: Snapshot | None = None  # of the state after it, if one was taken
    nan_is_usual: bool = False  # in the batches of this run
    is_error: bool = False  # an exception ended its forward or backward on some rank

    attempt: Attempt = field(init=False)  # since it went through the gate
    limits: tuple[float, float] = field(init=False)  # of the gate
    _sent: Sent = field(init=False)

    def send(self, attempt: Attempt, limits: tuple[float, float]) -> UpdateResult:
        """Note what went through the gate; what was measured is on its way to the host."""
        self.attempt, self.limits = attempt, limits
        self._sent = Sent(attempt.measured, attempt.numbers)
        if self.result is None:
            self.result = UpdateResult("pending", attempt.loss.detach())
        return self.result

    def ends(self, status: str) -> None:
        if self.result is None:
            self.result = UpdateResult(status)
        self.result.status = status

    @property
    def is_refused(self) -> bool:
        return self.result is not None and not self.result

    def read(self, step: int, *, has_scale: bool) -> Vitals:
        """Return what was measured of it, after `step` accepted updates; the host waits for the device."""
        loss, grad_norm, *rest = self._sent.read()
        scale = rest.pop(0) if has_scale else None
        refused = None  # the reason for which the gate refused the update
        if not isfinite(loss):
            refused = Signal.NONFINITE_LOSS
        elif not isfinite(grad_norm):
            refused = Signal.NONFINITE_GRAD
        elif loss > self.limits[0]:
            refused = Signal.LOSS_SPIKE
        elif grad_norm > self.limits[1]:
            refused = Signal.GRAD_SPIKE
        overflowed = scale is not None and refused is Signal.NONFINITE_GRAD
        by_rank = None if refused is None else self.attempt.by_rank
        return Vitals(
            *(self.tick, step + (refused is None), refused is None, loss, grad_norm),
            *(0.0 if (lr := self.attempt.settings[0]["lr"]) is None else lr, self.update.start, self.update.stop),
            *(None if overflowed else refused, overflowed, scale),
            ranks=() if by_rank is None else where_not_finite(by_rank.tolist()),
            stop_asked=any(rest),  # of several ranks
            lr_ratio=self.attempt.lr_ratio,
            clipped=self.attempt.clipped(grad_norm) != grad_norm,
        )
