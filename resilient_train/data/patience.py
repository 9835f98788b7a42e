"""A data set that fails for a moment: which errors are worth waiting for, and for how long."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable

from resilient_train.errors import in_one_line

_log = logging.getLogger("resilient_train")

PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # before each further try: for an update, not for each of its rows
_BEAT_S = 0.5

# Of the file, or of this machine: the next try would meet the same.
_LASTING = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EINVAL, errno.EBADF, errno.EEXIST, errno.EROFS, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}


def unwatched() -> None:
    """No watchdog to reassure."""


def may_pass(error: BaseException | None) -> bool:
    """Say whether an error, or what it came of, is one of storage or of a connection that may come back.

    Libraries have exceptions of their own for these, by whose names they are known, and some keep the number of the
    system's error in their text only. An OSError without one, such as that of a truncated picture, is of the content.
    """
    while error is not None:
        if any("Timeout" in kind.__name__ or "Connection" in kind.__name__ for kind in type(error).__mro__):
            return True
        if isinstance(error, OSError):
            told = re.search(r"errno\W+(\d+)", str(error), re.IGNORECASE)
            number = error.errno or (int(told[1]) if told else None)
            if number is not None and number not in _LASTING:
                return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class Patience:
    """The tries that one update is given."""

    def __init__(self, beat: Callable[[], None] = unwatched) -> None:
        self.beat, self.pauses = beat, 0

    def waits(self, error: BaseException, what: str = "a fetch") -> bool:
        """Pause before another try; False where that would not help, or was tried often enough."""
        if self.pauses == len(PAUSES_S) or not may_pass(error):
            return False
        pause = PAUSES_S[self.pauses]
        _log.warning("data: %s failed (%s): tried again in %g s", what, in_one_line(error), pause)
        until = time.monotonic() + pause
        while (left := until - time.monotonic()) > 0:
            self.beat()
            time.sleep(min(left, _BEAT_S))
        self.beat()
        self.pauses += 1
        return True
