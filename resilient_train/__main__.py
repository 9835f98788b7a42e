"""The door: `python -m resilient_train` and `resilient-train`."""

from __future__ import annotations

import os
import sys

from resilient_train.ranks.leaving import end_with_agent, ignore_requests, leave_when_asked, say_who_stays


def main() -> None:
    """Train as the command line says."""
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working directory was removed: change to one that is there", file=sys.stderr)
        sys.exit(2)
    end_with_agent()
    leave_when_asked()
    from resilient_train import command  # takes seconds, in which a person may change their mind

    try:
        command.main()
    finally:
        ignore_requests()
        say_who_stays()


if __name__ == "__main__":
    main()
