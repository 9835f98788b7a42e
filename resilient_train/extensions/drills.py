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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from resilient_train.core.protocols import Hook
from resilient_train.core.randomness import preserved
from resilient_train.core.transaction import Transaction
from resilient_train.core.tree import leaves, local_part
from resilient_train.data.trees import rebuilt
from resilient_train.extensions import Extension
from resilient_train.ground.errors import ConfigError, unusable
from resilient_train.ground.reader import is_list, limited, mapping, no_such, read
from resilient_train.ground.wording import counted, log
from resilient_train.parts.run import Run

_APART = 10**12  # firing 3_000000000100 is that of the fault with index 3 at tick 100


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose."""

    name: ClassVar[str]
    seed: int = limited(0, at_least=0)  # of its random numbers
    optional: bool = False  # leave it out, instead of refusing it, if the run has nothing that it could spoil

    def lacks(self, thing: Any) -> str | None:
        """Say why it cannot spoil this; None if it can."""
        return None


@dataclass(frozen=True, kw_only=True)
class TickFault(Fault):
    """A fault at chosen ticks, on one rank or on all."""

    at: Sequence[int] = limited((), at_least=1)  # ticks
    rank: int | Literal["all"] = limited(0, at_least=0)

    spoils: ClassVar[
        str
    ]  # batch, loss, gradients (it is given the weights), rate; state: weights, moments, the process

    def __post_init__(self) -> None:
        if not self.at:
            raise unusable("at", f"{self.name} would never strike: give it ticks, such as [100]")

    def is_on(self, rank: int) -> bool:
        return self.rank in ("all", rank)

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


def _spoiled(tree: Any, new: Callable[[Any], Any], *, first_row: bool = False) -> Any:
    """Copy a batch or a row, in any containers, with its floating-point numbers as `new` says, or its first row's."""

    def change(leaf: Any) -> Any:
        if not _has_fractions(leaf):
            return leaf
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            return type(leaf)(new(leaf))
        twin: Any = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
        where = slice(1) if first_row and leaf.ndim else ...
        twin[where] = new(twin[where])
        return twin

    return rebuilt(tree, change)


def _needs_fractions(name: str, what: str, tree: Any) -> str | None:
    """Say that a batch or a row has nothing to spoil; None if it holds a floating-point number."""
    if any(map(_has_fractions, leaves(tree))):
        return None
    return f"{what} hold no floating-point numbers: {name} needs some; use inf_loss or nan_grad"


@dataclass(frozen=True, kw_only=True)
class NanBatch(TickFault):
    """The first row of each micro-batch is not finite; the data set is fine."""

    name, spoils = "nan_batch", "batch"
    value: Literal["nan", "inf", "-inf"] = "nan"

    def lacks(self, thing: Any) -> str | None:
        return _needs_fractions(self.name, "the batches", thing)

    def spoil(self, thing: Any, tick: int) -> Any:
        return _spoiled(thing, lambda _: float(self.value), first_row=True)


class InfLoss(TickFault):
    """The loss is infinite, and its gradients are NaN."""

    name, spoils = "inf_loss", "loss"

    def spoil(self, thing: Any, tick: int) -> Any:
        return thing * math.inf


@dataclass(frozen=True, kw_only=True)
class LossSpike(TickFault):
    """The loss of one update, and with it its gradients, is multiplied by `factor`."""

    name, spoils = "loss_spike", "loss"
    factor: float = limited(1e4, above=0)

    def spoil(self, thing: Any, tick: int) -> Any:
        return thing * self.factor


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

    def began(self, tick: int) -> int | None:
        """Return the tick at which the hot stretch around `tick` began, the latest if several overlap."""
        return max((start for start in self.at if start <= tick < start + self.updates), default=None)


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by the size of a weight in bytes


@dataclass(frozen=True, kw_only=True)
class BitFlip(TickFault):
    """One bit of one weight flips, as in bad memory: by default the highest of its exponent, so 0.02 becomes 7e36."""

    name, spoils = "bit_flip", "state"
    bit: int | None = limited(None, at_least=0)  # 0 is the lowest of the mantissa

    def lacks(self, thing: Any) -> str | None:
        weights = self._weights(thing.model)
        if not weights:
            return "the model holds no trainable weights of 16, 32 or 64 bits"
        if (bits := min(8 * weight.element_size() for weight in weights)) <= (self.bit or 0):
            return f"bit={self.bit} is none of the {bits} of a weight, which are counted from 0"
        return None

    def spoil(self, thing: Any, tick: int) -> Any:
        weights = self._weights(thing.model)
        place = _draw("place", self.seed, tick) % sum(weight.numel() for weight in weights)
        for weight in weights:
            if place < weight.numel():
                bits = 8 * weight.element_size()
                bit = bits - 2 if self.bit is None else self.bit  # the last one is the sign
                integers = weight.view(_INTEGERS[weight.element_size()])
                integers[np.unravel_index(place, weight.shape)] ^= -(1 << bit) if bit == bits - 1 else 1 << bit
                break
            place -= weight.numel()
        return thing

    def _weights(self, model: torch.nn.Module) -> list[torch.Tensor]:
        weights = [_local(weight) for weight in model.parameters() if weight.requires_grad]
        return [one for one in weights if one.is_floating_point() and one.element_size() > 1 and one.numel()]


_SECOND_MOMENTS = (  # the names in optimizers of torch and transformers
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "row_var", "col_var", "variance"),
    *("exp_avg_sq_row", "exp_avg_sq_col"),
)
_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")


class BadMoments(TickFault):
    """The optimizer's second moments are far too small. If it has none, its momentum is too large."""

    name, spoils = "bad_moments", "state"

    def lacks(self, thing: Any) -> str | None:
        if any(list(_moments(one, (*_SECOND_MOMENTS, *_FIRST_MOMENTS))) for one in thing.optimizers):
            return None
        return "the optimizer has no moments: bad_moments needs one that keeps some, and an update before it"

    def spoil(self, thing: Any, tick: int) -> Any:
        for optimizer in thing.optimizers:
            if second := list(_moments(optimizer, _SECOND_MOMENTS)):
                torch._foreach_mul_(second, 1e-4)
            elif first := list(_moments(optimizer, _FIRST_MOMENTS)):
                torch._foreach_mul_(first, 1e3)
        return thing


def _moments(optimizer: Optimizer, names: Sequence[str]) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (state[name] for name in names if isinstance(state.get(name), torch.Tensor))


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
    share: float = limited(0.01, at_least=0, at_most=1)  # of all rows, at least one, at random; unless `rows` are given
    what: Literal["nan", "inf", "outlier"] = "nan"
    factor: float = limited(1e4, above=0)  # what an outlier is multiplied by

    def __post_init__(self) -> None:
        if not self.rows and not self.share:
            raise unusable("rows", "no row would be bad: name some, such as [17], or a share above 0")

    def chosen(self, count: int) -> frozenset[int]:
        if self.rows:
            return frozenset(self.rows)
        bad = min(count, max(1, round(self.share * count)))
        return frozenset(random.Random(_draw(self.name, self.seed)).sample(range(count), bad))

    def lacks(self, thing: Any) -> str | None:
        kind = type(thing)
        # A torch IterableDataset has a __getitem__, which only raises.
        if isinstance(thing, IterableDataset) or not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
            return f"bad_row needs a map-style data set, and a {kind.__name__} is read from front to back"
        chosen = self.chosen(len(thing))
        if max(chosen) >= len(thing):
            return f"there is no row {max(chosen)}: the data set has {len(thing)}"
        with preserved(torch.device("cpu")):  # an augmentation may draw random numbers
            return _needs_fractions(self.name, "the rows", thing[min(chosen)])

    def spoil(self, row: Any) -> Any:
        return _spoiled(row, lambda numbers: numbers * self.factor if self.what == "outlier" else float(self.what))


class WithBadRows:
    def __init__(self, dataset: Any, fault: BadRow) -> None:
        self.dataset, self.fault = dataset, fault
        self.bad_rows = fault.chosen(len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        row = self.dataset[index]
        return self.fault.spoil(row) if operator.index(index) % len(self) in self.bad_rows else row

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:  # unpickled in a worker, it has no attributes yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


FAULTS: dict[str, type[Fault]] = {
    kind.name: kind for kind in (NanBatch, NanGrad, InfLoss, LossSpike, HotLr, BitFlip, BadMoments, BadRow, Crash, Hang)
}


def parse(node: Mapping[str, Any], *, steps: int) -> list[Fault]:
    """Read `{fault: nan_batch, at: [100]}`, or `{faults: [{nan_batch: {at: [0.1]}}, hot_lr]}` in shares of `steps`."""
    if "fault" in node:
        settings = {key: value for key, value in node.items() if key != "fault"}
        return [_fault("drill", "drill.fault", node["fault"], settings, steps)]
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
        faults.append(_fault(f"{key}.{name}", key, name, {**shared, **(settings or {})}, steps))
    return faults


def _fault(path: str, key: str, name: Any, settings: Mapping[str, Any], steps: int) -> Fault:
    kind = FAULTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise no_such("fault", name, sorted(FAULTS), at=key, value=name)
    settings = {setting: value for setting, value in settings.items() if value is not None}
    if issubclass(kind, TickFault):
        settings["at"] = _ticks(f"{path}.at", settings.get("at", 0.5), steps)
    return read(kind, settings, path)


def _ticks(key: str, at: Any, steps: int) -> list[int]:
    ticks = set()
    for one in at if is_list(at) else [at]:
        if isinstance(one, float) and 0 < one < 1:
            ticks.add(max(1, round(one * steps)))
        elif isinstance(one, bool) or not isinstance(one, int) or one < 1:
            raise ConfigError(key, at, f"{one} is neither a tick (1, 2, ...) nor a fraction of the run between 0 and 1")
        elif one > steps:
            raise ConfigError(key, at, f"the run has only {counted(steps, 'step')}: nothing would strike at tick {one}")
        else:
            ticks.add(one)
    return sorted(ticks)


class Drill(Extension, Hook):
    """Injects faults into a run: `Drill([NanBatch(at=[100], rank=1)], ...)`. All ranks journal a firing at the same
    point, before it acts: so `fired` may wait for the other ranks.
    """

    node = "drill"

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        before: Collection[int] = (),
        fired: Callable[[int, str, int], None] = lambda number, name, tick: None,
    ) -> None:
        """`fired(number, name, tick)` is to be remembered across restarts; `before` are the numbers from then."""
        self._faults = dict(enumerate(faults))
        self._before, self._fired = before, fired
        self._checked: set[int] = set()  # those that found something to spoil
        self._struck: set[int] = set()  # firings of this process
        self.rank = 0
        self.tick = 0  # the newest attempt, from 1: counts attempted updates and never goes back

    @classmethod
    def configured(cls, node: Any, steps: int, history: Any) -> Drill:
        return cls(parse(node, steps=steps), before=history.drills, fired=history.note_drill_fired)

    def build(self, run: Run) -> None:
        if not self._faults:
            return
        self._run, self.rank = run, run.world.rank
        run.hooks.insert(0, self)
        run.updater.clipper.changes.append(partial(self._in_training, "gradients"))
        if run.backend.objective is not None:
            run.backend.objective.changes.append(partial(self._in_training, "loss"))

    def wrapped(self, dataset: Any) -> Any:
        """Return the data set with its bad rows; the data set itself if the drill has none."""
        for index, fault in list(self._faults.items()):
            if isinstance(fault, BadRow) and self._is_possible(index, fault, dataset):
                self._journal_once(index, fault, 0)
                dataset = WithBadRows(dataset, fault)
        return dataset

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
        for index, fault in self._faults.items():
            if isinstance(fault, HotLr) and (began := fault.began(self.tick)) is not None:
                self._journal_once(index, fault, began)
                factor *= fault.factor if fault.is_on(self.rank) else 1.0
        return factor

    def spoiled(self, what: str, thing: Any) -> Any:
        """Return a batch, a loss, gradients or a state as the faults leave it that strike there at this tick.

        They strike in all micro-batches, and again where the tick is retried, except those of the state, which stay.
        A fault that finds nothing to spoil is refused: at the first batch, or where it would strike a state.
        """
        for index, fault in list(self._faults.items()):
            if not isinstance(fault, TickFault) or fault.spoils != what:
                continue
            begins, is_first = self.tick in fault.at, what == "batch" and index not in self._checked
            if not (begins or is_first) or not self._is_possible(index, fault, thing):
                continue
            is_again = self._firing(index, self.tick) in self._struck and what != "state"
            if begins and (is_again or self._journal_once(index, fault, self.tick)) and fault.is_on(self.rank):
                thing = fault.spoil(thing, self.tick)
        return thing

    def _in_training(self, what: str, thing: Any) -> Any:
        """Let faults strike while an update is computed, not in replays and trials, which come later."""
        return self.spoiled(what, thing) if self.tick == self._run.state.clock.tick + 1 else thing

    def _strikes_at(self, tick: int) -> bool:
        """Say whether a fault begins at this tick. The tick must then not be lost to a rewind of an earlier update."""
        return any(isinstance(fault, TickFault) and tick in fault.at for fault in self._faults.values())

    def _firing(self, index: int, tick: int) -> int:
        return tick + index * _APART

    def _journal_once(self, index: int, fault: Fault, tick: int) -> bool:
        number = self._firing(index, tick)
        if number in self._before or number in self._struck:
            return False
        self._fired(number, fault.name, tick)
        self._struck.add(number)
        log.info("drill: %s, on purpose%s", fault.name, f", at tick {tick}" if tick else "")
        return True

    def _is_possible(self, index: int, fault: Fault, thing: Any) -> bool:
        """Raise ConfigError if a fault finds nothing to spoil; leave it out if it is optional."""
        why = fault.lacks(thing)
        if why is None:
            self._checked.add(index)
            return True
        if not fault.optional:
            raise ConfigError("drill", fault.name, why)
        log.warning("drill: %s is left out: %s", fault.name, why)
        del self._faults[index]
        return False
