"""The command: `resilient-train` and `python -m resilient_train`. Its first word is a verb, or it trains."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module

from resilient_train.ranks.process_exit import (
    exit_on_request,
    exit_with_agent,
    ignore_requests,
    warn_of_running_threads,
)

VERBS = ("incidents", "checkpoints", "status", "sync")


def main() -> None:
    """Do what the command line says."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working directory was removed: change to one that is there", file=sys.stderr)
        sys.exit(2)
    if sys.argv[1:2] and sys.argv[1] in VERBS:
        sys.exit(_read(*sys.argv[1:]))
    exit_with_agent()
    exit_on_request()
    from resilient_train.app import command  # takes seconds, in which a person may change their mind

    try:
        command.main()
    finally:
        ignore_requests()
        warn_of_running_threads()


def _read(verb: str, *words: str) -> int:
    """Answer a verb: it looks at a run directory, and trains nothing."""
    from resilient_train.app.streams import while_heard

    try:
        return while_heard(partial(import_module(f"resilient_train.app.{verb}").main, list(words)))
    except KeyboardInterrupt:
        return 0 if verb == "incidents" else 1  # who ends --follow has read enough


if __name__ == "__main__":
    main()
