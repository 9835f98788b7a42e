"""The drill: reads faults, and lets them strike at the points of an update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.drills.faults import FAULTS, BadRow, Fault, HotLr, Spoils, TickFault, WithBadRows
from resilient_train.errors import ConfigError, unusable
from resilient_train.reader import is_list, mapping, no_such, read

_log = logging.getLogger("resilient_train")

_APART = 10**12  # firing 3_000000000100 is that of the fault with index 3 at tick 100
_MOST_ROWS = 100_000  # that are written down
_HALF_WAY = (0.5,)  # where a fault strikes that has neither ticks nor a rate


def parse(node: Mapping[str, Any], *, steps: int, world: int | None = None) -> list[Fault]:
    """Read a drill: `{fault: nan_batch, at: [100]}` or `{faults: [{nan_batch: {at: [100]}}, hot_lr]}`.

    Ticks may be fractions of `steps`. `world`: how many ranks there are, if that is known.
    """
    if "fault" in node:
        if "faults" in node:
            raise unusable("drill.faults", "give either drill.fault, for one, or drill.faults, for several")
        settings = {key: value for key, value in node.items() if key != "fault"}
        return [_fault("drill", "drill.fault", node["fault"], settings, steps, world)]
    entries = mapping(node, "drill", ("fault", "faults", "seed")).get("faults") or []
    if not is_list(entries):
        raise ConfigError("drill.faults", entries, "must be a list, such as [{nan_batch: {at: [50]}}]")
    faults = []
    for number, entry in enumerate(entries):
        key = f"drill.faults[{number}]"
        name, settings = next(iter(entry.items())) if isinstance(entry, Mapping) and len(entry) == 1 else (entry, {})
        if not isinstance(name, str) or not isinstance(settings, Mapping | None):
            raise ConfigError(key, entry, "must be one fault with its settings, such as {nan_batch: {at: [50]}}")
        shared = {"seed": node["seed"]} if "seed" in node else {}
        faults.append(_fault(f"{key}.{name}", key, name, {**shared, **(settings or {})}, steps, world))
    return faults


def _fault(path: str, key: str, name: Any, settings: Mapping[str, Any], steps: int, world: int | None) -> Fault:
    """Build one fault. `path` is where its settings are, `key` where its name is."""
    kind = FAULTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise no_such("fault", name, sorted(FAULTS), at=key, value=name)
    settings = {setting: value for setting, value in settings.items() if value is not None}
    if issubclass(kind, TickFault):
        settings["at"] = _ticks(f"{path}.at", settings.get("at", () if settings.get("rate") else _HALF_WAY), steps)
    fault = read(kind, settings, path)
    rank = fault.rank if isinstance(fault, TickFault) else "all"
    if world is not None and isinstance(rank, int) and rank >= world:
        raise ConfigError(f"{path}.rank", rank, f"no such rank; there are 0 to {world - 1}")
    return fault


def _ticks(key: str, at: Any, steps: int) -> list[int]:
    """Turn ticks and fractions of the run into ticks."""
    ticks = set()
    for one in at if is_list(at) else [at]:
        if isinstance(one, float) and 0 < one < 1:
            ticks.add(max(1, round(one * steps)))
        elif isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise ConfigError(key, at, f"{one} is neither a tick (1, 2, ...) nor a fraction of the run between 0 and 1")
        elif one > steps:
            raise ConfigError(key, at, f"the run has only {steps} steps: nothing would strike at tick {one}")
        else:
            ticks.add(one)
    return sorted(ticks)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the run is."""

    tick: int  # the current attempt, from 1: attempted updates, never goes back
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

        Before it `about(number, more)` is called with `until` which tick a fault lasts, or which `rows` are bad.
        """
        self._faults = dict(enumerate(faults))
        self._has_fired, self._fired, self._about = has_fired, fired, about
        self._struck: dict[int, tuple[int, int]] = {}  # where each fault struck last: tick and micro-batch
        self._checked: set[str] = set()  # of what it is known which faults are possible

    def wrapped(self, dataset: Any) -> Any:
        """Return the data set as the run shall see it: with its bad rows, or itself."""
        for index, fault in list(self._faults.items()):
            if isinstance(fault, BadRow) and self._is_possible(index, fault, dataset):
                rows = fault.chosen(len(dataset))
                self._journal_once(index, fault, 0, **({"rows": sorted(rows)} if len(rows) <= _MOST_ROWS else {}))
                dataset = WithBadRows(dataset, fault)
        return dataset

    def strikes_at(self, tick: int) -> bool:
        """Say whether something begins at this tick, which must then not be given up for the sake of an earlier one."""
        return any(isinstance(fault, TickFault) and fault.begins(tick) for fault in self._faults.values())

    def on_batch(self, place: Place, batch: Any) -> Any:
        """Before the forward of each micro-batch. The batch that comes in stays as it is."""
        self._check("batch", batch)
        for fault in self._striking("batch", place, batch):
            batch = fault.spoil(batch)
        return batch

    def on_loss(self, place: Place, loss: torch.Tensor) -> torch.Tensor:
        """Before the backward of each micro-batch."""
        for fault in self._striking("loss", place):
            loss = fault.spoil(loss)
        return loss

    def on_gradients(self, place: Place, weights: Sequence[torch.Tensor]) -> None:
        """After the last backward, before the gate."""
        for fault in self._striking("gradients", place):
            fault.spoil(weights)

    def rate_factor(self, place: Place) -> float:
        """Return what the learning rate of this update is multiplied by."""
        factor = 1.0
        for index, fault in self._faults.items():
            if isinstance(fault, HotLr) and (began := fault.began(place.tick)) is not None:
                self._journal_once(index, fault, began, until=began + fault.updates - 1)
                factor *= fault.factor if fault.is_on(place.rank) else 1.0
        return factor

    def between_updates(self, place: Place, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Just before the first forward of the update at `place`."""
        # Before its first step an optimizer keeps nothing, and of the newest it is not known yet whether it was one.
        if place.step > 2:
            self._check("state", model, optimizers)
        for fault in self._striking("state", place, model, optimizers):
            fault.spoil(place.tick, model, optimizers)

    def _spoiling(self, what: Spoils) -> list[tuple[int, Any]]:
        faults = self._faults.items()
        return [(index, fault) for index, fault in faults if isinstance(fault, TickFault) and fault.spoils == what]

    def _check(self, what: Spoils, *things: Any) -> None:
        """Refuse at the first opportunity what finds nothing to spoil, however much later it would strike."""
        if what not in self._checked:
            self._checked.add(what)
            for index, fault in self._spoiling(what):
                self._is_possible(index, fault, *things)

    def _striking(self, what: Spoils, place: Place, *things: Any) -> Iterator[Any]:
        """The faults that act here and now, each journalled before it is handed out."""
        for index, fault in self._spoiling(what):
            if not fault.begins(place.tick):
                continue
            continues = fault.whole_update and self._struck.get(index) == (place.tick, place.micro - 1)
            if not continues and not (
                self._is_possible(index, fault, *things) and self._journal_once(index, fault, place.tick)
            ):
                continue
            self._struck[index] = place.tick, place.micro
            if fault.is_on(place.rank):
                yield fault

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
