"""`resilient-train sync RUN_DIR`: upload to MLflow what it does not have yet.

It works from any machine that has the directory, and uploads nothing twice. With --follow it uploads while the run
lasts; a tracked run starts such a process itself.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from resilient_train.app import NO_RUN, parser_of
from resilient_train.app.terminal import counting
from resilient_train.errors import TrainError
from resilient_train.record.endings import at_work
from resilient_train.record.journal import entries
from resilient_train.record.outbox import BEGAN, OUTBOX
from resilient_train.secrets import masked
from resilient_train.tracking.connection import Store, UploadCursor, left_in, locate, root_cause
from resilient_train.tracking.review import ui_command, where_to_look
from resilient_train.tracking.tracker import EXPERIMENT
from resilient_train.tracking.uploader import Busy, Uploader, backfill, needs_backfill
from resilient_train.wording import counted

_HELP = """\
Uploads to MLflow what could not be uploaded during the run. Nothing is uploaded twice.
The address of the run is used unless another is given. If it holds a token or a password, which is not written down,
give it again by --uri or MLFLOW_TRACKING_URI, or use MLflow's own variables for them. Those, and
~/.mlflow/credentials, are sent to no address that only the directory names: give it by --uri."""

_EVERY_S = 1.5  # between uploads while a run lasts
_RETRY_AT_MOST_S = 30.0
_PAUSES_S = (2.0, 5.0, 0.0)  # after each attempt to finish
_ATTACHED_PAUSES_S = (1.0, 1.0, 0.0)  # the end of the run waits for it
_SURVIVES_S = 6.0  # how long an attached process may upload what a killed run has left


def main(arguments: list[str] | None = None) -> int:
    """Upload; return 0 if MLflow has everything, 1 if not, 2 if there is nothing to upload or the store is unknown."""
    parser = parser_of("sync", _HELP, "0 if MLflow has everything, 1 if not, 2 if the store is unknown", json="")
    parser.add_argument("--uri", "--tracking-uri", help="another tracking store: sqlite:///file.db, http://host:5000")
    parser.add_argument("--experiment", help="another experiment for the run")
    parser.add_argument("--follow", action="store_true", help="continue to upload until the run has ended")
    parser.add_argument("--attached", action="store_true", help=argparse.SUPPRESS)  # to a run that started it
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)  # of the artifacts of a database
    given = parser.parse_args(arguments)
    has_ended = _attached() if given.attached else partial(_is_idle_after, given.run_dir.absolute())
    try:
        store, experiment, is_late = _destination(given.run_dir, given.uri, given.experiment, attached=given.attached)
    except TrainError as why:
        print(f"{given.run_dir}: {why}", file=sys.stderr)
        return 2
    run_dir = given.run_dir.absolute()
    store = replace(store, home=given.home) if given.home is not None else store
    UploadCursor(run_dir).settle(trains=False)
    late = (lambda: backfill(run_dir, masked(store.uri), experiment)) if is_late else lambda: None
    with counting("uploading", left_in(run_dir)) as on_progress:
        uploader = Uploader(run_dir, store, experiment, on_progress)
        try:
            if given.follow:
                _follow(uploader, has_ended, late, is_attached=given.attached)
            for pause in _ATTACHED_PAUSES_S if given.attached else _PAUSES_S:
                if (trouble := _attempt(late, uploader.finish)) is None:
                    break
                time.sleep(pause)
        finally:
            uploader.close()
    return _report(uploader, store, trouble, is_late=is_late)


def _destination(run_dir: Path, uri: str | None, experiment: str | None, *, attached: bool) -> tuple[Store, str, bool]:
    """Return the store and the experiment of a run: those that it had last, unless others are given.

    And whether the run was not tracked, so that its outbox has to be made from its other files.
    """
    began, is_late = None, not attached and needs_backfill(run_dir)
    try:
        for entry, _ in entries(run_dir / OUTBOX):
            if entry is not None and entry["kind"] == BEGAN:
                began = entry
    except OSError as error:
        if not is_late and not attached:
            is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            raise TrainError(NO_RUN if is_absent else f"{OUTBOX} cannot be read ({error.strerror or error})") from None
    cursor = UploadCursor(run_dir)
    known_uri, known_experiment = cursor.get("tracking_uri"), cursor.get("experiment")
    if began is not None:
        known_uri, known_experiment = str(began.get("tracking_uri")), str(began.get("experiment"))
    experiment = experiment or known_experiment
    asked, from_environment = uri or known_uri, os.environ.get("MLFLOW_TRACKING_URI")
    is_same = attached or known_uri is None or (from_environment and masked(from_environment) == known_uri)
    if uri is None and from_environment and is_same:
        asked = from_environment  # the same place, with its secret
    if is_late:
        asked = asked or locate(None, run_dir.absolute().parent).uri
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if asked is None or experiment is None:
        raise TrainError(f"its {OUTBOX} does not say where to: give --uri and --experiment")
    if "***" in asked:
        raise TrainError(f"the secret in {asked} is not written down: give the address by --uri or MLFLOW_TRACKING_URI")
    store = locate(asked, run_dir.absolute().parent)
    is_only_named = uri is None and asked != from_environment  # by the directory, which may come from anywhere
    if is_only_named and store.database is None and (names := _credentials(store.uri)):
        why = f"only the directory names {masked(asked)}, and {' and '.join(names)} would be sent there"
        what = f"add --uri {shlex.quote(masked(asked))}, or set MLFLOW_TRACKING_URI to it"
        raise TrainError(f"{why}: if that is your server, {what}")
    is_named = uri is not None or attached
    if not is_named and store.database is not None and not store.database.parent.is_dir():
        raise TrainError(f"{store.database} cannot be here, as {store.database.parent} is missing: give --uri")
    return store, experiment, is_late


def _credentials(uri: str) -> list[str]:
    """Return which credentials would be sent to an address. This host is no exception: others may run the server."""
    if urlsplit(uri).scheme.startswith(("postgresql", "mysql")):
        return [name for name in ("PGPASSWORD", "MYSQL_PWD") if os.environ.get(name)]
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
    file = Path("~/.mlflow/credentials").expanduser()
    return [*(name for name in names if os.environ.get(name)), *([str(file)] if file.exists() else [])]


# ------------------------------------------------------------------------------------------------- while the run lasts


def _attached() -> Callable[[float], bool]:
    """Attach this process to the run that started it: a line on the standard input says that the run has ended.

    Requests to stop go to all processes of a run, which still has something to upload then: they are ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ended, parent = threading.Event(), os.getppid()

    def listen() -> None:
        sys.stdin.readline()
        ended.set()

    def survive_briefly() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        ended.set()
        time.sleep(_SURVIVES_S)
        os._exit(1)

    for task in (listen, survive_briefly):
        threading.Thread(target=task, daemon=True).start()
    return ended.wait


def _is_idle_after(run_dir: Path, pause_s: float) -> bool:
    """Pause; say whether no process is training in the run directory."""
    time.sleep(pause_s)
    return at_work(run_dir) is None


def _follow(uploader: Uploader, ended: Callable[[float], bool], late: Callable[[], None], *, is_attached: bool) -> None:
    """Upload what the run writes until it has ended; print what prevents that, each trouble once."""
    pause, failures, reported = 0.0, 0, None
    while not ended(pause):
        trouble = _attempt(late, uploader.upload)
        failures = failures + 1 if trouble else 0
        pause = min(2 * pause + 1, _RETRY_AT_MOST_S) if trouble else _EVERY_S
        if trouble == reported or failures == 1:  # the first may be an idle connection that was closed
            continue
        if trouble:
            print(trouble, file=sys.stderr, flush=True)
        reported = trouble
        if is_attached:  # the run reports it
            uploader.cursor.note(trouble=trouble)


def _attempt(*steps: Callable[[], None]) -> str | None:
    """Do it, or say what prevents it."""
    try:
        for step in steps:
            step()
    except (Busy, FileNotFoundError) as error:
        return str(error)
    except Exception as error:  # of the server, the disk, the network
        return " ".join(masked(root_cause(error)).split())[:300]
    return None


def _report(uploader: Uploader, store: Store, trouble: str | None, *, is_late: bool) -> int:
    run_dir, where = uploader.run_dir, masked(store.uri)
    if trouble is not None:
        left = left_in(run_dir)
        what = f"MLflow lacks {counted(left, 'entry')}" if left else "what MLflow shows of the run is not complete"
        print(f"{run_dir}: {what}:\n{trouble}", file=sys.stderr)
        return 1
    what = f"uploaded {counted(uploader.uploaded, 'entry')}" if uploader.uploaded else "nothing was left to upload"
    print(f"{run_dir}: {what}; MLflow at {where} has everything")
    for why in uploader.refused:
        print(f"MLflow refused {masked(why)}", file=sys.stderr)
    if is_late:
        print(f"  but no curves: {OUTBOX}, which has them, was not written during the run, or is damaged")
    if uploader.damaged:
        print(f"  but {counted(uploader.damaged, 'damaged line')} of {OUTBOX} could not be read")
    for line in where_to_look(ui_command(where), uploader.run.url if uploader.run is not None else None):
        print(line)
    return 0
