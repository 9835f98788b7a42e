"""The caller's loops: an epoch to iterate over, and whether the loop of an older guard still runs."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from resilient_train.data.samples import Samples
from resilient_train.data.sequential import LoaderSamples
from resilient_train.errors import TrainError
from resilient_train.wording import log

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# By run directory, of this process: who reports the run, and the guard, which may be gone.
holders: dict[Path, tuple[Any, weakref.ref[Any]]] = {}


@dataclass(frozen=True)
class Epoch:
    """An epoch, or the rest of one: iterate over it for its micro-batches."""

    number: int  # from 0
    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


def looping_frame() -> int:
    """Identify the frame that iterates over a guard, which is the caller of a generator of ours."""
    return next(id(frame) for frame in _outward(sys._getframe(1)) if not frame.f_code.co_filename.startswith(_OURS))


def close_older(directory: Path) -> bool:
    """Close the guard of this process that has a run directory, unless its loop runs: a notebook runs a cell again.

    An error may have left the loop, and its traceback keeps the guard. False: there is none, or it runs.
    """
    if directory not in holders:
        return False
    reporter, guard = holders[directory][0], holders[directory][1]()
    running = {id(frame) for top in sys._current_frames().values() for frame in _outward(top)}
    if reporter.place.rank or (guard is not None and (guard.looping_frame in running or guard.world.size > 1)):
        return False
    log.info("%s is taken over from a guard of this process whose loop was left", directory)
    if guard is not None:
        guard.stop_now()
        with suppress(TrainError):
            guard.close()
    reporter.left(None)
    reporter.closed(None, sys.maxsize)
    return True


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def cautions(samples: Samples, waits: Iterable[str], *, has_objective: bool) -> Iterator[str]:
    """Say what is missing in a loop. `waits` are optimizers that the gate has to wait for."""
    if isinstance(samples, LoaderSamples) and not samples.rows:
        yield "data: bad rows have no names here: the update that has them is skipped"
    if waiting := " and ".join(waits):
        yield f"{waiting}: not fused, so each step waits for the device; use fused=True if it is available"
    if not has_objective:
        yield "lines of code cannot be named without objective=: what guard.update takes cannot be replayed"
