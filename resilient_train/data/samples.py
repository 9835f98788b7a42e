"""The samples of a run and the cursor in them: one update's worth at a time, and back to any position."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from resilient_train.data.failed_rows import FailedRow, Retries, may_pass, no_watchdog, with_substitutes
from resilient_train.data.rows import Collate, RepeatableBatches
from resilient_train.data.stream import Key, Ranges, Span, Stream
from resilient_train.errors import StorageFailed, in_one_line
from resilient_train.ranks.process_exit import exit_with_parent

_log = logging.getLogger("resilient_train")


_MOST = 2**24  # samples of one process in an update
_STORM_UPDATES, _STORM_ROWS = 16, 8  # so many rows of so few updates fail: the storage is to blame, not the rows


@dataclass(frozen=True)
class Slicing:
    """How an update's samples are split: `batch_size` is per process and micro-batch."""

    batch_size: int
    accumulation: int = 1
    rank: int = 0
    world: int = 1

    @property
    def samples(self) -> int:
        """Samples of one update over all ranks and micro-batches."""
        return self.batch_size * self.accumulation * self.world

    def halved(self) -> Slicing | None:
        """The same samples in micro-batches of half the size; None where they cannot be halved."""
        if self.batch_size % 2:
            return None
        return replace(self, batch_size=self.batch_size // 2, accumulation=2 * self.accumulation)

    def for_samples(self, samples: int) -> Slicing | None:
        """Split so many samples per update over these ranks, in micro-batches no larger than now.

        None where they do not divide.
        """
        mine, rest = divmod(samples, self.world)
        if rest or not 0 < mine <= _MOST:
            return None
        least = -(-mine // self.batch_size)
        accumulation = next(count for count in range(least, mine + 1) if mine % count == 0)
        return replace(self, batch_size=mine // accumulation, accumulation=accumulation)

    def of_this_rank(self, samples: Sequence[Any]) -> list[Sequence[Any]]:
        """Slice an update's samples into this rank's micro-batches.

        Ranks take turns, so that two ranks without accumulation and one rank that accumulates twice work on the very
        same groups of samples.
        """
        starts = range(self.rank * self.batch_size, len(samples), self.world * self.batch_size)
        return [samples[start : start + self.batch_size] for start in starts]


@dataclass(frozen=True, slots=True)
class Update:
    """What one update trains on: positions `[start, stop)` of the stream, as this rank's micro-batches."""

    start: int
    stop: int
    batches: list[Any]
    keys: list[Sequence[Key]] = field(default_factory=list)  # what the batches were made of; empty without an index
    failed: tuple[FailedRow, ...] = ()  # rows that raised; this update has others in their places


class Samples(Protocol):
    """A cursor over training data. Its state is the position and whatever else finding it again takes.

    Those whose rows have no index inherit what says so: nothing else than `rows` may be asked of their rows.
    """

    position: int
    slicing: Slicing  # how an update's samples are cut up
    skipped: Ranges  # positions that are passed over
    rows: int = 0  # that have an index, by which they can be fetched again and put in quarantine; 0: none has

    @property
    def next_start(self) -> int:
        """Where the next update's samples begin."""

    def next_update(self, beat: Callable[[], None] = no_watchdog) -> Update:
        """Fetch the next update's samples and move past them. `beat` is called while fetches are retried."""

    def go_back(self, update: Update) -> None:
        """Fetch this update, one of the last two, once more."""

    def skip(self, start: int, stop: int) -> None:
        """Pass over these positions from now on, after rewinds too."""

    def slice_as(self, slicing: Slicing) -> bool:
        """Slice the same samples of an update into other micro-batches from the next one on, if that is possible."""
        return False

    def skipped_spans(self) -> list[tuple[int, int]]:
        """Return the positions that are passed over."""
        return list(self.skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return where the cursor is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the cursor; the next update starts there."""

    def close(self) -> None:
        """Let go of worker processes."""

    def quarantine(self, rows: Iterable[int]) -> None:
        """Put others in the places of these rows from now on, after rewinds too."""
        raise self._no_index()

    def rows_at(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the rows at these positions, as far as rows have an index."""
        return ()

    def keys_at(self, start: int) -> list[Sequence[Key]]:
        """Return what the update at this position is made of on this rank."""
        raise self._no_index()

    def starts(self, after: int, samples: int) -> list[int]:
        """Return where the next updates begin that use so many samples, from the update at `after` on."""
        raise self._no_index()

    def collated(self, keys: Sequence[Key]) -> Any:
        """Make one micro-batch of these rows as training makes it. Leaves the host's generators anywhere."""
        raise self._no_index()

    def fetched(self, key: Key) -> Any:
        """Fetch one row as it comes from the data set. Leaves the host's generators anywhere."""
        raise self._no_index()

    def others(self, keys: Sequence[Key], draw: int) -> list[Key]:
        """Return as many other healthy rows, for comparison: the same ones for the same draw."""
        raise self._no_index()

    def _no_index(self) -> TypeError:
        return TypeError(f"the rows of {type(self).__name__} have no index")


class MapSamples(Samples):
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
        self.dataset, self.stream, self.slicing, self.collate = dataset, stream, slicing, collate
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.rows, self.skipped = stream.rows, stream.skipped
        self.position = 0
        self._here = RepeatableBatches(dataset, collate)
        self._plan = _Plan(stream, slicing)
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._trouble_until: int | None = None  # where the last update ended that could be fetched at a second try only
        self._failed: dict[int, int] = {}  # rows that the storage failed to give, and the positions of their updates

    @property
    def next_start(self) -> int:
        return self.skipped.end_at(self.position)

    def next_update(self, beat: Callable[[], None] = no_watchdog) -> Update:
        """Fetch the next update's samples and move past them; others replace rows that raise, which are named.

        An error that a worker passes on no longer says which rows raised it: that one update is made again here.
        """
        try:
            if self._batches is None:
                self._batches = self._start()
            batches = [next(self._batches) for _ in range(self.slicing.accumulation)]
        except Exception as error:
            trouble = in_one_line(error)  # not the error itself: it would keep workers alive that are to go
            workers = getattr(self._batches, "_workers", [])
            is_of_rows = may_pass(error) and all(one.is_alive() for one in workers)
        else:
            planned = self._plan.ahead.popleft()
            assert planned.start >= self.position
            self.position = planned.stop
            return Update(planned.start, planned.stop, batches, self.slicing.of_this_rank(planned.keys))
        return self._fetched_here(trouble, Retries(beat), is_of_rows=is_of_rows)

    def go_back(self, update: Update) -> None:
        self.load_state_dict({"position": update.start})

    def skip(self, start: int, stop: int) -> None:
        self.skipped.add(start, stop)
        self._batches = None

    def slice_as(self, slicing: Slicing) -> bool:
        self.slicing = slicing
        self._plan, self._batches, self._loader = _Plan(self.stream, slicing), None, None
        return True

    def quarantine(self, rows: Iterable[int]) -> None:
        self.stream.quarantine(rows)
        self._batches = None

    def rows_at(self, start: int, stop: int) -> tuple[int, ...]:
        skipped = {at for low, high in self.skipped for at in range(max(low, start), min(high, stop))}
        places = [at for at in range(start, stop) if at not in skipped]
        return tuple(sorted({key.row for at in places for key in self.stream.take(at, 1).keys}))

    def keys_at(self, start: int) -> list[Sequence[Key]]:
        return self.slicing.of_this_rank(self.stream.take(start, self.slicing.samples).keys)

    def starts(self, after: int, samples: int) -> list[int]:
        each, found = self.slicing.samples, [after]
        while len(found) * each < samples:
            found.append(self.stream.take(found[-1], each).stop)
        return found[1:]

    def collated(self, keys: Sequence[Key]) -> Any:
        return self._here.collated(keys)

    def fetched(self, key: Key) -> Any:
        return self._here.fetch(key)

    def others(self, keys: Sequence[Key], draw: int) -> list[Key]:
        return self.stream.others(keys, draw)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self._batches = None  # what workers have fetched ahead belongs to another place

    def close(self) -> None:
        self._batches = self._loader = None

    def _start(self) -> Iterator[Any]:
        self._plan.start = self.position
        self._plan.ahead.clear()
        if not self.num_workers:
            return _fetched(self._here, self._plan, self.pin_memory)
        if self._loader is None:
            self._loader = loader(
                *(self.dataset, self._plan, self.collate), num_workers=self.num_workers, pin_memory=self.pin_memory
            )
        batches: Any = iter(self._loader)
        if batches._worker_pids_set:
            # Else torch raises the death of a worker in a signal handler, wherever the training is at the time, and
            # not only where its batch is waited for.
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        return batches  # type: ignore[no-any-return]

    def _fetched_here(self, trouble: str, retries: Retries, *, is_of_rows: bool) -> Update:
        """Make the next update in this process, row by row if need be; workers start again after it."""
        self._batches = None
        span = self.stream.take(self.position, self.slicing.samples)
        batches, keys, failed = [], [], dict[int, FailedRow]()
        for some in self.slicing.of_this_rank(span.keys):
            batch, mixed, bad = with_substitutes(some, self._here, self.stream, retries)
            batches.append(batch)
            keys.append(mixed)
            failed |= {row.row: row for row in bad}
        self._require_storage([row for row in failed.values() if row.may_pass], span.start)
        if not failed:
            self._note_trouble(trouble, span.start, span.stop, retries.pauses, is_of_rows=is_of_rows)
        self.position = span.stop
        return Update(span.start, span.stop, batches, keys, tuple(failed.values()))

    def _require_storage(self, failed: Sequence[FailedRow], start: int) -> None:
        """Raise where so many rows fail within a few updates that the rows are not to blame."""
        first = start - _STORM_UPDATES * self.slicing.samples
        self._failed = {row: at for row, at in self._failed.items() if first < at <= start}
        self._failed |= {row.row: start for row in failed}
        if failed and len(self._failed) >= max(_STORM_ROWS, self.slicing.batch_size * self.slicing.accumulation // 2):
            what = f"{len(self._failed)} rows could not be fetched within {_STORM_UPDATES} updates"
            raise StorageFailed(what, failed[0].error)

    def _note_trouble(self, trouble: str, start: int, stop: int, pauses: int, *, is_of_rows: bool) -> None:
        """Continue after trouble that no row is to blame for: a worker that died, a disk that was away for a moment."""
        if self._trouble_until is None or pauses:
            attempt = f"try {pauses + 2}" if pauses else "the second try"
            _log.warning("data: %s; the same rows came at %s, and training goes on", trouble, attempt)
        is_again, self._trouble_until = self._trouble_until == start, stop
        if is_of_rows:
            return
        self._loader = None  # one that has lost a worker cannot be iterated again
        if is_again and self.num_workers:
            self.num_workers = 0
            _log.warning("data: workers fail at once, such as for want of shared memory: rows are fetched without them")


class _Plan:
    """The endless list of this rank's micro-batches from `start` on: the sampler that workers are fed from.

    A function of nothing but the position. It never draws, unlike torch's samplers, so it can begin anywhere.
    """

    def __init__(self, stream: Stream, slicing: Slicing) -> None:
        self.stream, self.slicing = stream, slicing
        self.start = 0
        self.ahead: deque[Span] = deque()  # updates planned ahead for the workers, not trained on yet

    def __iter__(self) -> Iterator[Sequence[Key]]:
        position = self.start
        while True:
            span = self.stream.take(position, self.slicing.samples)
            self.ahead.append(span)
            yield from self.slicing.of_this_rank(span.keys)
            position = span.stop


def _fetched(rows: RepeatableBatches, plan: _Plan, pinned: bool) -> Iterator[Any]:
    """Fetch the micro-batches of a plan here: a loader without workers costs 70 us a batch and does the same."""
    for keys in plan:
        batch = rows.collated(keys)
        yield pin_memory(batch) if pinned else batch  # type: ignore[no-untyped-call]


def loader(dataset: Any, plan: Any, collate: Collate, *, num_workers: int, pin_memory: bool) -> DataLoader[Any]:
    """Build a loader over micro-batches of keys that never touches the global generators."""
    # What the kernel looks at is the thread: any other may end while its process lives on.
    is_of_process = threading.current_thread() is threading.main_thread()
    return DataLoader(
        RepeatableBatches(dataset, collate),  # type: ignore[arg-type]  # has __getitems__, which is all that is asked
        batch_sampler=plan,
        collate_fn=itemgetter(0),  # the one batch, collated already
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # iter() would draw a seed from the global one
        worker_init_fn=_exit_with_parent if is_of_process else None,
    )


def _exit_with_parent(worker: int) -> None:
    """Torch lets a worker notice by itself that its process has ended: not while it is busy with a row."""
    exit_with_parent()
