"""Faults on purpose: injected where and when you say, to see a run recover from them.

A BadRow stays in the data; a TickFault strikes at its ticks only, not again when a rewind repeats their samples.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from resilient_train.core.protocols import Hook
from resilient_train.core.transaction import Transaction
from resilient_train.core.tree import local_part
from resilient_train.data.trees import rebuilt
from resilient_train.extensions import Extension
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.reader import is_list, limited, mapping, merged, no_such, read
from resilient_train.ground.wording import log
from resilient_train.parts.run import Run


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose."""

    name: ClassVar[str]
    seed: int = limited(0, at_least=0)  # of its random numbers


@dataclass(frozen=True, kw_only=True)
class TickFault(Fault):
    """A fault at chosen ticks, on one rank or on all."""

    # batch, loss, gradients (it is given the weights), rate; state: weights, moments, the process
    spoils: ClassVar[str]
    at: Sequence[float] = limited((0.5,), above=0)  # ticks; in a configuration also fractions of the run
    rank: int | Literal["all"] = limited(0, at_least=0)

    def spoil(self, thing: Any, tick: int) -> Any:
        """Return what takes the place of the thing."""
        raise NotImplementedError


def _draw(*parts: object) -> int:
    """Hash to 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_part(tensor.detach())
    return tensor._values() if tensor.is_sparse else tensor


def _has_fractions(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return np.issubdtype(leaf.dtype, np.floating)
    return leaf.is_floating_point() if isinstance(leaf, torch.Tensor) else isinstance(leaf, float | np.floating)


def _spoiled(tree: Any, factor: float, *, first_row: bool = False) -> Any:
    """Copy a batch or a row, in any containers, with its floating-point numbers times a factor, or its first row's."""

    def change(leaf: Any) -> Any:
        if not _has_fractions(leaf):
            return leaf
        if not first_row or not getattr(leaf, "ndim", 0):
            return leaf * factor
        twin = leaf * 1.0
        twin[:1] *= factor
        return twin

    return rebuilt(tree, change)


class NanBatch(TickFault):
    """The first row of each micro-batch is NaN; the data set is fine."""

    name, spoils = "nan_batch", "batch"

    def spoil(self, thing: Any, tick: int) -> Any:
        return _spoiled(thing, math.nan, first_row=True)


@dataclass(frozen=True, kw_only=True)
class LossSpike(TickFault):
    """The loss of one update, and with it its gradients, is multiplied by `factor`."""

    name, spoils = "loss_spike", "loss"
    factor: float = limited(1e4, above=0)

    def spoil(self, thing: Any, tick: int) -> Any:
        return thing * self.factor


@dataclass(frozen=True, kw_only=True)
class InfLoss(LossSpike):
    """The loss is infinite, and its gradients are NaN."""

    name = "inf_loss"
    factor: float = math.inf


class NanGrad(TickFault):
    """One element of one gradient is NaN, though loss and batch are fine."""

    name, spoils = "nan_grad", "gradients"

    def spoil(self, thing: Any, tick: int) -> Any:
        gradients = (_local(weight.grad) for weight in thing if weight.grad is not None)
        if (first := next((one for one in gradients if one.numel()), None)) is not None:
            first[(0,) * first.dim()] = math.nan
        return thing


@dataclass(frozen=True, kw_only=True)
class HotLr(TickFault):
    """The learning rate is multiplied by `factor` for a number of ticks."""

    name, spoils = "hot_lr", "rate"
    rank: int | Literal["all"] = limited("all", at_least=0)
    factor: float = limited(100.0, above=0)
    updates: int = limited(30, at_least=1)


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by the size of a weight in bytes


class BitFlip(TickFault):
    """The highest bit of the exponent of one weight flips, as in bad memory: 0.02 becomes 7e36."""

    name, spoils = "bit_flip", "state"

    def spoil(self, thing: Any, tick: int) -> Any:
        weights = [_local(weight) for weight in thing.model.parameters() if weight.requires_grad]
        weights = [one for one in weights if one.is_floating_point() and one.element_size() > 1]
        place = _draw("place", self.seed, tick) % sum(weight.numel() for weight in weights)
        for weight in weights:
            if place < weight.numel():
                integers = weight.view(_INTEGERS[weight.element_size()])
                integers[np.unravel_index(place, weight.shape)] ^= 1 << 8 * weight.element_size() - 2
                break
            place -= weight.numel()
        return thing


# What the states of optimizers are multiplied by: second moments, or all that SGD keeps.
_MOMENTS = {
    **dict.fromkeys(("exp_avg_sq", "square_avg", "sum", "row_var", "col_var"), 1e-4),
    "momentum_buffer": 1e3,
}


class BadMoments(TickFault):
    """The optimizer's second moments are far too small. If it has none, its momentum is too large."""

    name, spoils = "bad_moments", "state"

    def spoil(self, thing: Any, tick: int) -> Any:
        for optimizer in thing.optimizers:
            for state in optimizer.state.values():
                for name in _MOMENTS.keys() & state.keys():
                    if state[name] is not None:
                        state[name].mul_(_MOMENTS[name])
        return thing


class Crash(TickFault):
    """The process is killed: no handler runs, nothing is flushed."""

    name, spoils = "crash", "state"

    def spoil(self, thing: Any, tick: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Hang(TickFault):
    """The process stops responding, as when a file system does not answer."""

    name, spoils = "hang", "state"

    def spoil(self, thing: Any, tick: int) -> Any:
        while True:
            time.sleep(3600)


@dataclass(frozen=True, kw_only=True)
class BadRow(Fault):
    """Some rows of the data set are not finite, or outliers, in every epoch and every replay."""

    name = "bad_row"
    rows: Sequence[int] = limited((), at_least=0)
    share: float = limited(0.01, above=0, at_most=1)  # of all rows, at least one, at random; unless `rows` are given
    what: Literal["nan", "inf", "outlier"] = "nan"
    factor: float = limited(1e4, above=0)  # what an outlier is multiplied by

    def chosen(self, count: int) -> frozenset[int]:
        if self.rows:
            return frozenset(self.rows)
        bad = min(count, max(1, round(self.share * count)))
        return frozenset(random.Random(_draw(self.name, self.seed)).sample(range(count), bad))

    def spoil(self, row: Any) -> Any:
        return _spoiled(row, self.factor if self.what == "outlier" else float(self.what))


class WithBadRows:
    def __init__(self, dataset: Any, fault: BadRow) -> None:
        self.dataset, self.fault = dataset, fault
        self.bad_rows = fault.chosen(len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        row = self.dataset[index]
        return self.fault.spoil(row) if operator.index(index) % len(self) in self.bad_rows else row


FAULTS: dict[str, type[Fault]] = {
    kind.name: kind for kind in (NanBatch, NanGrad, InfLoss, LossSpike, HotLr, BitFlip, BadMoments, BadRow, Crash, Hang)
}


def parse(node: Mapping[str, Any], *, steps: int) -> list[Fault]:
    """Read `{fault: nan_batch, at: [100]}`, or `{faults: [{nan_batch: {at: [0.1]}}]}`, with shares of `steps`."""
    if "fault" in node:
        name, settings = node["fault"], {key: value for key, value in node.items() if key != "fault"}
        if name not in FAULTS:
            raise no_such("fault", name, FAULTS, at="drill.fault", value=name)
        return [_fault("drill", name, settings, steps)]
    entries = mapping(node, "drill", ("fault", "faults", "seed")).get("faults") or []
    if not is_list(entries):
        raise ConfigError("drill.faults", entries, "must be a list, such as [{nan_batch: {at: [50]}}]")
    faults = []
    for number, entry in enumerate(entries):
        key = f"drill.faults[{number}]"
        for name, settings in mapping(entry, key, FAULTS, "fault").items():
            seeded = merged({"seed": node.get("seed", 0)}, settings or {})
            faults.append(_fault(f"{key}.{name}", name, seeded, steps))
    return faults


def _fault(path: str, name: str, settings: Any, steps: int) -> Fault:
    fault = read(FAULTS[name], settings, path)
    if not isinstance(fault, TickFault):
        return fault
    ticks = [max(1, round(one * steps if one < 1 else one)) for one in fault.at]
    if not ticks or max(ticks) > steps:
        why = f"must be a list of ticks up to run.steps={steps}, or of fractions of the run"
        raise ConfigError(f"{path}.at", list(fault.at), why)
    return replace(fault, at=ticks)


class Drill(Extension, Hook):
    """Injects faults into a run: `Drill([NanBatch(at=[100], rank=1)])`. All ranks journal them, before they strike."""

    node = "drill"

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = dict(enumerate(faults))
        self._struck: set[tuple[int, float]] = set()  # numbers of faults, with their ticks
        self._note: Callable[..., None] = lambda kind, **fields: None  # writes into the journal
        self.rank = 0
        self.tick = 0  # the newest attempt, from 1: counts attempted updates and never goes back, nor in a restart

    @classmethod
    def configured(cls, node: Any, steps: int) -> Drill:
        return cls(parse(node, steps=steps))

    def wrapped(self, dataset: Any) -> Any:
        """Return the data set with its bad rows; the data set itself if the drill has none."""
        for fault in self._faults.values():
            if isinstance(fault, BadRow) and hasattr(dataset, "__len__"):  # not one read from front to back
                dataset = WithBadRows(dataset, fault)
        return dataset

    def build(self, run: Run) -> None:
        if not self._faults:
            return
        self._run, self.rank, self._note = run, run.world.rank, run.incident_log.note
        for number, fault in self._faults.items():
            if isinstance(fault, BadRow):
                self._strike(number, fault, 0)
        run.hooks.insert(0, self)
        run.updater.clipper.changes.append(partial(self._in_training, "gradients"))
        if run.backend.objective is not None:
            run.backend.objective.changes.append(partial(self._in_training, "loss"))

    def before_update(self) -> None:
        if self._strikes_at(self._run.state.clock.tick + 1):
            self._run.settle()  # a fault strikes once: what the last update holds could drop the next one

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        self.tick = update.tick
        if len(update.inputs) == 1:
            if self._strikes_at(self.tick):
                self._run.ring.copier.before_change()  # a device may still be copying what it spoils
            self.spoiled("state", self._run.state)
        update.inputs[-1] = self.spoiled("batch", update.inputs[-1])
        yield

    def rate_factor(self) -> float:
        factor = 1.0
        for number, fault in self._faults.items():
            if isinstance(fault, HotLr):
                began = [start for start in fault.at if start <= self.tick < start + fault.updates]
                if began:
                    self._strike(number, fault, began[-1])
                    factor *= fault.factor if fault.rank in ("all", self.rank) else 1.0
        return factor

    def spoiled(self, what: str, thing: Any) -> Any:
        """Return a batch, a loss, gradients or a state as the faults leave it that strike there at this tick.

        They strike in all micro-batches, and again where the tick is retried, except those of the state, which stay.
        """
        for number, fault in self._faults.items():
            if not isinstance(fault, TickFault) or fault.spoils != what or self.tick not in fault.at:
                continue
            is_first = self._strike(number, fault, self.tick)
            if fault.rank in ("all", self.rank) and (is_first or what != "state"):
                thing = fault.spoil(thing, self.tick)
        return thing

    def _in_training(self, what: str, thing: Any) -> Any:
        """Let faults strike while an update is computed, not in replays and trials, which come later."""
        return self.spoiled(what, thing) if self.tick == self._run.state.clock.tick + 1 else thing

    def _strikes_at(self, tick: int) -> bool:
        """Say whether a fault begins at this tick. The tick must then not be lost to a rewind of an earlier update."""
        return any(isinstance(fault, TickFault) and tick in fault.at for fault in self._faults.values())

    def _strike(self, number: int, fault: Fault, tick: float) -> bool:
        """Journal that a fault strikes, before it does; False if it did at this tick already."""
        if (number, tick) in self._struck:
            return False
        self._struck.add((number, tick))
        self._note("drill_fired", name=fault.name, tick=tick)
        log.info("drill: %s, on purpose%s", fault.name, f", at tick {tick}" if tick else "")
        return True
