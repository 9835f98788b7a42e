"""The samples of a run and the cursor in them: one update's worth at a time, and back to any position."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from resilient_train.data.rows import Collate, RepeatableBatches, only
from resilient_train.data.stream import Key, Span, Stream, micro_batches


@dataclass(frozen=True)
class Slicing:
    """How an update's samples are dealt out: `batch_size` is per process and micro-batch."""

    batch_size: int
    accumulation: int = 1
    rank: int = 0
    world: int = 1

    @property
    def samples(self) -> int:
        """Samples of one update over all ranks and micro-batches."""
        return self.batch_size * self.accumulation * self.world

    def of_this_rank(self, keys: Sequence[Any]) -> list[Sequence[Any]]:
        """Return this rank's micro-batches of an update's samples."""
        return micro_batches(keys, batch_size=self.batch_size, rank=self.rank, world=self.world)


@dataclass(frozen=True, slots=True)
class Update:
    """What one update trains on: positions `[start, stop)` of the stream, as this rank's micro-batches."""

    start: int
    stop: int
    batches: list[Any]


class Samples(Protocol):
    """A cursor over training data. Its state is the position and whatever else finding it again takes."""

    position: int

    def next_update(self) -> Update:
        """Fetch the next update's samples and move behind them."""

    def go_back(self, update: Update) -> None:
        """Fetch this update, one of the last two, once more."""

    def skip(self, start: int, stop: int) -> None:
        """Pass over these positions from now on, after rewinds too."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the cursor stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the cursor; the next update starts there."""

    def close(self) -> None:
        """Let go of worker processes."""


class MapSamples:
    """Samples of a map-style data set: any position is one jump away."""

    def __init__(
        self,
        dataset: Any,
        stream: Stream,
        slicing: Slicing,
        *,
        collate: Collate,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.stream, self.slicing = stream, slicing
        self.position = 0
        self._plan = _Plan(stream, slicing)
        self._fetched: Iterable[Any]
        if num_workers:
            self._fetched = loader(dataset, self._plan, collate, num_workers=num_workers, pin_memory=pin_memory)
        else:
            self._fetched = _Fetched(RepeatableBatches(dataset, collate), self._plan, pin_memory)
        self._batches: Iterator[Any] | None = None

    def next_update(self) -> Update:
        if self._batches is None:
            self._plan.start = self.position
            self._plan.spans.clear()
            self._batches = iter(self._fetched)
        batches = [next(self._batches) for _ in range(self.slicing.accumulation)]
        span = self._plan.spans.popleft()
        assert span.start >= self.position
        self.position = span.stop
        return Update(span.start, span.stop, batches)

    def go_back(self, update: Update) -> None:
        self.load_state_dict({"position": update.start})

    def skip(self, start: int, stop: int) -> None:
        self.stream.skip(start, stop)
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._batches = None  # what workers have fetched ahead belongs to another place

    def close(self) -> None:
        self._batches = None
        del self._fetched


class _Plan:
    """The endless list of this rank's micro-batches from `start` on: the sampler that workers are fed from.

    A function of nothing but the position. It never draws, unlike torch's samplers, so it can begin anywhere.
    """

    def __init__(self, stream: Stream, slicing: Slicing) -> None:
        self.stream, self.slicing = stream, slicing
        self.start = 0
        self.spans: deque[Span] = deque()  # planned ahead for the workers, not trained on yet

    def __iter__(self) -> Iterator[Sequence[Key]]:
        position = self.start
        while True:
            span = self.stream.take(position, self.slicing.samples)
            self.spans.append(span)
            yield from self.slicing.of_this_rank(span.keys)
            position = span.stop


class _Fetched:
    """Micro-batches of a plan, fetched here: a loader without workers costs 70 us a batch and does the same."""

    def __init__(self, batches: RepeatableBatches, plan: _Plan, pin_memory: bool) -> None:
        self.batches, self.plan, self.pin_memory = batches, plan, pin_memory

    def __iter__(self) -> Iterator[Any]:
        for keys in self.plan:
            (batch,) = self.batches.__getitems__(keys)
            yield pin_memory(batch) if self.pin_memory else batch  # type: ignore[no-untyped-call]


def loader(dataset: Any, plan: Any, collate: Collate, *, num_workers: int, pin_memory: bool) -> DataLoader[Any]:
    """Build a loader over micro-batches of keys that never touches the global generators."""
    return DataLoader(
        RepeatableBatches(dataset, collate),  # type: ignore[arg-type]  # has __getitems__, which is all that is asked
        batch_sampler=plan,
        collate_fn=only,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # iter() would draw a seed from the global one
    )
