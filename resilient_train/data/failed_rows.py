"""Rows that cannot be fetched: retries, which rows are to blame, and the batch without them."""

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

PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # before each retry of an update, not of each of its rows
_BEAT_S = 0.5

# Errors of the file or of this machine: a retry would fail the same way.
_LASTING = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EINVAL, errno.EBADF, errno.EEXIST, errno.EROFS, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
_DRAWS = 5  # of substitutes; after that the data set, or the collate function, is broken as a whole
_FEW = 3  # substitutes in all draws but the first: the fewer, the likelier that none of them is bad itself
_LONGEST = 300  # characters of an error
_STORM = 4  # rows of a micro-batch that the storage fails to return; if they are a quarter of it, no row is bad

# Packages that are not the user's code. By package, because a user's own code may be installed as well.
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "torchaudio", "torchdata", "accelerate", "transformers", "tokenizers", "datasets"),
    *("numpy", "scipy", "pandas", "polars", "pyarrow", "sklearn", "PIL", "cv2", "h5py", "soundfile", "librosa"),
}


def no_watchdog() -> None:
    """Called while fetches are retried, if no watchdog waits for a sign of life."""


def may_pass(error: BaseException | None) -> bool:
    """Say whether an error, or its cause, is one of storage or of a connection, and may not come again.

    Libraries have their own exceptions for these, which are recognized by name, and some have the system's error
    number in their text only. An OSError without a number, as for a truncated picture, is about the content.
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
    """The retries that one update may use."""

    def __init__(self, beat: Callable[[], None] = no_watchdog) -> None:
        self.beat, self.pauses = beat, 0

    def pause(self, error: BaseException, what: str = "a fetch") -> bool:
        """Pause before a retry; return False if a retry cannot help, or none is left."""
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


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that could not be fetched or collated."""

    row: int
    error: str  # in one line: "FileNotFoundError: [Errno 2] ..."
    file: str | None = None  # of the user's innermost line; None if the traceback has only libraries
    line: int | None = None
    may_pass: bool = False  # whether it was an error of the storage or a connection

    def __str__(self) -> str:
        return self.error if self.file is None else f"{self.error} ({self.file}:{self.line})"


Made = tuple[Any, Sequence[Key], Sequence[FailedRow]]  # a micro-batch, the keys of its rows, and rows that failed


def with_substitutes(keys: Sequence[Key], rows: RepeatableBatches, stream: Stream, retries: Retries) -> Made:
    """Make a micro-batch, with other rows in the places of rows that raise. Raises the error if no others help.

    Before rows are blamed, they are fetched again one by one, with pauses if that may help.
    """
    try:
        return rows.collated(keys), keys, ()
    except Exception:
        fetched, raised = fetched_again(keys, rows, retries)
        if not raised:
            with suppress(Exception):
                return rows.of_rows(fetched, keys), keys, ()
        of_storage = [error for error in raised.values() if may_pass(error)]
        if len(of_storage) < max(_STORM, len(keys) / 4):
            retries = Retries(retries.beat)
            for draw in range(_DRAWS):
                others = stream.others(keys, draw, without=raised)[: len(keys) if draw == 0 else _FEW]
                if others and (found := _without_bad_rows(keys, raised, others, rows, retries)) is not None:
                    return found
        if of_storage:
            what = f"{len(of_storage)} of {len(keys)} rows of a batch could not be fetched"
            raise StorageFailed(what, in_one_line(of_storage[0])) from of_storage[0]
        raise


def fetched_again(
    keys: Sequence[Key], rows: RepeatableBatches, retries: Retries
) -> tuple[list[Any], dict[int, Exception]]:
    """Fetch rows one by one, with retries. Returns the fetched rows, and the errors of the others by row."""
    fetched: dict[int, Any] = {}  # by place: a row may be at two places
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
        if passing is None or (tries > 1 and not retries.pause(passing, f"{len(raised)} of {len(keys)} rows")):
            break
    return [fetched[place] for place in sorted(fetched)], raised


def _without_bad_rows(
    keys: Sequence[Key],
    raised: Mapping[int, Exception],
    others: Sequence[Key],
    rows: RepeatableBatches,
    retries: Retries,
) -> Made | None:
    """Make the batch without rows that raise by themselves, or that do not collate; None if `others` raise as well."""

    def mixed(places: Collection[int]) -> list[Key]:
        """Put others in these places: as many rows as before, because a collate function may rely on their number."""
        left_out = set(places)
        return [others[place % len(others)] if place in left_out else key for place, key in enumerate(keys)]

    def without(places: Collection[int]) -> tuple[Any, Exception | None]:
        try:
            # With retries: an error that passes would be taken as proof that rows are bad, or that they are not.
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
    for place in bad:  # a row that does not collate raises again if it alone is put back
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
    """Name a row with its error and the innermost line of the user's code, preferably outside of site-packages."""
    lines: list[tuple[str, int]] = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if rest.startswith("zoo") if package == "resilient_train" else package not in _LIBRARIES:
            lines.append((frame.f_code.co_filename, number))
    outside = [one for one in lines if not {"site-packages", "dist-packages"} & set(one[0].split("/"))]
    file, line = (outside or lines)[-1] if lines else (None, None)
    text = masked(" ".join("".join(traceback.format_exception_only(error)).split()))
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return FailedRow(row, text, file, line, may_pass(error))
