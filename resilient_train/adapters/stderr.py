"""What a loop of the caller's prints to stderr: plain lines, and on a terminal one line of progress below them."""

from __future__ import annotations

import atexit
import logging
import shutil
import sys
import time
from contextlib import suppress

from resilient_train.ranks.world import World
from resilient_train.types import Vitals
from resilient_train.wording import duration, log

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
    """One line at the bottom of a terminal that is drawn again and again. A loop with a bar of tqdm has none."""

    def __init__(self) -> None:
        self._width = 0  # of what is drawn
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
        if self._width and updates > 0:
            words += f"  {updates / passed:.3g} steps/s"
            words += f"  {duration((steps - newest.step) * passed / updates)} left" if steps else ""
        words = words[: shutil.get_terminal_size().columns - 1]
        with suppress(OSError, ValueError):  # the terminal is gone, or stderr was closed
            print(f"\r{words:<{self._width}}\r", end="", file=sys.stderr, flush=True)
        self._width = len(words)

    def clear(self) -> None:
        """Make room for another line."""
        if self._width:
            with suppress(OSError, ValueError):
                print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


LIVE = LiveLine()
atexit.register(LIVE.clear)
