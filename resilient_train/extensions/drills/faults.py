"""The faults: what each spoils, when, and how it is configured. A BadRow stays in the data; a TickFault strikes at its
ticks only, not again when a rewind repeats their samples.
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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from resilient_train.core.randomness import preserved
from resilient_train.core.tree import local_part
from resilient_train.data.trees import rebuilt
from resilient_train.ground.errors import ConfigError, unusable
from resilient_train.ground.reader import check, is_list, limited, mapping, no_such, read
from resilient_train.ground.wording import counted


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose. Its settings are checked when it is made."""

    name: ClassVar[str]
    seed: int = limited(0, at_least=0)  # of its random numbers
    optional: bool = False  # leave it out, instead of refusing it, if the run has nothing that it could spoil

    def __post_init__(self) -> None:
        check(self)

    def lacks(self, *things: Any) -> str | None:
        """Say why it cannot spoil these things; None if it can."""
        return None


@dataclass(frozen=True, kw_only=True)
class TickFault(Fault):
    """A fault at chosen ticks, on one rank or on all. Each has a method `spoil`."""

    at: Sequence[int] = limited((), at_least=1)  # ticks
    rank: int | Literal["all"] = limited(0, at_least=0)

    spoils: ClassVar[str]  # batch, loss, gradients, rate; state: weights, moments or the process

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.at:
            raise unusable("at", f"{self.name} would never strike: give it ticks, such as [100]")

    def begins(self, tick: int) -> bool:
        return tick in self.at

    def is_on(self, rank: int) -> bool:
        return self.rank in ("all", rank)


def _draw(*parts: object) -> int:
    """Hash to 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_part(tensor.detach())
    return tensor._values() if tensor.is_sparse else tensor


def _spoiled(tree: Any, new: Callable[[Any], Any], *, first_row: bool = False) -> Any:
    """Copy a batch or a row, in any containers, with its floating-point numbers as `new` says, or its first row's."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, float | np.floating):
            return type(leaf)(new(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            twin: Any = leaf.detach().clone()
        elif isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating):
            twin = leaf.copy()
        else:
            return leaf
        where = slice(1) if first_row and leaf.ndim else ...
        twin[where] = new(twin[where])
        return twin

    return rebuilt(tree, change)


def _needs_floats(name: str, what: str, tree: Any) -> str | None:
    """Say that a batch or a row has nothing to spoil; None if it holds a floating-point number."""
    found: list[Any] = []

    def note(numbers: Any) -> Any:
        found.append(numbers)
        return numbers

    _spoiled(tree, note)
    return None if found else f"{what} hold no floating-point numbers: {name} needs some; use inf_loss or nan_grad"


@dataclass(frozen=True, kw_only=True)
class NanBatch(TickFault):
    """The first row of each micro-batch is not finite; the data set is fine."""

    name, spoils = "nan_batch", "batch"
    value: Literal["nan", "inf", "-inf"] = "nan"

    def lacks(self, *things: Any) -> str | None:
        return _needs_floats(self.name, "the batches", things[0])

    def spoil(self, batch: Any) -> Any:
        return _spoiled(batch, lambda _: float(self.value), first_row=True)


class InfLoss(TickFault):
    """The loss is infinite, and its gradients are NaN."""

    name, spoils = "inf_loss", "loss"

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.inf


@dataclass(frozen=True, kw_only=True)
class LossSpike(TickFault):
    """The loss of one update, and with it its gradients, is multiplied by `factor`."""

    name, spoils = "loss_spike", "loss"
    factor: float = limited(1e4, above=0)

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor


class NanGrad(TickFault):
    """One element of one gradient is NaN, though loss and batch are fine."""

    name, spoils = "nan_grad", "gradients"

    def spoil(self, weights: Sequence[torch.Tensor]) -> None:
        for weight in weights:
            if weight.grad is not None and (gradient := _local(weight.grad)).numel():
                gradient[(0,) * gradient.dim()] = math.nan
                return


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

    def lacks(self, *things: Any) -> str | None:
        weights = self._weights(things[0])
        if not weights:
            return "the model holds no trainable weights of 16, 32 or 64 bits"
        if (bits := min(8 * weight.element_size() for weight in weights)) <= (self.bit or 0):
            return f"bit={self.bit} is none of the {bits} of a weight, which are counted from 0"
        return None

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        weights = self._weights(model)
        place = _draw("place", self.seed, tick) % sum(weight.numel() for weight in weights)
        for weight in weights:
            if place < weight.numel():
                bits = 8 * weight.element_size()
                bit = bits - 2 if self.bit is None else self.bit  # the last one is the sign
                integers = weight.view(_INTEGERS[weight.element_size()])
                integers[np.unravel_index(place, weight.shape)] ^= -(1 << bit) if bit == bits - 1 else 1 << bit
                return
            place -= weight.numel()

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

    def lacks(self, *things: Any) -> str | None:
        if any(list(_moments(one, (*_SECOND_MOMENTS, *_FIRST_MOMENTS))) for one in things[1]):
            return None
        return "the optimizer has no moments: bad_moments needs one that keeps some, and an update before it"

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            if second := list(_moments(optimizer, _SECOND_MOMENTS)):
                torch._foreach_mul_(second, 1e-4)
            elif first := list(_moments(optimizer, _FIRST_MOMENTS)):
                torch._foreach_mul_(first, 1e3)


def _moments(optimizer: Optimizer, names: Sequence[str]) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (state[name] for name in names if isinstance(state.get(name), torch.Tensor))


class Crash(TickFault):
    """The process is killed: no handler runs, nothing is flushed."""

    name, spoils = "crash", "state"

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hang(TickFault):
    """The process stops responding, as when a file system does not answer."""

    name, spoils = "hang", "state"

    def spoil(self, tick: int, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> None:
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
        super().__post_init__()
        if not self.rows and not self.share:
            raise unusable("rows", "no row would be bad: name some, such as [17], or a share above 0")

    def chosen(self, count: int) -> frozenset[int]:
        if self.rows:
            return frozenset(self.rows)
        bad = min(count, max(1, round(self.share * count)))
        return frozenset(random.Random(_draw(self.name, self.seed)).sample(range(count), bad))

    def lacks(self, *things: Any) -> str | None:
        (dataset,) = things
        kind = type(dataset)
        # A torch IterableDataset has a __getitem__, which only raises.
        if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
            return f"bad_row needs a map-style data set, and a {kind.__name__} is read from front to back"
        chosen = self.chosen(len(dataset))
        if max(chosen) >= len(dataset):
            return f"there is no row {max(chosen)}: the data set has {len(dataset)}"
        with preserved(torch.device("cpu")):  # an augmentation may draw random numbers
            row = dataset[min(chosen)]
        return _needs_floats(self.name, "the rows", row)

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
