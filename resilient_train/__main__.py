"""The command: `resilient-train` and `python -m resilient_train`. Its first word is a verb, or it trains."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from resilient_train import __version__
from resilient_train.command import VERBS
from resilient_train.processes import process_exit

_EXTRA = ("hydra", "omegaconf", "mlflow", "sklearn")  # packages of the extra `app`


def main() -> None:
    try:
        _do()
    except KeyboardInterrupt:
        sys.exit(0 if sys.argv[1:2] == ["incidents"] else 1)  # Ctrl-C is the way to end --follow
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _EXTRA:
            raise
        print(f"error: this needs the package {error.name}: pip install 'resilient-train[app]'", file=sys.stderr)
        sys.exit(2)


def _do() -> None:
    verb, *words = sys.argv[1:] or [""]
    if verb in VERBS:
        if verb not in ("sync", "examine"):  # which have sockets, and the user's code
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as any program that prints: `| head -1` ends it
        sys.exit(import_module(f"resilient_train.command.{verb}").main(words))
    if verb == "--version":
        print(f"resilient_train {__version__}")  # Hydra would print its own
        return
    process_exit.exit_with_agent()
    from resilient_train.command import command

    try:
        command.main()
    finally:
        for number in process_exit.SIGNALS:  # the process is ending, and a request must not change how
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
