"""The drill: the points of an update at which faults can strike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from resilient_train.drills.fault import BatchFault, Fault, GradientFault, LossFault, StateFault, TickFault
from resilient_train.drills.faults import HotLr
from resilient_train.drills.rows import BadRow, rotten
from resilient_train.errors import ConfigError

_log = logging.getLogger("resilient_train")

_APART = 10**12  # firing 3_000000000100 is that of the fault with index 3 at tick 100

_MOST_ROWS = 100_000  # that are written down

F = TypeVar("F", bound=TickFault)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the run is."""

    tick: int  # the attempt under way, from 1: attempted updates, never goes back
    step: int  # the update attempted, from 1: accepted ones and itself; comes again after a rewind
    start: int  # position of the update's first sample in the stream; comes again after a rewind
    micro: int  # number of the micro-batch, from 0
    rank: int


class Drill:
    """Injects faults into a run: `Drill([NanBatch(at=[100], rank=1)], ...)`.

    A firing is journalled before it acts, and has a number that a restart gives it again. All ranks ask and journal
    at the same points, also those on which the fault does not act: so they agree, and `fired` may wait for the others.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        has_fired: Callable[[int], bool],
        fired: Callable[[int, str, int], None],
        about: Callable[[int, Mapping[str, Any]], None] = lambda number, more: None,
    ) -> None:
        """`has_fired(number)` answers for the whole run, restarts included; `fired(number, name, tick)` writes down.

        Before it `about(number, more)` is told `until` which tick a fault lasts, or which `rows` are bad.
        """
        self._faults = dict(enumerate(faults))
        self._has_fired, self._fired, self._about = has_fired, fired, about
        self._struck: dict[int, tuple[int, int]] = {}  # where each fault struck last: tick and micro-batch
        self._batch_is_known = self._state_is_known = False

    def wrapped(self, dataset: Any) -> Any:
        """Return the data set as the run shall see it: with its bad rows, or itself."""
        for index, fault in self._of(BadRow):
            if self._is_possible(index, fault, dataset):
                rows = fault.chosen(len(dataset))
                self._journal_once(index, fault, 0, **({"rows": sorted(rows)} if len(rows) <= _MOST_ROWS else {}))
                dataset = rotten(dataset, fault)
        return dataset

    def strikes_at(self, tick: int) -> bool:
        """Say whether something begins at this tick, which must then not be given up for the sake of an earlier one."""
        return any(fault.begins(tick) for _, fault in self._of(TickFault))

    def on_batch(self, place: Place, batch: Any) -> Any:
        """Before the forward of each micro-batch. The batch that comes in stays as it is."""
        if not self._batch_is_known:
            self._batch_is_known = True
            for index, fault in self._of(BatchFault):
                self._is_possible(index, fault, batch)
        for fault in self._striking(BatchFault, place, batch):
            batch = fault.spoil(batch)
        return batch

    def on_loss(self, place: Place, loss: torch.Tensor) -> torch.Tensor:
        """Before the backward of each micro-batch."""
        for fault in self._striking(LossFault, place):
            loss = fault.spoil(loss)
        return loss

    def on_gradients(self, place: Place, weights: Sequence[torch.Tensor]) -> None:
        """After the last backward, before the gate."""
        for fault in self._striking(GradientFault, place):
            fault.spoil(weights)

    def rate_factor(self, place: Place) -> float:
        """Return what the learning rate of this update is multiplied by."""
        factor = 1.0
        for index, fault in self._of(HotLr):
            began = fault.began(place.tick)
            if began is not None:
                self._journal_once(index, fault, began, until=began + fault.updates - 1)
                factor *= fault.factor if fault.is_on(place.rank) else 1.0
        return factor

    def between_updates(self, place: Place, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Just before the first forward of the update at `place`."""
        # Before its first step an optimizer keeps nothing, and of the newest it is not known yet whether it was one.
        if not self._state_is_known and place.step > 2:
            self._state_is_known = True
            for index, fault in self._of(StateFault):
                self._is_possible(index, fault, model, optimizers)
        for fault in self._striking(StateFault, place, model, optimizers):
            fault.spoil(place.tick, model, optimizers)

    def _of(self, kind: type[Any]) -> list[tuple[int, Any]]:
        return [(index, fault) for index, fault in self._faults.items() if isinstance(fault, kind)]

    def _striking(self, kind: type[F], place: Place, *things: Any) -> Iterator[F]:
        """The faults that act here and now, each journalled before it is handed out."""
        for index, fault in self._of(kind):
            if not fault.begins(place.tick):
                continue
            goes_on = fault.whole_update and self._struck.get(index) == (place.tick, place.micro - 1)
            if not goes_on and not self._begins(index, fault, place.tick, *things):
                continue
            self._struck[index] = place.tick, place.micro
            if fault.is_on(place.rank):
                yield fault

    def _begins(self, index: int, fault: Fault, tick: int, *things: Any) -> bool:
        return self._is_possible(index, fault, *things) and self._journal_once(index, fault, tick)

    def _journal_once(self, index: int, fault: Fault, tick: int, **more: Any) -> bool:
        """Write a firing down, and `more` of it, unless this run had it already."""
        number = tick + index * _APART
        if self._has_fired(number):
            return False
        if more:
            self._about(number, more)
        self._fired(number, fault.name, tick)
        _log.info("drill: %s, on purpose%s", fault.name, f", at tick {tick}" if tick else "")
        return True

    def _is_possible(self, index: int, fault: Fault, *things: Any) -> bool:
        """Refuse a fault that finds nothing to spoil, or leave it out where it is optional."""
        why = fault.lacks(*things)
        if why is None:
            return True
        if not fault.optional:
            raise ConfigError("drill", fault.name, why)
        _log.warning("drill: %s is left out: %s", fault.name, why)
        del self._faults[index]
        return False
