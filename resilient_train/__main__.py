"""The door: `python -m resilient_train` and `resilient-train`."""

from __future__ import annotations

import sys


def main() -> None:
    """Train as the command line says."""
    try:
        from resilient_train import command  # takes seconds, in which a person may change their mind

        command.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
