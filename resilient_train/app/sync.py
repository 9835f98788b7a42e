"""`resilient-train sync RUN_DIR`: upload to MLflow what could not be uploaded during the run.

It works from any machine that has the directory, and uploads nothing twice.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from resilient_train.app.terminal import counting
from resilient_train.errors import ConfigError
from resilient_train.record.outbox import BEGAN, OUTBOX, entries
from resilient_train.tracking.late import catch_up, is_late
from resilient_train.tracking.review import where_to_look
from resilient_train.tracking.store import KnownRun, Store, left_in, locate, shown, ui_command
from resilient_train.tracking.uploads import EXPERIMENT
from resilient_train.wording import printable

_PAUSES_S = (2.0, 5.0, 0.0)  # after each attempt that failed


def main(arguments: list[str] | None = None) -> int:
    """Upload; return 0 if MLflow has everything, 1 if not, 2 if there is nothing to upload or the store is unknown."""
    parser = argparse.ArgumentParser(
        prog="resilient-train sync",
        description="Upload to MLflow what could not be uploaded during the run. Nothing is uploaded twice.",
        epilog="The address of the run is used unless another is given. If it holds a token or a password, which is "
        "not written down, give it again by --uri or MLFLOW_TRACKING_URI, or use MLflow's own variables for them. "
        "Those, and ~/.mlflow/credentials, are sent to no address that only the directory names: give it by --uri.",
    )
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument(
        "--uri", "--tracking-uri", help="another tracking store: sqlite:///file.db, http://host:5000, ..."
    )
    parser.add_argument("--experiment", help="another experiment for the run")
    given = parser.parse_args(arguments)
    try:
        store, experiment = _destination(given.run_dir, given.uri, given.experiment)
    except (_Unknown, ConfigError) as why:
        print(printable(f"{given.run_dir}: {why}"), file=sys.stderr)
        return 2
    return _upload(given.run_dir.absolute(), store, experiment)


class _Unknown(Exception):
    """It is not known what to upload, or where to."""


def _destination(run_dir: Path, uri: str | None, experiment: str | None) -> tuple[Store, str]:
    """Return the store and the experiment of a run: those that it had last, unless others are given."""
    began, late = None, is_late(run_dir)
    try:
        for entry, _ in entries(run_dir / OUTBOX):
            if entry is not None and entry["kind"] == BEGAN:
                began = entry
    except OSError as error:
        if not late:
            why = f"no {OUTBOX} can be read there ({error.strerror or error}), and nothing else of a run"
            raise _Unknown(f"{why}: expected the directory of a run, such as runs/NAME") from None
    known_uri, known_experiment = KnownRun(run_dir).where() or (None, None)
    if began is not None:
        known_uri, known_experiment = str(began.get("tracking_uri")), str(began.get("experiment"))
    experiment = experiment or known_experiment
    asked, from_environment = uri or known_uri, os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None and from_environment and (known_uri is None or shown(from_environment) == known_uri):
        asked = from_environment  # the same place, with its secret
    if late:
        asked = asked or locate(None, run_dir.absolute().parent).uri
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if asked is None or experiment is None:
        raise _Unknown(f"its {OUTBOX} does not say where to: give --uri and --experiment")
    if "***" in asked:
        raise _Unknown(f"the secret in {asked} is not written down: give the address by --uri or MLFLOW_TRACKING_URI")
    store = locate(asked, run_dir.parent)
    is_only_named = uri is None and asked != from_environment  # by the directory, which a stranger may have written
    if is_only_named and store.database is None and (names := _credentials(store.uri)):
        why = f"only the directory names {shown(asked)}, and {' and '.join(names)} would be sent there"
        what = f"add --uri {shlex.quote(shown(asked))}, or set MLFLOW_TRACKING_URI to it"
        raise _Unknown(f"{why}: if that is your server, {what}")
    if uri is None and store.database is not None and not store.database.parent.is_dir():
        raise _Unknown(f"{store.database} cannot be here, as {store.database.parent} is missing: give --uri")
    return store, experiment


def _credentials(uri: str) -> list[str]:
    """Return which credentials would be sent to an address. This host is no exception: others may run the server."""
    if urlsplit(uri).scheme.startswith(("postgresql", "mysql")):
        return [name for name in ("PGPASSWORD", "MYSQL_PWD") if os.environ.get(name)]
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
    file = Path("~/.mlflow/credentials").expanduser()
    return [*(name for name in names if os.environ.get(name)), *([str(file)] if file.exists() else [])]


def _upload(run_dir: Path, store: Store, experiment: str) -> int:
    if is_late(run_dir):
        try:
            catch_up(run_dir, shown(store.uri), experiment)
        except OSError as error:
            print(printable(f"{run_dir}: {OUTBOX} cannot be written: {error.strerror or error}"), file=sys.stderr)
            return 1
    KnownRun(run_dir).settle(trains=False)
    trouble = ""
    with counting("uploading", left_in(run_dir)) as went_on:
        from resilient_train.tracking.connection import root_cause
        from resilient_train.tracking.courier import Busy, Courier  # with MLflow, which takes seconds

        courier = Courier(run_dir, store, experiment, went_on=went_on)
        try:
            for pause in _PAUSES_S:
                try:
                    courier.conclude()
                except Busy:
                    trouble = "the run's own process is uploading them"
                    break
                except Exception as error:  # the server's, the disk's: it can be of any class
                    trouble = " ".join(shown(root_cause(error)).split())
                else:
                    trouble = ""
                    break
                time.sleep(pause)
        finally:
            courier.leave()
    if trouble:
        left = left_in(run_dir)
        what = f"{left:,} entries are left" if left else "what MLflow shows of the run is not complete"
        print(f"{run_dir}: {what}: {printable(trouble)}", file=sys.stderr)
        return 1
    uploaded, where = courier.report.entries, shown(store.uri)
    what = f"{uploaded:,} entries were uploaded" if uploaded else "nothing was left to upload"
    print(f"{run_dir}: {what}; MLflow at {where} has everything")
    for why in courier.report.refused:
        print(printable(f"  but it refused something: {shown(why)}"))
    if courier.report.damaged:
        print(f"  but {courier.report.damaged:,} damaged lines of {OUTBOX} are left out")
    for line in where_to_look(ui_command(where), courier.run.url if courier.run is not None else None):
        print(line)
    return 0
