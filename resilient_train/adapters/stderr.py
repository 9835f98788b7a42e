"""What a loop of the caller's prints to stderr: plain lines, and on a terminal one line of progress below them."""

from __future__ import annotations

import atexit
import logging
import sys
import time

from resilient_train.ranks.world import World
from resilient_train.types import Vitals
from resilient_train.wording import DrawnLine, duration, log

_EVERY_S = 1.0


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
        LIVE.clear()
        line = f"resilient_train: {record.getMessage()}"
        if tqdm := sys.modules.get("tqdm"):
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)


class LiveLine:
    """One line of progress at the bottom of a terminal. A loop with a bar of tqdm has none."""

    def __init__(self) -> None:
        self._line = DrawnLine()
        self._drawn, self._tick = 0.0, 0  # when it was drawn last, and after which update

    def show(self, newest: Vitals | None, steps: int | None) -> None:
        """Draw the newest update: called after each one, so it has to be cheap."""
        passed = time.monotonic() - self._drawn
        if newest is None or passed < _EVERY_S:
            return
        updates, self._drawn, self._tick = newest.tick - self._tick, self._drawn + passed, newest.tick
        tqdm = sys.modules.get("tqdm")
        if not (sys.stderr and not sys.stderr.closed and sys.stderr.isatty()) or (tqdm and tqdm.tqdm._instances):
            return
        words = f"step {newest.step:,}" + (f"/{steps:,}" if steps else "")
        words += f"  loss {newest.loss:.4g}  grad {newest.grad_norm:.3g}  lr {newest.lr:.2e}"
        if self._line.is_drawn and updates > 0:
            words += f"  {updates / passed:.3g} steps/s"
            words += f"  {duration((steps - newest.step) * passed / updates)} left" if steps else ""
        self._line.draw(words)

    def clear(self) -> None:
        """Make room for another line."""
        self._line.clear()


LIVE = LiveLine()
atexit.register(LIVE.clear)
