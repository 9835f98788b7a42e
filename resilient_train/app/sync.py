"""The door to what MLflow does not have yet: `python -m resilient_train sync RUN_DIR`.

It delivers what a run could not while it lasted, from any machine that has the directory, and does nothing twice.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from resilient_train.app.terminal import counting
from resilient_train.errors import ConfigError
from resilient_train.record.outbox import BEGAN, OUTBOX, entries
from resilient_train.tracking.late import catch_up, is_late
from resilient_train.tracking.review import where_to_look
from resilient_train.tracking.store import KnownRun, Store, left_in, locate, shown, ui_command
from resilient_train.tracking.uploads import EXPERIMENT
from resilient_train.wording import printable

if TYPE_CHECKING:
    from resilient_train.tracking.courier import Courier

_PAUSES_S = (2.0, 5.0, 0.0)  # after each attempt that failed


def main(arguments: list[str] | None = None) -> int:
    """Deliver; return 0 if MLflow has everything, 1 if not, 2 where there is nothing that could be delivered."""
    parser = argparse.ArgumentParser(
        prog="resilient-train sync",
        description="Deliver to MLflow what could not be delivered while the run lasted. Nothing is delivered twice.",
        epilog="The address of the run is used unless another is given. Where it holds a token or a password, which is "
        "not written down, give it again by --uri or MLFLOW_TRACKING_URI, or use MLflow's own variables for them. "
        "Those, and ~/.mlflow/credentials, are sent to no address that only the directory names: give it by --uri.",
    )
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument(
        "--uri", "--tracking-uri", help="another tracking store: sqlite:///file.db, http://host:5000, ..."
    )
    parser.add_argument("--experiment", help="another experiment to file it under")
    given = parser.parse_args(arguments)
    try:
        store, experiment = _place(given.run_dir, given.uri, given.experiment)
    except (_Nowhere, ConfigError) as why:
        print(printable(f"{given.run_dir}: {why}"), file=sys.stderr)
        return 2
    return _sync(given.run_dir.absolute(), store, experiment)


class _Nowhere(Exception):
    """It is not clear what is to be delivered, or where."""


def _place(run_dir: Path, uri: str | None, experiment: str | None) -> tuple[Store, str]:
    """Where the run goes to: where it was shown last, unless somebody says otherwise."""
    began, late = None, is_late(run_dir)
    try:
        for entry, _ in entries(run_dir / OUTBOX):
            if entry is not None and entry["kind"] == BEGAN:
                began = entry
    except OSError as error:
        if not late:
            why = f"no {OUTBOX} can be read there ({error.strerror or error}), and nothing else of a run"
            raise _Nowhere(f"{why}: expected the directory of a run, such as runs/NAME") from None
    where, filed = KnownRun(run_dir).where() or (None, None)
    if began is not None:
        where, filed = str(began.get("tracking_uri")), str(began.get("experiment"))
    experiment = experiment or filed
    asked, around = uri or where, os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None and around and (where is None or shown(around) == where):
        asked = around  # the same place, with its secret
    if late:
        asked = asked or locate(None, run_dir.absolute().parent).uri
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    if asked is None or experiment is None:
        raise _Nowhere(f"its {OUTBOX} does not say where to: give --uri and --experiment")
    if "***" in asked:
        raise _Nowhere(f"the secret in {asked} is not written down: give the address by --uri or MLFLOW_TRACKING_URI")
    store = locate(asked, run_dir.parent)
    if uri is None and asked != around and store.database is None and (names := _credentials(store.uri)):
        why = f"only the directory names {shown(asked)}, and {' and '.join(names)} would be sent there"
        raise _Nowhere(
            f"{why}: if that is your server, add --uri {shlex.quote(shown(asked))}, or set MLFLOW_TRACKING_URI to it"
        )
    if uri is None and store.database is not None and not store.database.parent.is_dir():
        raise _Nowhere(f"{store.database} cannot be here, where {store.database.parent} is missing: give --uri")
    return store, experiment


def _credentials(uri: str) -> list[str]:
    """What would be sent along, to whatever address a stranger's directory names.

    Where there is nothing, there is nothing to ask. A server on this host is asked for as well: others may run it.
    """
    if urlsplit(uri).scheme.startswith(("postgresql", "mysql")):
        return [name for name in ("PGPASSWORD", "MYSQL_PWD") if os.environ.get(name)]
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
    file = Path("~/.mlflow/credentials").expanduser()
    return [*(name for name in names if os.environ.get(name)), *([str(file)] if file.exists() else [])]


def _sync(run_dir: Path, store: Store, experiment: str) -> int:
    if is_late(run_dir):
        try:
            catch_up(run_dir, shown(store.uri), experiment)
        except OSError as error:
            print(printable(f"{run_dir}: {OUTBOX} cannot be written: {error.strerror or error}"), file=sys.stderr)
            return 1
    KnownRun(run_dir).settle(trains=False)
    with counting("delivering", left_in(run_dir)) as went_on:
        from resilient_train.tracking.courier import Courier  # with MLflow, which takes seconds

        courier = Courier(run_dir, store, experiment, went_on=went_on)
        try:
            trouble = _attempted(courier)
        finally:
            courier.leave()
    if trouble is not None:
        left = left_in(run_dir)
        what = f"{left:,} entries are left" if left else "what MLflow shows of the run is not complete"
        print(f"{run_dir}: {what}: {printable(trouble)}", file=sys.stderr)
        return 1
    return _report(run_dir, store, courier)


def _attempted(courier: Courier) -> str | None:
    """Deliver everything, or say what keeps it from that."""
    from resilient_train.tracking.connection import root_cause
    from resilient_train.tracking.courier import Busy

    trouble = None
    for pause in _PAUSES_S:
        try:
            courier.conclude()
        except Busy:
            return "the run's own process is delivering them"
        except Exception as error:  # the server's, the disk's: there is no end of what it can be
            trouble = " ".join(shown(root_cause(error)).split())
        else:
            return None
        time.sleep(pause)
    return trouble


def _report(run_dir: Path, store: Store, courier: Courier) -> int:
    delivered, where = courier.report.entries, shown(store.uri)
    what = f"{delivered:,} entries were delivered" if delivered else "nothing was left to deliver"
    print(f"{run_dir}: {what}; MLflow at {where} has everything")
    for why in courier.report.refused:
        print(printable(f"  but it refused something: {shown(why)}"))
    if courier.report.damaged:
        print(f"  but {courier.report.damaged:,} damaged lines of {OUTBOX} are left out")
    for line in where_to_look(ui_command(where), courier.run.url if courier.run is not None else None):
        print(line)
    return 0
