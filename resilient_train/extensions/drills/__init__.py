"""Faults on purpose: injected where and when you say, to see a run recover from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.core.protocols import Hook
from resilient_train.core.transaction import Transaction
from resilient_train.extensions import Extension
from resilient_train.extensions.drills.faults import (
    BadMoments,
    BadRow,
    BitFlip,
    Crash,
    Fault,
    Hang,
    HotLr,
    InfLoss,
    LossSpike,
    NanBatch,
    NanGrad,
    TickFault,
    WithBadRows,
    parse,
)
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.wording import log
from resilient_train.parts.run import Run

# fmt: off
__all__ = [
    "BadMoments", "BadRow", "BitFlip", "Crash", "Drill", "Fault", "Hang", "HotLr", "InfLoss", "LossSpike", "NanBatch",
    "NanGrad", "UpdatePlace", "parse",
]
# fmt: on

_APART = 10**12  # firing 3_000000000100 is that of the fault with index 3 at tick 100


@dataclass(frozen=True, slots=True)
class UpdatePlace:
    tick: int  # the current attempt, from 1: counts attempted updates and never goes back
    step: int  # the accepted updates so far plus the current one; repeats after a rewind
    rank: int


class Drill(Extension):
    """Injects faults into a run: `Drill([NanBatch(at=[100], rank=1)], ...)`. All ranks journal a firing at the same
    point, before it acts: so `fired` may wait for the other ranks.
    """

    node = "drill"

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        has_fired: Callable[[int], bool] = lambda number: False,
        fired: Callable[[int, str, int], None] = lambda number, name, tick: None,
    ) -> None:
        """`has_fired(number)` covers restarts; `fired(number, name, tick)` is to be remembered."""
        self._faults = dict(enumerate(faults))
        self._has_fired, self._fired = has_fired, fired
        self._struck: dict[int, int] = {}  # the tick at which each fault struck last
        self._checked: set[str] = set()  # kinds of things that were checked for something to spoil

    @classmethod
    def configured(cls, node: Any, steps: int, history: Any) -> Drill:
        faults = parse(node, steps=steps)
        return cls(faults, has_fired=history.drills.__contains__, fired=history.note_drill_fired)

    def build(self, run: Run) -> None:
        if not self._faults:
            return
        hook = DrillHook(self, run)
        run.hooks.insert(0, hook)
        run.updater.clipper.changes.append(hook.on_gradients)
        if run.backend.objective is not None:
            run.backend.objective.changes.append(hook.on_loss)

    def wrapped(self, dataset: Any) -> Any:
        """Return the data set with its bad rows; the data set itself if the drill has none."""
        for index, fault in list(self._faults.items()):
            if isinstance(fault, BadRow) and self._is_possible(index, fault, dataset):
                self._journal_once(index, fault, 0)
                dataset = WithBadRows(dataset, fault)
        return dataset

    def strikes_at(self, tick: int) -> bool:
        """Say whether a fault begins at this tick. The tick must then not be lost to a rewind of an earlier update."""
        return any(isinstance(fault, TickFault) and fault.begins(tick) for fault in self._faults.values())

    def on_batch(self, place: UpdatePlace, batch: Any) -> Any:
        """Call before the forward of each micro-batch. Returns the batch, or a spoiled copy."""
        for fault in self._striking("batch", place, batch):
            batch = fault.spoil(batch)
        return batch

    def on_loss(self, place: UpdatePlace, loss: torch.Tensor) -> torch.Tensor:
        """Call before the backward of each micro-batch."""
        for fault in self._striking("loss", place):
            loss = fault.spoil(loss)
        return loss

    def on_gradients(self, place: UpdatePlace, weights: Sequence[torch.Tensor]) -> None:
        """Call after the last backward, before the gate."""
        for fault in self._striking("gradients", place):
            fault.spoil(weights)

    def rate_factor(self, place: UpdatePlace) -> float:
        factor = 1.0
        for index, fault in self._faults.items():
            if isinstance(fault, HotLr) and (began := fault.began(place.tick)) is not None:
                self._journal_once(index, fault, began)
                factor *= fault.factor if fault.is_on(place.rank) else 1.0
        return factor

    def between_updates(self, place: UpdatePlace, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Call just before the first forward of the update at `place`."""
        # An optimizer has no state before its first step, and whether the newest update was one is not known yet.
        for fault in self._striking("state", place, model, optimizers, can_check=place.step > 2):
            fault.spoil(place.tick, model, optimizers)

    def _striking(self, what: str, place: UpdatePlace, *things: Any, can_check: bool = True) -> Iterator[Any]:
        """Yield the faults that act here, each journalled: on all micro-batches, and again where the tick is retried,
        except those of the state, which stay. One that finds nothing to spoil is refused at the first call.
        """
        is_first = can_check and what not in self._checked
        if is_first:
            self._checked.add(what)
        for index, fault in list(self._faults.items()):
            if not isinstance(fault, TickFault) or fault.spoils != what:
                continue
            begins = fault.begins(place.tick)
            if (begins or is_first) and not self._is_possible(index, fault, *things):
                continue
            is_again = self._struck.get(index) == place.tick and what != "state"
            if begins and (is_again or self._journal_once(index, fault, place.tick)):
                self._struck[index] = place.tick
                if fault.is_on(place.rank):
                    yield fault

    def _journal_once(self, index: int, fault: Fault, tick: int) -> bool:
        number = tick + index * _APART
        if self._has_fired(number):
            return False
        self._fired(number, fault.name, tick)
        log.info("drill: %s, on purpose%s", fault.name, f", at tick {tick}" if tick else "")
        return True

    def _is_possible(self, index: int, fault: Fault, *things: Any) -> bool:
        """Raise ConfigError if a fault finds nothing to spoil; leave it out if it is optional."""
        why = fault.lacks(*things)
        if why is None:
            return True
        if not fault.optional:
            raise ConfigError("drill", fault.name, why)
        log.warning("drill: %s is left out: %s", fault.name, why)
        del self._faults[index]
        return False


class DrillHook(Hook):
    def __init__(self, drill: Drill, run: Run) -> None:
        self._drill, self._run = drill, run
        self._place = UpdatePlace(0, 0, run.world.rank)  # of the newest update

    def before_update(self) -> None:
        if self._drill.strikes_at(self._run.state.clock.tick + 1):
            self._run.settle()  # a fault strikes once: what the last update holds could drop the next one

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        self._place = UpdatePlace(update.tick, update.step, self._run.world.rank)
        if len(update.inputs) == 1:
            if self._drill.strikes_at(update.tick):
                self._run.ring.copier.before_change()  # a device may still be copying what it spoils
            self._drill.between_updates(self._place, self._run.state.model, self._run.state.optimizers)
        update.inputs[-1] = self._drill.on_batch(self._place, update.inputs[-1])
        yield

    def on_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._drill.on_loss(self._place, loss) if self._is_computing else loss

    def on_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        if self._is_computing:
            self._drill.on_gradients(self._place, weights)

    def rate_factor(self) -> float:
        return self._drill.rate_factor(self._place)

    @property
    def _is_computing(self) -> bool:
        """Whether the newest update is being computed. Later its faults do not strike replays and trials."""
        return self._place.tick == self._run.state.clock.tick + 1
