"""Uploads what a run directory holds to MLflow: each entry of the outbox once, and the run as it is now."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from resilient_train.files import MOST_BYTES
from resilient_train.record.endings import (
    CONFIG,
    LOOP,
    SUMMARY,
    at_work,
    ended_as,
    is_run,
    last_sign_ms,
    loop_of,
    read_ending,
)
from resilient_train.record.incident_log import INCIDENTS
from resilient_train.record.journal import JOURNAL, Entry, entries, entries_after, plain
from resilient_train.record.outbox import (
    ARTIFACT,
    BEGAN,
    ENDED,
    METRICS,
    OUTBOX,
    PARAMS,
    Outbox,
    seal_before,
)
from resilient_train.record.progress import position_of
from resilient_train.tracking.connection import (
    Connection,
    Store,
    TrackedRun,
    UploadCursor,
    batches,
    connect,
    is_refusal,
    is_unreachable,
    root_cause,
)
from resilient_train.tracking.presentation import Presentation
from resilient_train.tracking.story import read_story

ENTRIES_AT_ONCE = 200
_STATUSES = {"completed": "FINISHED", "ended": "FINISHED", "closed": "FINISHED"}
_STATUSES |= {"preempted": "KILLED", "killed": "KILLED"}  # all others: FAILED
_WRITE_WITHIN_S = 30.0


class Busy(Exception):
    """Another process is uploading the same outbox."""


def _locked(outbox: Path, flags: int) -> int:
    """Open an outbox, and lock it for this process; the kernel releases the lock with the process."""
    lock = os.open(outbox, flags | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise Busy("another process is uploading it") from None
    return lock


class Uploader:
    """Uploads one run directory to one store. Whatever goes wrong raises, and the next call continues there."""

    def __init__(
        self, run_dir: Path, store: Store, experiment: str, on_progress: Callable[[int], None] = lambda entries: None
    ) -> None:
        self.run_dir, self.outbox = run_dir, run_dir / OUTBOX
        self.cursor = UploadCursor(run_dir)
        self.uploaded = 0  # entries, by this object
        self.damaged = 0
        self.refused: list[str] = []  # why, for each thing that MLflow will never take
        self.run: TrackedRun | None = None  # once it is reached
        self._store, self._experiment = store, experiment
        self._on_progress = on_progress
        self._reached: tuple[Connection, Presentation] | None = None
        self._lock: int | None = None

    def upload(self, *, is_last: bool = False) -> None:
        """Upload all that is there by now: rows first, then the incidents, then files.

        A failure with one of the later ones does not hold up the others; it is retried with the next call.
        """
        if self._lock is None:
            self._lock = _locked(self.outbox, os.O_RDONLY)
        connection, presentation = self._connected()
        self._upload_rows(connection)
        trouble = presentation.refresh(is_last=is_last)
        for path in self.cursor.get("files", []):
            try:
                self._unless_refused(partial(self._attach, connection, str(path)))
                self.cursor.note(files=[one for one in self.cursor.get("files") if one != path])
            except Exception as error:
                if is_unreachable(error):
                    raise
                trouble = trouble or error
        if trouble is not None:
            raise trouble

    def finish(self) -> None:
        """Upload the rest, and how the run ended."""
        try:
            self.upload(is_last=True)
        finally:  # in spite of a file that cannot be stored
            if self._reached is not None:
                self._end(self._reached[0])
        assert self._reached is not None
        assert self._lock is not None
        size, uploaded = os.fstat(self._lock).st_size, self.cursor.get("delivered", 0)
        if size > uploaded and next(entries(self.outbox, uploaded), None) is None:
            self.damaged += 1  # its last line is cut off
        self._reached[0].forget_twins()

    def close(self) -> None:
        """Let another process upload."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _connected(self) -> tuple[Connection, Presentation]:
        if self._reached is None:
            first = next((entry for entry, _ in entries(self.outbox) if entry is not None), None)
            if first is None:
                raise FileNotFoundError(f"{self.outbox} holds nothing yet")
            earliest = next(entries_after(self.run_dir / JOURNAL), None)
            began = min([first["at"], *([] if earliest is None else [earliest[0]["at"]])])  # see `backfill`
            connection = connect(self._store, self._experiment, self.cursor, self.outbox, began)
            if self.cursor.get("seal") != seal_before(self.outbox, self.cursor.get("delivered", 0)):
                self.cursor.note(delivered=0)  # a power cut took the end of it, and other lines took its place
            self._reached = connection, Presentation(connection, self.run_dir, self._unless_refused)
            self.run = connection.run
        return self._reached

    def _upload_rows(self, connection: Connection) -> None:
        while portion := list(islice(entries(self.outbox, self.cursor.get("delivered", 0)), ENTRIES_AT_ONCE)):
            found = [entry for entry, _ in portion if entry is not None]
            self._send(connection, found)
            self.damaged += len(portion) - len(found)
            self.uploaded += len(portion)
            end = portion[-1][1]
            files = dict.fromkeys(self.cursor.get("files", []))  # each is sent as it is then, so once is enough
            files |= dict.fromkeys(str(entry.get("path")) for entry in found if entry["kind"] == ARTIFACT)
            self.cursor.note(delivered=end, seal=seal_before(self.outbox, end), files=list(files))
            self._on_progress(self.uploaded)

    def _send(self, connection: Connection, portion: list[Entry]) -> None:
        client, run_id = connection.client, connection.run_id
        for metrics, params, tags in batches(portion):
            try:
                client.log_batch(run_id, metrics, params, tags)
            except Exception as error:
                if not is_refusal(error):
                    raise
                there = client.get_run(run_id).data.params if params else {}
                if new := [one for one in params if one.key not in there]:  # a parameter keeps its first value
                    self._unless_refused(partial(client.log_batch, run_id, (), new, ()))
                elif not params:
                    self._refuse(root_cause(error))
        for entry in [one for one in portion if one["kind"] in (BEGAN, ENDED)][-1:]:
            if entry["kind"] == BEGAN:
                client.update_run(run_id, status="RUNNING")
            else:
                client.set_terminated(run_id, self._status(str(entry.get("status"))), entry["at"])

    def _end(self, connection: Connection) -> None:
        """Note how a run ended that could not say so itself."""
        ended = ended_as(self.run_dir)
        if ended is None or connection.client.get_run(connection.run_id).info.status != "RUNNING":
            return
        connection.client.set_terminated(connection.run_id, self._status(ended), last_sign_ms(self.run_dir))

    def _status(self, ended: str) -> str:
        """Return MLflow's word for how a run ended: one that is not back at its level has not succeeded."""
        is_off = read_story(self.run_dir).status in ("gave_up", "unrecovered")
        return "FAILED" if is_off else _STATUSES.get(ended, "FAILED")

    def _attach(self, connection: Connection, path: str) -> None:
        """Attach a file of the run. An outbox may come from anywhere: files outside of the directory are not sent."""
        whole = (self.run_dir / path).resolve()
        if not whole.is_relative_to(self.run_dir.resolve()):
            self._refuse(f"{path} is no file of the run")
        elif not whole.is_file():
            self._refuse(f"{path} is gone")
        elif whole.stat().st_size > MOST_BYTES:
            self._refuse(f"{path} is too large to be one that a run has written")
        else:
            connection.client.log_artifact(connection.run_id, str(whole))

    def _unless_refused(self, send: Callable[[], object]) -> None:
        """Do it, and note why where MLflow will never take it. Raises what prevents it for now."""
        try:
            send()
        except Exception as error:
            if not is_refusal(error):
                raise
            self._refuse(root_cause(error))

    def _refuse(self, why: str) -> None:
        if why not in self.refused:
            self.refused.append(why)


# ------------------------------------------------------------------------------------- a run that was not tracked


def needs_backfill(run_dir: Path) -> bool:
    """Say whether the run writes no outbox itself, so that `backfill` has to."""
    try:
        began = [one for one, _ in entries(run_dir / OUTBOX) if one is not None and one["kind"] == BEGAN]
    except OSError:
        return is_run(run_dir)
    if not began:  # killed before its first update
        return is_run(run_dir) and at_work(run_dir) is None
    return began[-1].get("late") is True  # the newest process may have been tracked


def backfill(run_dir: Path, tracking_uri: str, experiment: str) -> None:
    """Add to the outbox what it lacks of the run as it is now, unless another process is uploading it."""
    try:
        lock = _locked(run_dir / OUTBOX, os.O_RDWR | os.O_CREAT)
    except Busy:
        return
    try:
        known = [one for one, _ in entries(run_dir / OUTBOX) if one is not None]
        there = [{key: value for key, value in one.items() if key not in ("n", "at", "crc")} for one in known]
        place = {"tracking_uri": tracking_uri, "experiment": experiment}
        began = {"kind": BEGAN, "name": run_dir.name, **place, "late": True}
        lacks = [one for one in map(plain, [began, *_from_directory(run_dir)]) if one not in there]
        if not lacks:
            return
        box = Outbox(run_dir / OUTBOX)
        for one in lacks:
            if one["kind"] == ENDED and (at := last_sign_ms(run_dir)) is not None:
                one["at"] = at
            box.put(one.pop("kind"), **one)
        if not box.close(_WRITE_WITHIN_S):
            raise OSError(f"{box.path} cannot be written")
    finally:
        os.close(lock)


def _from_directory(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries that a tracked run would have written, as far as its other files tell."""
    if (loop := loop_of(run_dir)) is not None and loop.given:
        yield {"kind": PARAMS, "values": {key: str(value) for key, value in loop.given.items()}}
    if (summary := read_ending(run_dir, SUMMARY)) is not None and type(tick := summary.get("ticks")) is int:
        values = {"loss": summary.get("final_loss"), "step": summary.get("steps")}
        if isinstance(evaluated := summary.get("eval"), Mapping):
            values |= {f"eval/{name}": value for name, value in evaluated.items()}
        values = {name: value for name, value in values.items() if isinstance(value, int | float)}
        yield {"kind": METRICS, "tick": tick, "values": values}
    for name in (CONFIG, LOOP, INCIDENTS, "train.log"):
        if (run_dir / name).is_file():
            yield {"kind": ARTIFACT, "path": name, "bytes": (run_dir / name).stat().st_size}
    if (status := ended_as(run_dir)) is not None and (position := position_of(run_dir)) is not None:
        yield {"kind": ENDED, "status": status, "tick": position.tick}
