"""`resilient-train sync RUN_DIR`: upload to MLflow what it lacks. A tracked run starts such a process itself."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from resilient_train.command import no_run, parser_of
from resilient_train.durable.endings import at_work, is_run
from resilient_train.durable.journal import ENDED, OUTBOX
from resilient_train.ground.errors import TrainError
from resilient_train.ground.secrets import masked
from resilient_train.report.connection import UploadCursor, database_of, locate, root_cause
from resilient_train.report.tracker import EXPERIMENT
from resilient_train.report.uploader import Uploader

_HELP = """\
Uploads to MLflow what could not be uploaded during the run. Nothing is uploaded twice.
The address that was used last is used unless another is given. If it holds a token or a password, which is not
written down, give it again by --uri or MLFLOW_TRACKING_URI, or use MLflow's own variables for them. Those, and
~/.mlflow/credentials, are sent to no address that only the directory names: give it by --uri."""

_CREDENTIALS = [f"MLFLOW_TRACKING_{name}" for name in ("TOKEN", "PASSWORD", "AUTH", "AWS_SIGV4")]
_CREDENTIALS += ["PGPASSWORD", "MYSQL_PWD"]
_END = f'"kind": "{ENDED}"'.encode()
_EVERY_S, _LOOK_EVERY_S = 1.5, 0.1  # between uploads while a run lasts, and between looks whether it has ended
_RETRY_AT_MOST_S = 30.0
_MOST_FAILURES = 3  # in a row, at the end


def main(words: list[str]) -> int:
    parser = parser_of("sync", _HELP, "0 if MLflow has everything, 1 if not, 2 if the store is unknown")
    parser.add_argument("--uri", "--tracking-uri", help="another tracking store: sqlite:///file.db, http://host:5000")
    parser.add_argument("--follow", action="store_true", help="continue to upload until the run has ended")
    given = parser.parse_args(words)
    run_dir = given.run_dir.absolute()
    if not ((run_dir / OUTBOX).exists() or is_run(run_dir)):
        return no_run(given.run_dir)
    cursor = UploadCursor(run_dir)
    try:
        uri = _address(run_dir, given.uri, cursor)
    except TrainError as error:
        print(f"{given.run_dir}: {error}", file=sys.stderr)
        return 2

    @cache  # each line once
    def say(line: str) -> None:
        with suppress(OSError):  # the run that reads it was killed
            print(line, flush=True)

    def has_ended(pause_s: float) -> bool:
        until = time.monotonic() + pause_s
        while not (is_over := not given.follow or _is_over(run_dir)) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        return is_over

    with closing(Uploader(run_dir, uri, cursor.get("experiment") or EXPERIMENT, say)) as uploader:
        trouble = _upload(uploader, has_ended, say)
    if trouble is None:
        say(f"{run_dir}: MLflow at {masked(uri)} has everything")
        return 0
    say(trouble)
    print(f"{run_dir}: MLflow did not get everything", file=sys.stderr)
    return 1


def _is_over(run_dir: Path) -> bool:
    """Say whether the run has noted its end in the outbox, or is at work no more."""
    with (run_dir / OUTBOX).open("rb") as file:
        file.seek(max(0, (run_dir / OUTBOX).stat().st_size - 100))
        return _END in file.read() or at_work(run_dir) is None


def _address(run_dir: Path, given: str | None, cursor: UploadCursor) -> str:
    """Return the address of the store that the run had last, unless another is given.

    Refuse one that only the directory names, which may come from anywhere, if it is unsafe or not here.
    """
    if not (run_dir / OUTBOX).exists():
        raise TrainError(f"there is no {OUTBOX} to upload, as of a run that was not tracked")
    environment, noted = os.environ.get("MLFLOW_TRACKING_URI"), cursor.get("tracking_uri")
    if given is None and environment and noted in (None, masked(environment)):
        given = environment  # the same place, with its secret
    if not (uri := given or noted):
        raise TrainError("it is not known where the run was uploaded to: give the address by --uri")
    if "***" in uri:
        raise TrainError(f"the secret in {uri} is not written down: give the address by --uri or MLFLOW_TRACKING_URI")
    uri = locate(uri, run_dir.parent)
    if given is not None:
        return uri
    if (database := database_of(uri)) is not None:
        if not database.parent.is_dir():
            raise TrainError(f"{database} cannot be here, as {database.parent} is missing: give --uri")
    elif any(map(os.environ.get, _CREDENTIALS)) or Path("~/.mlflow/credentials").expanduser().exists():
        # This host is no exception: others may run the server.
        why = f"only the directory names {masked(uri)}, and your credentials for MLflow would be sent there"
        what = f"add --uri {shlex.quote(masked(uri))}, or set MLFLOW_TRACKING_URI to it"
        raise TrainError(f"{why}: if that is your server, {what}")
    return uri


def _upload(uploader: Uploader, has_ended: Callable[[float], bool], say: Callable[[str], None]) -> str | None:
    """Upload what the run writes until it has ended; say what prevents that, and return what prevented it at last."""
    pause, failures, is_last = 0.0, 0, False
    while True:
        if is_last:
            time.sleep(pause)
        elif has_ended(pause):
            is_last, failures = True, 0
        try:
            uploader.upload(is_last=is_last)
        except Exception as error:  # of the server, the disk, the network
            trouble = root_cause(error)
            failures += 1
            if is_last and failures >= _MOST_FAILURES:
                return trouble
            if failures > 1:  # the first may be an idle connection that was closed
                say(trouble)
            pause = min(2 * pause + 1, _RETRY_AT_MOST_S)
        else:
            if is_last:
                return None
            pause, failures = _EVERY_S, 0
