"""The indices of the rows in each batch of somebody else's loader."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, skip_first_batches
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from resilient_train.core.randomness import preserved
from resilient_train.data.fed import UNKNOWN, Drawn
from resilient_train.data.rows import FailedRow, RepeatableBatches, Retries, with_substitutes
from resilient_train.data.sequential import LoaderSamples
from resilient_train.data.stream import Key, Stream
from resilient_train.ground.errors import StorageFailed


class _Like:
    """Has what `own` has, but for what a class that is derived from this does in another way."""

    own: Any

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, key: Any) -> Any:
        return self.own[key]

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # not there yet: this is unpickled, from a worker or in one
            raise AttributeError(name)
        return getattr(self.own, name)


class NumberedBatch(_Like):
    """A batch and the indices of its rows, which a callback that takes it from the loader can read as the batch."""

    def __init__(self, batch: Any, drawn: Drawn) -> None:
        self.own, self.drawn = batch, drawn

    def __iter__(self) -> Iterator[Any]:
        return iter(self.own)

    def to(self, device: Any, non_blocking: bool = False, **more: Any) -> NumberedBatch:
        return NumberedBatch(send_to_device(self.own, device, non_blocking=non_blocking), self.drawn)

    def pin_memory(self, *device: Any) -> NumberedBatch:
        return NumberedBatch(pinned(self.own, *device), self.drawn)  # type: ignore[no-untyped-call]


def unnumbered(batch: Any) -> tuple[Any, Drawn]:
    return (batch.own, batch.drawn) if isinstance(batch, NumberedBatch) else (batch, UNKNOWN)


class _NumberedRows(_Like):
    def __init__(self, dataset: Any) -> None:
        self.own = dataset

    def __getitems__(self, rows: Sequence[Any]) -> list[Any]:
        return [*rows]  # `_NumberedCollate` fetches them

    def __setattr__(self, name: str, value: Any) -> None:
        """Change the data set: a callback may do so through its loader."""
        setattr(self.own, name, value) if name != "own" else super().__setattr__(name, value)


class _NumberedCollate:
    """Fetches rows by their indices, too, and puts others in the places of those that raise."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.collate, self._count, self._rows = collate, len(dataset), RepeatableBatches(dataset, collate)

    def __call__(self, rows: list[Any]) -> Any:
        try:
            numbers = [operator.index(row) for row in rows]
        except TypeError:  # a sampler may draw names or tuples
            numbers = []
        if not numbers or not all(0 <= one < self._count for one in numbers):
            return self.collate(self._rows.plain(rows))
        failed: Sequence[FailedRow] = ()
        try:
            batch = self.collate(self._rows.plain(rows))
        except Exception as error:
            keys, others = [Key(0, 0, one) for one in numbers], Stream(self._count, 0)
            try:
                with preserved(torch.device("cpu")):
                    batch, _, failed = with_substitutes(keys, others, self._rows, Retries())
            except StorageFailed:
                raise error  # noqa: B904  # which a worker can pass on
        return NumberedBatch(batch, (numbers, failed))


def number_rows(loader: Any) -> tuple[Any, Callable[[list[Any]], Any]] | None:
    """Make a loader yield a `NumberedBatch`; return its data set and how it makes a batch of rows.

    None, and the loader stays as it is, where rows have no index: of an iterable data set, or a loader without batches,
    or one that fetches on one rank what it cuts up for all. The index comes with the row, so it is right for any
    sampler, order and number of workers; a batch whose rows have other keys stays as it is.
    """
    if isinstance(loader, DataLoaderDispatcher):
        return None
    base = getattr(loader, "base_dataloader", loader)  # of a loader that Accelerate has prepared
    dataset, collate = getattr(base, "dataset", None), getattr(base, "collate_fn", None)
    has_index = hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__")
    has_index &= not isinstance(dataset, IterableDataset)  # torch's class has __getitem__, which raises
    if dataset is None or not has_index or collate is None or getattr(base, "batch_sampler", None) is None:
        return None
    if isinstance(dataset, _NumberedRows):  # the trainer keeps its loader
        return dataset.own, collate.collate
    base.__dict__["dataset"] = _NumberedRows(dataset)  # torch's loaders refuse a plain assignment
    base.collate_fn = _NumberedCollate(dataset, collate)
    return dataset, collate


class _Order(_Like):
    """A batch sampler that calls a function before it draws: a new iterator of a loader draws more before that."""

    def __init__(self, batches: Any, prepare: Callable[[], None]) -> None:
        self.own, self._prepare = batches, prepare

    def __iter__(self) -> Iterator[Any]:
        self._prepare()
        yield from self.own


class _NumberedSamples(LoaderSamples):
    """It continues at any batch without fetching those before it, but for two.

    What an epoch depends on is noted at its first batch: the state of the loader's generator, and Accelerate's count.
    """

    def __init__(self, loader: Any, *more: Any, **options: Any) -> None:
        super().__init__(loader, *more, **options)
        base = getattr(loader, "base_dataloader", loader)
        samplers = [base, base.batch_sampler]
        for name in ("batch_sampler", "sampler"):  # of Accelerate's shard, and of torch's
            samplers += [getattr(samplers[-1], name)] if hasattr(samplers[-1], name) else []
        found = [getattr(one, "generator", None) for one in samplers]
        self._generator = next((one for one in found if one is not None), torch.Generator())
        self._iteration = getattr(loader, "iteration", 0)
        self._epoch: Any = None  # the batches before it, the state of its generator, and Accelerate's count
        self._continues = False  # in that epoch
        base.__dict__["batch_sampler"] = _Order(base.batch_sampler, self._prepare)
        base.__dict__["_iterator"] = None  # persistent workers are not the caller's

    def _mark(self) -> Any:
        return self._epoch

    def _load(self, mark: Any) -> None:
        self._epoch = mark
        # The random numbers of the first batch follow those of the order, and Accelerate's loaders are a batch ahead.
        again = min(self.drawn - mark[0], 2)
        self._continues = again > 0
        self.drawn -= again
        for _ in range(again):
            self._next_batch()

    def fetch(self) -> list[tuple[Any, Drawn]]:
        return [unnumbered(batch) for batch, _ in super().fetch()]

    def begun(self) -> Iterator[Any]:
        if not self._continues:
            self._epoch = [self.drawn - 1, None, self._iteration]
        begins, _, self._iteration = self._epoch
        self._continues = False
        passed = self.drawn - 1 - begins
        loader = skip_first_batches(self.loader, passed) if passed else self.loader
        loader.iteration = self._iteration
        self._iteration += 1
        return iter(loader)

    def _prepare(self) -> None:
        begins, state, _ = self._epoch
        if state is None:  # a new epoch: as in a plain loop, its iterator has drawn once before
            state = self._epoch[1] = self._generator.get_state()
        self.seed_for(begins)
        self._generator.set_state(state)


def samples_of(loader: Any, least: Callable[[float], float], *more: Any) -> LoaderSamples:
    """Take the batches of the caller's loader, which stays as it is; their rows are numbered if possible."""
    base = getattr(loader, "base_dataloader", loader)
    if getattr(type(base), "__iter__", None) is DataLoader.__iter__:  # else it may do anything with its batches
        own = copy.copy(loader)
        if base is not loader:
            own.base_dataloader = copy.copy(base)
        if (numbered := number_rows(own)) is not None:
            (dataset, collate), device = numbered, getattr(loader, "device", None)  # where Accelerate puts the batches

            def made(rows: list[Any]) -> Any:
                return collate(rows) if device is None else send_to_device(collate(rows), device)

            return _NumberedSamples(own, *more, dataset=dataset, collate=made, least=least)
    return LoaderSamples(loader, *more, least=least)
