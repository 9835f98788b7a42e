"""Incidents on the terminal of a program that is not ours."""

from __future__ import annotations

import logging
import sys

from resilient_train.ranks.world import World
from resilient_train.wording import log


def speak_up(world: World) -> None:
    """Make incidents visible in a program that has not set up logging; one that has decides for itself."""
    if log.handlers or log.level != logging.NOTSET or logging.getLogger().handlers:
        return
    log.setLevel(logging.INFO if world.is_main else logging.ERROR)  # the others would only say the same
    log.addHandler(_LastResort())


class _LastResort(logging.Handler):
    """Prints plain lines to stderr, above tqdm's bars, and falls silent when the program sets up logging after all."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or getattr(record, "in_file_only", False):
            return
        line = f"resilient_train: {record.getMessage()}"
        if tqdm := sys.modules.get("tqdm"):
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)
