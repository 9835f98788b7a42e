"""Uploads what a run directory holds to MLflow: each entry of the outbox once, and the run as it is now.

Of a run MLflow shows a description, tags and files. All of it may be uploaded again, to the same place.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

from resilient_train.durable.endings import CONFIG, LOOP, last_sign_ms
from resilient_train.durable.incident_log import INCIDENTS
from resilient_train.durable.journal import BEGAN, METRICS, OUTBOX, entries
from resilient_train.ground.sentences import NOTE
from resilient_train.ground.types import fact
from resilient_train.ground.wording import fill, printable, say, tags
from resilient_train.report.connection import MlflowRun
from resilient_train.report.story import Story, block, left, read_story, shortened, things_to_do, verdict

ENTRIES_AT_ONCE = 200

_AS_THEY_ARE = (CONFIG, LOOP, INCIDENTS, "train.log")  # files of the run directory
# Seconds between two descriptions, and how many times as long as one took: with many incidents it takes a second.
_REST_S, _REST = 10.0, 10


class Uploader:
    """Uploads one run directory to one store. Whatever goes wrong raises, and the next call continues there."""

    def __init__(self, run_dir: Path, uri: str, experiment: str, say: Callable[[str], None]) -> None:
        """`say` gets what MLflow will never take."""
        self.run_dir, self._connect = run_dir, partial(MlflowRun, uri, experiment, run_dir, say)
        self._outbox: int | None = None  # the file, locked: one process uploads at a time
        self._run: MlflowRun | None = None
        self._rests_until = 0.0

    def upload(self, *, is_last: bool = False) -> None:
        """Upload all that is there by now: first the entries of the outbox; if it `is_last`, also how the run ended."""
        if self._outbox is None:
            self._outbox = os.open(self.run_dir / OUTBOX, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._outbox, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError("another process is uploading it") from None
        run = self._run = self._run or self._connect()
        self._upload_entries(run, self._outbox)
        began = time.monotonic()
        if is_last or began > self._rests_until:
            self._describe(run, is_last=is_last)
            self._rests_until = time.monotonic() + max(_REST_S, _REST * (time.monotonic() - began))
            if is_last:
                self._upload_files(run)

    def close(self) -> None:
        if self._outbox is not None:
            os.close(self._outbox)

    def _upload_entries(self, run: MlflowRun, outbox: int) -> None:
        end = run.cursor.get("delivered", 0)
        while portion := list(islice(entries(self.run_dir / OUTBOX, end), ENTRIES_AT_ONCE)):
            rows = [entry for entry, _ in portion if entry is not None]
            run.add_metrics(row for row in rows if row["kind"] == METRICS)
            for row in rows:
                if row["kind"] == BEGAN:
                    run.add_params(row["params"])
            end = portion[-1][1]
            with suppress(OSError):  # else a power cut could take it, and other lines its place
                os.fsync(outbox)
            run.cursor.note(delivered=end)

    def _describe(self, run: MlflowRun, *, is_last: bool) -> None:
        story = read_story(self.run_dir)
        is_over = is_last and story.state not in ("running", "none")
        status = story.in_mlflow if is_over else "RUNNING"
        run.describe(status, last_sign_ms(self.run_dir), tags(story.incidents, story.status), note(story))

    def _upload_files(self, run: MlflowRun) -> None:
        for name in _AS_THEY_ARE:
            file = self.run_dir / name  # of a directory that somebody else made it may be anything
            if file.is_file() and not file.is_symlink():
                run.send(run.client.log_artifact, str(file))


_DOTS = "..."
_MARKS = {one: f"\\{one}" for one in "*_[]~"} | {one: f"&#{ord(one)};" for one in "&<>|\\@$¨"} | {"`": ""}

LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_TO_DO, _LONGEST = 3, 300  # things, and characters of each and of a line
_MOST_LINES = 80  # about incidents


def note(story: Story) -> str:
    """Return the description in MLflow, with as many of the newest incidents as fit below its limit."""
    headline, details = verdict(story)
    things = [text(one, _LONGEST) for one in shortened(things_to_do(story), _MOST_TO_DO)]
    values = {
        "headline": text(headline, _LONGEST),
        "things": things,
        "calm": story.chapters and not things,
        "details": text(details, 900),
        "left": "\n".join(f"- {text(line, _LONGEST)}" for line in left(story)),
    }
    newest = [text(" ".join(block(chapter, "line")), _LONGEST) for chapter in story.chapters[:-_MOST_LINES:-1]]
    while True:
        older = len(story.chapters) - len(newest)
        more = [f"{say(fact('older', count=older))}, in `{INCIDENTS}`"] if older else []
        incidents = "\n".join(f"- {line}" for line in [*newest, *more])
        if len(whole := fill(NOTE, values | {"incidents": incidents})) <= LIMIT:
            return whole
        newest.pop()


def text(raw: str, most: int) -> str:
    """Show words as they are, in at most `most` characters of markdown. Never at the start of a line."""
    marks = [_MARKS.get(one, one) for one in printable(" ".join(raw.split()))]
    ends = list(accumulate(map(len, marks)))
    if ends and ends[-1] > most:
        marks = [*marks[: sum(end <= most - len(_DOTS) for end in ends)], _DOTS]
    return "".join(marks)
