"""Incidents on the terminal of a program that is not ours."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

from resilient_train.ranks.world import World
from resilient_train.wording import log


def log_to_stderr(world: World) -> None:
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


def warn_if_unused(guard: object, world: World) -> weakref.finalize[Any, Any]:
    """Warn when a guard goes, or its process ends, unless `detach` was called because it has begun."""
    say = log.warning if world.is_main else log.debug
    return weakref.finalize(guard, say, "%s", _UNUSED)


_UNUSED = (
    "this guard has made no update, so it has protected nothing: iterate over guard.batches() and call guard.step or "
    "guard.update; a trainer that steps the optimizer itself is not guarded"
)
