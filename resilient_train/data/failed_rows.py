"""Rows that cannot be fetched: tries again, which rows are to blame, and the batch without them."""

from __future__ import annotations

import errno
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from resilient_train.data.rows import RepeatableBatches
from resilient_train.data.stream import Key, Stream
from resilient_train.errors import StorageFailed, in_one_line
from resilient_train.secrets import masked

_log = logging.getLogger("resilient_train")

PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # before each further try: for an update, not for each of its rows
_BEAT_S = 0.5

# Of the file, or of this machine: the next try would fail alike.
_LASTING = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EINVAL, errno.EBADF, errno.EEXIST, errno.EROFS, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}


def no_watchdog() -> None:
    """What is called while fetches are retried, where nothing watches for hangs."""


def may_pass(error: BaseException | None) -> bool:
    """Say whether an error, or what it came of, is one of storage or of a connection that may come back.

    Libraries have exceptions of their own for these, by whose names they are known, and some keep the number of the
    system's error in their text only. An OSError without one, such as that of a truncated picture, is of the content.
    """
    while error is not None:
        if any("Timeout" in kind.__name__ or "Connection" in kind.__name__ for kind in type(error).__mro__):
            return True
        if isinstance(error, OSError):
            text = re.search(r"errno\W+(\d+)", str(error), re.IGNORECASE)
            number = error.errno or (int(text[1]) if text else None)
            if number is not None and number not in _LASTING:
                return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class Retries:
    """The tries that one update is given."""

    def __init__(self, beat: Callable[[], None] = no_watchdog) -> None:
        self.beat, self.pauses = beat, 0

    def pause(self, error: BaseException, what: str = "a fetch") -> bool:
        """Pause before another try; False where that would not help, or there were enough."""
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


_DRAWS = 5  # of others to put in; after that the data set, or the collate function, is broken as a whole
_FEW = 3  # others in all draws but the first: the fewer, the likelier that none of them is bad itself
_LONGEST = 300  # characters of an error
_STORM = 4  # rows of a micro-batch that the storage fails to give; if they are a quarter of it, no row is bad

# Whose frames are not the user's. By package: a user's own code may well be installed.
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "torchaudio", "torchdata", "accelerate", "transformers", "tokenizers", "datasets"),
    *("numpy", "scipy", "pandas", "polars", "pyarrow", "sklearn", "PIL", "cv2", "h5py", "soundfile", "librosa"),
}


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that could not be fetched or collated."""

    row: int
    error: str  # in one line: "FileNotFoundError: [Errno 2] ..."
    file: str | None = None  # the user's innermost line; None where only libraries were at work
    line: int | None = None
    may_pass: bool = False  # it was an error of the storage or a connection

    def __str__(self) -> str:
        return self.error if self.file is None else f"{self.error} ({self.file}:{self.line})"


Made = tuple[Any, Sequence[Key], Sequence[FailedRow]]  # a micro-batch, what it was made of, and the rows it is without


def with_substitutes(keys: Sequence[Key], rows: RepeatableBatches, stream: Stream, retries: Retries) -> Made:
    """Make a micro-batch, with others in the places of rows that raise. Where none helps, the error is raised.

    Before rows are blamed, they are fetched again one by one, with pauses where that may help.
    """
    try:
        return rows.collated(keys), keys, ()
    except Exception:
        fetched, raised = fetched_again(keys, rows, retries)
        if not raised:
            with suppress(Exception):
                return rows.of_rows(fetched, keys), keys, ()
        of_storage = [error for error in raised.values() if may_pass(error)]
        what = f"{len(of_storage)} of {len(keys)} rows of a batch could not be fetched"
        if len(of_storage) >= max(_STORM, len(keys) / 4):
            raise StorageFailed(what, in_one_line(of_storage[0])) from of_storage[0]
        retries = Retries(retries.beat)
        for draw in range(_DRAWS):
            others = stream.others(keys, draw, without=raised)[: len(keys) if draw == 0 else _FEW]
            if others and (found := _without_bad_rows(keys, raised, others, rows, retries)) is not None:
                return found
        if of_storage:
            raise StorageFailed(what, in_one_line(of_storage[0])) from of_storage[0]
        raise


def fetched_again(
    keys: Sequence[Key], rows: RepeatableBatches, retries: Retries
) -> tuple[list[Any], dict[int, Exception]]:
    """Fetch rows one by one, those that fail for a moment several times; return what came, and what still raises."""
    fetched: dict[int, Any] = {}  # by their places: the same row may stand at two
    for tries in count(1):
        raised: dict[int, Exception] = {}
        for place, key in enumerate(keys):
            if place not in fetched:
                try:
                    fetched[place] = rows.fetch(key)
                except Exception as error:
                    raised[key.row] = error
                retries.beat()
        passing = next((error for error in raised.values() if may_pass(error)), None)
        at_once = passing is not None and tries == 1
        if not at_once and (passing is None or not retries.pause(passing, f"{len(raised)} of {len(keys)} rows")):
            break
    return [fetched[place] for place in sorted(fetched)], raised


def _without_bad_rows(
    keys: Sequence[Key],
    raised: Mapping[int, Exception],
    others: Sequence[Key],
    rows: RepeatableBatches,
    retries: Retries,
) -> Made | None:
    """Make the batch without rows that raise by themselves, or that do not collate. None: `others` do no better."""

    def mixed(places: Collection[int]) -> list[Key]:
        """The keys with others in these places: as many as before, because a collate function may count on that."""
        left_out = set(places)
        return [others[place % len(others)] if place in left_out else key for place, key in enumerate(keys)]

    def without(places: Collection[int]) -> tuple[Any, Exception | None]:
        try:
            return rows.collated(mixed(places)), None
        except Exception as error:
            if not may_pass(error):
                return None, error
        # Not of these rows: what failed for a moment would be taken as proof that they are bad, or that they are not.
        try:
            fetched, failed = fetched_again(mixed(places), rows, retries)
            return (None, next(iter(failed.values()))) if failed else (rows.of_rows(fetched, mixed(places)), None)
        except Exception as error:
            return None, error

    bad = [place for place, key in enumerate(keys) if key.row in raised]
    batch, error = without(bad)
    if error is not None:
        if without(range(len(keys)))[1] is not None:
            return None
        suspects = [place for place in range(len(keys)) if place not in bad]
        bad += fewest(suspects, lambda more: without([*bad, *more])[1] is None)
        batch, error = without(bad)
    if error is not None:
        return None
    errors = {keys[place].row: raised.get(keys[place].row) for place in bad}
    for place in bad:  # what does not collate raises again if it alone is put back
        row = keys[place].row
        errors[row] = errors[row] or without([one for one in bad if one != place])[1]
    return batch, mixed(bad), [_failed(row, error) for row, error in errors.items() if error is not None]


def fewest(suspects: Sequence[int], works_without: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return the fewest suspects that it works without, by halving. It works without all of them, and not with all."""
    if len(suspects) == 1:
        return list(suspects)
    first, second = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    of_second = [] if works_without(first) else fewest(second, lambda more: works_without([*first, *more]))
    if of_second and works_without(of_second):
        return of_second
    return fewest(first, lambda more: works_without([*of_second, *more])) + of_second


def _failed(row: int, error: Exception) -> FailedRow:
    text = masked(" ".join("".join(traceback.format_exception_only(error)).split()))
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return FailedRow(row, text, *_users_line(error), may_pass=may_pass(error))


def _users_line(error: BaseException) -> tuple[str | None, int | None]:
    """Find the innermost line of the user's own code, which is rather outside of site-packages than inside."""

    def is_users(module: str) -> bool:
        package, _, rest = module.partition(".")
        if package == "resilient_train":
            return rest.startswith("zoo")
        return package not in _LIBRARIES or package == "__main__"

    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame.f_globals.get("__name__", ""))
    ]
    outside = [one for one in lines if not {"site-packages", "dist-packages"} & set(one[0].split("/"))]
    return (outside or lines)[-1] if lines else (None, None)
