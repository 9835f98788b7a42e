"""The samples of a run: one update's worth at a time, from any position."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from traceback import clear_frames
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from resilient_train.core.transaction import Update
from resilient_train.data.rows import Collate, FailedRow, RepeatableBatches, Retries, with_substitutes
from resilient_train.data.stream import Key, Ranges, Stream
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.wording import log
from resilient_train.processes.process_exit import exit_with_parent


@dataclass(frozen=True)
class Slicing:
    """How an update's samples are split: `batch_size` is per process and micro-batch."""

    batch_size: int
    accumulation: int = 1
    rank: int = 0
    world: int = 1

    @property
    def samples(self) -> int:
        return self.batch_size * self.accumulation * self.world

    def halved(self) -> Slicing | None:
        """Split the same samples into micro-batches of half the size; None if that size is odd."""
        if self.batch_size % 2:
            return None
        return replace(self, batch_size=self.batch_size // 2, accumulation=2 * self.accumulation)

    def for_samples(self, samples: int) -> Slicing | None:
        """Split `samples` samples over the same ranks, in micro-batches no larger than now; None if impossible."""
        mine, rest = divmod(samples, self.world)
        if rest or not mine:
            return None
        least = -(-mine // self.batch_size)
        accumulation = next(count for count in range(least, mine + 1) if mine % count == 0)
        return replace(self, batch_size=mine // accumulation, accumulation=accumulation)

    def of_this_rank(self, samples: Sequence[Any]) -> list[Sequence[Any]]:
        """Slice samples for this rank. Ranks take turns: two, and one that accumulates twice, have the same groups."""
        starts = range(self.rank * self.batch_size, len(samples), self.world * self.batch_size)
        return [samples[start : start + self.batch_size] for start in starts]


class Samples(ABC):
    """A cursor over training data. `rows` is 0 if rows have no index to fetch them by, or to put them in quarantine."""

    position: int
    slicing: Slicing
    skipped: Ranges
    rows: int = 0
    is_fed: bool = False  # a trainer fetches them, and makes its updates itself
    counts_batches: bool = False  # the length of the data is that in micro-batches
    stream: Stream  # the order in which rows come, if they have an index
    _fetcher: RepeatableBatches
    _batches: Iterator[Any] | None = None  # what was fetched ahead, from `position` on

    @property
    def next_start(self) -> int:
        return self.skipped.end_at(self.position)

    @property
    def quarantined(self) -> int:
        return len(self.stream.quarantined) if self.rows else 0

    @abstractmethod
    def next_update(self) -> Update:
        """Fetch the next update's samples and move past them."""

    def go_back(self, update: Update) -> None:
        """Move back to this update, one of the last two."""
        self.position, self._batches = update.start, None

    def skip(self, start: int, stop: int) -> None:
        """Skip these positions from now on, after rewinds too."""
        if not 0 <= start < stop:
            raise ValueError(f"cannot skip [{start}, {stop}): a range needs 0 <= start < stop")
        self.skipped.append([start, stop])
        self._batches = None

    def skip_only(self, spans: Iterable[Sequence[int]]) -> None:
        self.skipped.clear()
        for start, stop in spans:
            self.skip(start, stop)

    def slice_as(self, slicing: Slicing) -> bool:
        """Slice the same samples of an update into other micro-batches from now on; return whether that is possible."""
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._batches = None  # what workers have fetched ahead belongs to another position

    def forget_before(self, position: int) -> None:  # noqa: B027
        """Drop what is kept for updates before a position to which no rewind goes back."""

    def close(self) -> None:
        self._batches = None

    def quarantine(self, rows: Iterable[int]) -> None:
        """Put others in the places of these rows from now on, after rewinds too."""
        self.stream.quarantine(rows)
        self._batches = None

    def rows_at(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the rows at these positions; none if they have no index."""
        return tuple(sorted({key.row for key in self.stream.keys(start, stop)}))

    def keys_at(self, start: int) -> list[Sequence[Key]]:
        return self.slicing.of_this_rank(self.stream.take(start, self.slicing.samples)[2])

    def batches_at(self, start: int) -> list[Any]:
        """Make the micro-batches of an update again, or of one to come."""
        return [self.collated(keys) for keys in self.keys_at(start)]

    def starts(self, after: int, samples: int) -> list[int]:
        """Return where the updates that follow the one at `after` begin, within `samples` samples."""
        each = self.slicing.samples
        return [*range(after + each, after + samples, each)]

    def collated(self, keys: Sequence[Key]) -> Any:
        """Make one micro-batch of these rows as training makes it. Leaves the host's generators in any state."""
        return self._fetcher.collated(keys)

    def fetched(self, key: Key) -> Any:
        """Fetch one row; None if it raises. Leaves the host's generators in any state."""
        try:
            return self._fetcher.fetch(key)
        except Exception:
            return None

    def others(self, keys: Sequence[Key], draw: int, *, least: int = 1) -> list[Key]:
        """Return as many other healthy rows, or `least`, for comparison: the same ones for the same draw."""
        return self.stream.others(([*keys] * least)[: max(least, len(keys))], draw)


class MapSamples(Samples):
    """Samples of a map-style data set: it can jump to any position."""

    def __init__(
        self, dataset: Any, stream: Stream, slicing: Slicing, *, collate: Collate, num_workers: int, pin_memory: bool
    ) -> None:
        self.dataset, self.slicing, self.collate = dataset, slicing, collate
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.stream, self.rows, self.skipped = stream, stream.rows, stream.skipped
        self.position = 0
        self._fetcher = RepeatableBatches(dataset, collate)
        self._plan = _Plan(stream, slicing)
        self._loader: DataLoader[Any] | None = None

    def next_update(self) -> Update:
        """An error from a worker does not say which row raised it: the rows are then fetched again in this process."""
        try:
            if self._batches is None:
                self._batches = self._start()
            batches = [next(self._batches) for _ in range(self.slicing.accumulation)]
        except Exception as error:
            trouble = in_one_line(error)
            clear_frames(error.__traceback__)  # torch's hold the error: a cycle that would keep the workers alive
        else:
            start, stop, keys = self._plan.ahead.popleft()
            assert start >= self.position
            self.position = stop
            return Update(start, stop, batches, self.slicing.of_this_rank(keys))
        return self._fetched_here(trouble)

    def slice_as(self, slicing: Slicing) -> bool:
        self.slicing = self._plan.slicing = slicing
        self._batches = None
        return True

    def close(self) -> None:
        self._batches = self._loader = None

    def _start(self) -> Iterator[Any]:
        self._plan.start = self.position
        if not self.num_workers:  # a loader without workers does the same, and costs 70 us a batch
            batches = map(self.collated, self._plan)
            return map(pinned, batches) if self.pin_memory else batches
        if self._loader is None:
            workers, pins = self.num_workers, self.pin_memory
            self._loader = loader(self.dataset, self._plan, self.collate, num_workers=workers, pin_memory=pins)
        fetching: Any = iter(self._loader)
        if fetching._worker_pids_set:
            # Otherwise torch raises the death of a worker in a signal handler, wherever the training is at the time,
            # and not only where its batch is waited for.
            torch._C._remove_worker_pids(id(fetching))
            fetching._worker_pids_set = False
        return fetching  # type: ignore[no-any-return]

    def _fetched_here(self, trouble: str) -> Update:
        """Make the next update in this process, row by row if necessary. Workers start again after it."""
        self.close()  # a loader that has lost a worker cannot be iterated again
        retries = Retries()
        start, stop, planned = self.stream.take(self.position, self.slicing.samples)
        batches, keys, failed = [], [], dict[int, FailedRow]()
        for some in self.slicing.of_this_rank(planned):
            batch, mixed, bad = with_substitutes(some, self.stream, self._fetcher, retries)
            batches.append(batch)
            keys.append(mixed)
            failed |= {row.row: row for row in bad}
        if not failed:  # a worker that died, a disk that was away for a moment
            log.warning("data: %s; the same rows arrived at another try, and training continues", trouble)
        self.position = stop
        return Update(start, stop, batches, keys, [*failed.values()])


class _Plan:
    """The keys of each micro-batch from `start` on, for the workers; it draws no random numbers. Not the samples: with
    the loader they would be a cycle, which keeps the workers alive.
    """

    def __init__(self, stream: Stream, slicing: Slicing) -> None:
        self.stream, self.slicing, self.start = stream, slicing, 0
        self.ahead = deque[tuple[int, int, list[Key]]]()  # updates planned for the workers, not trained on yet

    def __iter__(self) -> Iterator[Sequence[Key]]:
        position = self.start
        self.ahead.clear()
        while True:
            planned = self.stream.take(position, self.slicing.samples)
            self.ahead.append(planned)
            _, position, keys = planned
            yield from self.slicing.of_this_rank(keys)


def loader(dataset: Any, plan: Any, collate: Collate, *, num_workers: int, pin_memory: bool) -> DataLoader[Any]:
    """Build a loader over micro-batches of keys that never touches the global generators."""
    # Workers of any other thread would end with that thread while the process continues.
    is_main_thread = threading.current_thread() is threading.main_thread()
    return DataLoader(
        RepeatableBatches(dataset, collate),  # type: ignore[arg-type]  # torch only calls its __getitems__
        batch_sampler=plan,
        collate_fn=itemgetter(0),  # the one batch, collated already
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # iter() would draw a seed from the global one
        worker_init_fn=exit_with_parent if is_main_thread else None,  # torch's notice only between rows
    )
