"""The samples of a run: one update's worth at a time, from any position."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from operator import itemgetter
from traceback import clear_frames, walk_tb
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from resilient_train.core.transaction import Update
from resilient_train.data.rows import (
    Collate,
    FailedRow,
    RepeatableBatches,
    Retries,
    no_watchdog,
    with_substitutes,
)
from resilient_train.data.stream import Key, Ranges, Span, Stream
from resilient_train.ground.errors import in_one_line
from resilient_train.ground.wording import log
from resilient_train.processes.process_exit import exit_with_parent

_MOST_SAMPLES = 2**24  # samples of one process in an update


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
        if rest or not 0 < mine <= _MOST_SAMPLES:
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
    beat: Callable[[], None] = staticmethod(no_watchdog)  # called while fetches are retried, or a place is looked for
    rows: int = 0
    is_fed: bool = False  # a trainer fetches them, and makes its updates itself
    sees_now: bool = False  # see `as_of_now`
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
        self.skipped.add(start, stop)
        self._batches = None

    def skip_only(self, spans: Iterable[Sequence[int]]) -> None:
        self._batches, self.skipped.spans, self.skipped.added = None, [], []
        for start, stop in spans:
            self.skipped.add(start, stop)

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

    @contextmanager
    def as_of_now(self) -> Iterator[None]:
        """Let replays in a block see the counts of a trainer as they are, not as they were before each update."""
        self.sees_now = True
        try:
            yield
        finally:
            self.sees_now = False

    def quarantine(self, rows: Iterable[int]) -> None:
        """Put others in the places of these rows from now on, after rewinds too."""
        self.stream.quarantine(rows)
        self._batches = None

    def rows_at(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the rows at these positions; none if they have no index."""
        places = [at for at in range(start, stop) if self.skipped.end_at(at) == at]
        return tuple(sorted({key.row for at in places for key in self.stream.take(at, 1).keys}))

    def keys_at(self, start: int) -> list[Sequence[Key]]:
        return self.slicing.of_this_rank(self.stream.take(start, self.slicing.samples).keys)

    def starts(self, after: int, samples: int) -> list[int]:
        """Return where the updates that follow the one at `after` begin, within `samples` samples."""
        each, found = self.slicing.samples, [after]
        while len(found) * each < samples:
            found.append(self.stream.take(found[-1], each).stop)
        return found[1:]

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
        return self.stream.others([*islice(cycle(keys), max(least, len(keys)))], draw)


class MapSamples(Samples):
    """Samples of a map-style data set: it can jump to any position."""

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
        self.dataset, self.slicing, self.collate = dataset, slicing, collate
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.stream, self.rows, self.skipped = stream, stream.rows, stream.skipped
        self.position = 0
        self._fetcher = RepeatableBatches(dataset, collate)
        self._plan = _Plan(stream, slicing)
        self._loader: DataLoader[Any] | None = None
        self._trouble_until: int | None = None  # the end of the last update that took a second try

    def next_update(self) -> Update:
        """An error from a worker does not say which row raised it: the rows are then fetched again in this process."""
        try:
            if self._batches is None:
                self._batches = self._start()
            batches = [next(self._batches) for _ in range(self.slicing.accumulation)]
        except Exception as error:
            trouble = in_one_line(error)
            clear_frames(error.__traceback__)  # torch's hold the error: a cycle that would keep the workers alive
            # What a worker passes on is raised by torch's `reraise`, perhaps in words of the exception's own. Any other
            # error is the worker's own: it dies or is dead.
            is_passed_on = any(frame.f_code.co_name == "reraise" for frame, _ in walk_tb(error.__traceback__))
            lost_worker = self.num_workers > 0 and not is_passed_on
        else:
            planned = self._plan.ahead.popleft()
            assert planned.start >= self.position
            self.position = planned.stop
            return Update(planned.start, planned.stop, batches, self.slicing.of_this_rank(planned.keys))
        return self._fetched_here(trouble, lost_worker=lost_worker)

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

    def _fetched_here(self, trouble: str, *, lost_worker: bool) -> Update:
        """Make the next update in this process, row by row if necessary. Workers start again after it."""
        self._batches, retries = None, Retries(self.beat)
        span = self.stream.take(self.position, self.slicing.samples)
        batches, keys, failed = [], [], dict[int, FailedRow]()
        for some in self.slicing.of_this_rank(span.keys):
            batch, mixed, bad = with_substitutes(some, self.stream, self._fetcher, retries)
            batches.append(batch)
            keys.append(mixed)
            failed |= {row.row: row for row in bad}
        if not failed:  # a worker that died, a disk that was away for a moment
            is_again, is_first = self._trouble_until == span.start, self._trouble_until is None
            # Rows that fail now and then are reported once; the death of a worker costs seconds every time.
            if is_first or retries.pauses or (lost_worker and not is_again):
                log.warning("data: %s; the same rows arrived at another try, and training continues", trouble)
            self._trouble_until = span.stop
            if lost_worker:
                self._loader = None  # a loader that has lost a worker cannot be iterated again
                if is_again:
                    self.num_workers = 0
                    why = "workers fail at once, for example because shared memory is missing"
                    log.warning("data: %s: rows are fetched without them", why)
        self.position = span.stop
        return Update(span.start, span.stop, batches, keys, tuple(failed.values()))


class _Plan:
    """The keys of each micro-batch from `start` on, for the workers; it draws no random numbers. Not the samples: with
    the loader they would be a cycle, which keeps the workers alive.
    """

    def __init__(self, stream: Stream, slicing: Slicing) -> None:
        self.stream, self.slicing, self.start = stream, slicing, 0
        self.ahead: deque[Span] = deque()  # updates planned for the workers, not trained on yet

    def __iter__(self) -> Iterator[Sequence[Key]]:
        position = self.start
        self.ahead.clear()
        while True:
            span = self.stream.take(position, self.slicing.samples)
            self.ahead.append(span)
            yield from self.slicing.of_this_rank(span.keys)
            position = span.stop


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
