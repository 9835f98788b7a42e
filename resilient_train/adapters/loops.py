"""The caller's loops: an epoch to iterate over, and what is said of a loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from resilient_train.data.samples import Samples
from resilient_train.data.sequential import LoaderSamples
from resilient_train.ranks.world import World
from resilient_train.wording import log


@dataclass(frozen=True)
class Epoch:
    """An epoch, or the rest of one: iterate over it for its micro-batches."""

    number: int  # from 0
    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


def log_cautions(samples: Samples, waits: Iterable[str], *, has_objective: bool) -> None:
    """Say what is missing in a loop. `waits` are optimizers that the gate has to wait for."""
    if isinstance(samples, LoaderSamples) and not samples.rows:
        log.info("data: bad rows have no names here: the update that has them is skipped")
    if waiting := " and ".join(waits):
        log.info("%s: not fused, so each step waits for the device; use fused=True if it is available", waiting)
    if not has_objective:
        log.info("lines of code cannot be named without objective=: what guard.update takes cannot be replayed")


def log_to_stderr(world: World) -> None:
    """Print incidents in a program that has not set up logging."""
    if not log.handlers and log.level == logging.NOTSET and not logging.getLogger().handlers:
        log.setLevel(logging.INFO if world.is_main else logging.ERROR)  # the other ranks would print the same
        log.addHandler(_LastResort())


class _LastResort(logging.Handler):
    """Prints plain lines to stderr, above tqdm's bars, until the program sets up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or getattr(record, "in_file_only", False):
            return
        line = f"resilient_train: {record.getMessage()}"
        if tqdm := sys.modules.get("tqdm"):
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)
