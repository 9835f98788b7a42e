"""The command: `resilient-train` and `python -m resilient_train`. Its first word is a verb, or it trains."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from io import TextIOWrapper

from resilient_train.command import VERBS
from resilient_train.processes import process_exit

_EXTRA = ("hydra", "omegaconf", "mlflow", "sklearn")  # packages of the extra `app`


def main() -> None:
    try:
        _do()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _EXTRA:
            raise
        print(f"error: this needs the package {error.name}: pip install 'resilient-train[app]'", file=sys.stderr)
        sys.exit(2)


def _do() -> None:
    verb, *words = sys.argv[1:] or [""]
    if verb in VERBS:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a character of a path
        if verb not in ("sync", "examine"):  # which have sockets, and the user's code
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as any program that prints: `| head -1` ends it
        try:
            sys.exit(import_module(f"resilient_train.command.{verb}").main(words))
        except KeyboardInterrupt:
            sys.exit(0 if verb == "incidents" else 1)  # Ctrl-C is the way to end --follow
    process_exit.exit_with_agent()
    process_exit.exit_on_request()
    from resilient_train.command import command  # takes seconds, during which a request to stop may come

    try:
        command.main()
    finally:
        process_exit.ignore_requests()


if __name__ == "__main__":
    main()
