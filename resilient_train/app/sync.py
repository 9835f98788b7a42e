"""`resilient-train sync RUN_DIR`: upload to MLflow what it lacks. A tracked run starts such a process itself."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from resilient_train.app import no_run, parser_of
from resilient_train.errors import TrainError
from resilient_train.record.endings import at_work, is_run
from resilient_train.record.outbox import OUTBOX
from resilient_train.secrets import masked
from resilient_train.tracking.connection import Store, UploadCursor, left_in, locate, root_cause
from resilient_train.tracking.review import ui_command, where_to_look
from resilient_train.tracking.tracker import EXPERIMENT
from resilient_train.tracking.uploader import Busy, Uploader
from resilient_train.wording import counted

_HELP = """\
Uploads to MLflow what could not be uploaded during the run. Nothing is uploaded twice.
The address that was used last is used unless another is given. If it holds a token or a password, which is not
written down, give it again by --uri or MLFLOW_TRACKING_URI, or use MLflow's own variables for them. Those, and
~/.mlflow/credentials, are sent to no address that only the directory names: give it by --uri."""

_EVERY_S = 1.5  # between uploads while a run lasts
_RETRY_AT_MOST_S = 30.0
_PAUSES_S = (1.0, 3.0, 0.0)  # after each attempt to finish
_SURVIVES_S = 6.0  # how long an attached process may upload what a killed run has left


def main(words: list[str]) -> int:
    parser = parser_of("sync", _HELP, "0 if MLflow has everything, 1 if not, 2 if the store is unknown", json="")
    parser.add_argument("--uri", "--tracking-uri", help="another tracking store: sqlite:///file.db, http://host:5000")
    parser.add_argument("--experiment", help="another experiment for the run")
    parser.add_argument("--follow", action="store_true", help="continue to upload until the run has ended")
    parser.add_argument("--attached", action="store_true", help=argparse.SUPPRESS)  # to a run that started it
    given = parser.parse_args(words)
    run_dir = given.run_dir.absolute()
    if not (given.attached or (run_dir / OUTBOX).exists() or is_run(run_dir)):
        return no_run(given.run_dir)
    has_ended = _attached() if given.attached else partial(_is_idle_after, run_dir)
    try:
        store, experiment = _destination(run_dir, given.uri, given.experiment, is_attached=given.attached)
    except TrainError as error:
        print(f"{given.run_dir}: {error}", file=sys.stderr)
        return 2
    say = partial(_say, file=sys.stdout if given.attached else sys.stderr)
    uploader = Uploader(run_dir, store, experiment)
    with contextlib.closing(uploader):
        if given.follow:
            _follow(uploader, has_ended, say)
        trouble = _finish(uploader)
    for why in uploader.refused:
        say(f"MLflow refused {masked(' '.join(why.split()))[:300]}")
    if given.attached:
        say(trouble)
        return int(trouble is not None)
    return _report(uploader, trouble)


def _destination(
    run_dir: Path, uri: str | None, experiment: str | None, *, is_attached: bool = False
) -> tuple[Store, str]:
    """Return the store and the experiment that the run had last, unless others are given."""
    if not is_attached and not run_dir.joinpath(OUTBOX).exists():
        raise TrainError(f"there is no {OUTBOX} to upload, as of a run that was not tracked")
    cursor, environment = UploadCursor(run_dir), os.environ.get("MLFLOW_TRACKING_URI")
    experiment = experiment or cursor.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if is_attached:  # the run passes the address, with its secrets
        return locate(environment, run_dir.parent), experiment
    asked = uri or cursor.get("tracking_uri")
    if asked is None and environment is None:
        raise TrainError("it is not known where the run was uploaded to: give the address by --uri")
    if uri is None and environment and asked in (None, masked(environment)):
        asked = environment  # the same place, with its secret
    if "***" in asked:
        raise TrainError(f"the secret in {asked} is not written down: give the address by --uri or MLFLOW_TRACKING_URI")
    store = locate(asked, run_dir.parent)
    if uri is None and asked != environment:
        _check_named(store)
    return store, experiment


def _check_named(store: Store) -> None:
    """Refuse a store that only the directory names, which may come from anywhere, if it is unsafe or not here."""
    if store.database is None and (names := _credentials(store.uri)):
        why = f"only the directory names {masked(store.uri)}, and {' and '.join(names)} would be sent there"
        what = f"add --uri {shlex.quote(masked(store.uri))}, or set MLFLOW_TRACKING_URI to it"
        raise TrainError(f"{why}: if that is your server, {what}")
    if store.database is not None and not store.database.parent.is_dir():
        raise TrainError(f"{store.database} cannot be here, as {store.database.parent} is missing: give --uri")


def _credentials(uri: str) -> list[str]:
    """Return which credentials would be sent to an address. This host is no exception: others may run the server."""
    if urlsplit(uri).scheme.startswith(("postgresql", "mysql")):
        return [name for name in ("PGPASSWORD", "MYSQL_PWD") if os.environ.get(name)]
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
    file = Path("~/.mlflow/credentials").expanduser()
    return [*(name for name in names if os.environ.get(name)), *([str(file)] if file.exists() else [])]


def _attached() -> Callable[[float], bool]:
    """Attach this process to the run that started it: a line on the standard input says that the run has ended."""
    # Requests to stop go to all processes of a run, which still has something to upload then.
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
    time.sleep(pause_s)
    return at_work(run_dir) is None


def _follow(uploader: Uploader, has_ended: Callable[[float], bool], say: Callable[[str | None], None]) -> None:
    """Upload what the run writes until it has ended; say what prevents that, each trouble once."""
    pause, failures, said = 0.0, 0, None
    while not has_ended(pause):
        trouble = _attempt(uploader.upload)
        failures = failures + 1 if trouble else 0
        pause = min(2 * pause + 1, _RETRY_AT_MOST_S) if trouble else _EVERY_S
        if trouble != said and failures != 1:  # the first may be an idle connection that was closed
            say(trouble)
            said = trouble


def _finish(uploader: Uploader) -> str | None:
    for pause in _PAUSES_S:
        if (trouble := _attempt(partial(uploader.upload, is_last=True))) is None:
            break
        time.sleep(pause)
    return trouble


def _attempt(step: Callable[[], None]) -> str | None:
    """Do it, or say what prevents it."""
    try:
        step()
    except (Busy, FileNotFoundError) as error:
        return str(error)
    except Exception as error:  # of the server, the disk, the network
        return " ".join(masked(root_cause(error)).split())[:300]
    return None


def _say(line: str | None, file: TextIO) -> None:
    if line is not None:
        with contextlib.suppress(OSError):  # the run that this process is attached to was killed
            print(line, file=file, flush=True)


def _report(uploader: Uploader, trouble: str | None) -> int:
    run_dir, where = uploader.run_dir, masked(uploader.store.uri)
    if trouble is not None:
        left = left_in(run_dir)
        what = f"MLflow lacks {counted(left, 'entry')}" if left else "what MLflow shows of the run is not complete"
        print(f"{run_dir}: {what}:\n{trouble}", file=sys.stderr)
        return 1
    what = f"uploaded {counted(uploader.uploaded, 'entry')}" if uploader.uploaded else "nothing was left to upload"
    print(f"{run_dir}: {what}; MLflow at {where} has everything")
    if uploader.damaged:
        print(f"  but {counted(uploader.damaged, 'damaged line')} of {OUTBOX} could not be read")
    for line in where_to_look(ui_command(where), uploader.run.url if uploader.run is not None else None):
        print(line)
    return 0
