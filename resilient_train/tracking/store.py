"""Where MLflow keeps the run, and how a person opens it there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from socket import gethostname
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from resilient_train.errors import ConfigError
from resilient_train.files import commit_text, read_json
from resilient_train.record.journal import entries
from resilient_train.record.outbox import OUTBOX
from resilient_train.secrets import masked

_log = logging.getLogger("resilient_train")

MLFLOW_JSON, PLACE = "mlflow.json", ".place"  # their names in a run directory
DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens unless told otherwise

_IDENTITY = ("place", "copy")  # what damage must not take: it is in both files
_TYPES = {"delivered": int, "files": list, "place": dict}  # of what mlflow.json holds; all else is text

_SQLITE_FILE = re.compile(r"(?P<scheme>sqlite(\+\w+)?):///(?P<path>(?!:memory:)[^?]+)(?P<options>\?.*)?")
_USER = re.compile(r"://[^/?#]*@")
_DATABASES = ("postgresql", "mysql", "mssql", "sqlite")
_SCHEMELESS = ("databricks", "databricks-uc", "uc")  # MLflow takes these words as whole addresses


@dataclass(frozen=True)
class TrackedRun:
    """The run as MLflow knows it, in the form that `summary.json` holds; `tracking_uri` is without its password."""

    run_id: str
    tracking_uri: str
    url: str | None


class UploadCursor:
    """mlflow.json: what the run is called in MLflow, and how much of the outbox has arrived there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file, self._second = directory / MLFLOW_JSON, directory / PLACE
        self.read()  # it may be noted in at any time, also before a connection

    def read(self) -> None:
        """Read what another process has noted; what has another type is damage."""
        known, second = read_json(self._file), read_json(self._second)
        found = _identity(second) | (known if isinstance(known, dict) else {})
        self._known = {name: one for name, one in found.items() if type(one) is _TYPES.get(name, str)}

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return what is known: "delivered" is how many bytes of the outbox MLflow has, "seal" their last checksum."""
        return self._known.get(name, otherwise)

    def tracked_run(self, tracking_uri: str, experiment: str) -> TrackedRun | None:
        """Return the run, if it was begun in this store and experiment; else forget what is known of others."""
        self.read()
        place = {"tracking_uri": tracking_uri, "experiment": experiment}
        run_id = self.get("run_id", "") if self._known.items() >= place.items() else ""
        if not re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", run_id):
            self._known = place | _identity(self._known)
            return None
        return TrackedRun(run_id, tracking_uri, self.get("url"))

    def settle(self, *, trains: bool) -> None:
        """Note where the directory is, and whether it is a copy of another one: a copy is a run of its own in MLflow.

        A directory that was moved, that another host has, or that is mounted elsewhere is the same run. One that is the
        only one to be seen, on another host and on another disk, is a copy once it `trains` there: before, it may have
        been brought there only to upload it.
        """
        self.read()
        directory, was = self.directory.absolute(), self.get("place")
        try:
            facts = directory.stat()
        except OSError:
            return
        here = {"path": str(directory), "host": gethostname(), "device": facts.st_dev, "inode": facts.st_ino}
        is_copy = was is not None and was.keys() == here.keys() and _is_copy(was, here, trains=trains)
        if is_copy:
            _log.info("%s is a copy: MLflow shows it as a run of its own", directory)
            self._known = {key: one for key, one in self._known.items() if key in ("tracking_uri", "experiment")}
            self._known["copy"] = uuid4().hex
        if is_copy or (was != here and (trains or was is None)):
            self.note(place=here)
        if read_json(self._second) != (identity := _identity(self._known)):
            with contextlib.suppress(OSError):
                commit_text(self._second, json.dumps(identity, indent=2) + "\n")

    def note(self, **facts: Any) -> None:
        """Write down more; whatever gets lost is looked up in MLflow, or uploaded a second time to the same place."""
        self._known |= facts
        with contextlib.suppress(OSError):
            commit_text(self._file, json.dumps(self._known, indent=2) + "\n")


def _identity(known: Any) -> dict[str, Any]:
    return {name: known[name] for name in _IDENTITY if name in known} if isinstance(known, dict) else {}


def _is_copy(was: dict[str, Any], here: dict[str, Any], *, trains: bool) -> bool:
    if was["path"] == here["path"]:
        return False
    with contextlib.suppress(OSError, TypeError, ValueError):
        there = os.stat(was["path"])
        if (there.st_dev, there.st_ino) != (here["device"], here["inode"]) and there.st_ino == was["inode"]:
            return True  # both are there
    if was["inode"] == here["inode"]:
        return False
    # A move to another disk leaves nothing behind. Devices of another host have other numbers.
    return was["device"] == here["device"] if was["host"] == here["host"] else trains


def left_in(directory: Path) -> int:
    """Count the entries of the outbox that MLflow does not have, as far as the run directory knows."""
    try:
        return sum(1 for _ in entries(directory / OUTBOX, UploadCursor(directory).get("delivered", 0)))
    except OSError:
        return 0


@dataclass(frozen=True)
class Store:
    """A tracking store."""

    uri: str
    database: Path | None = None  # its SQLite file
    home: Path | None = None  # where the files of a database go; None for a server, which has its own place for them

    @property
    def artifacts(self) -> str | None:
        """Say where a new experiment puts its files; None leaves the choice to the server."""
        # MLflow's own default is ./mlruns: a different place for each working directory.
        return self.home.joinpath("mlartifacts").as_uri() if self.home else None


def locate(uri: str | None, home: Path) -> Store:
    """Choose the store: the one configured, else MLFLOW_TRACKING_URI, else a SQLite file in `home`."""
    key = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    uri = uri or os.environ.get(key) or f"sqlite:///{home.absolute() / 'mlflow.db'}"
    try:
        scheme = urlsplit(uri).scheme
    except ValueError as error:  # a bracket that is left open
        raise ConfigError(key, uri, f"is no address ({error}): give one such as http://host:5000") from None
    if scheme in ("", "file") and uri not in _SCHEMELESS:
        why = "MLflow no longer takes a plain directory: give sqlite:///mlflow.db or the address of a server"
        raise ConfigError(key, uri, why)
    known = ("http", "https", *_SCHEMELESS, *_DATABASES)
    plugins = (one.name for one in entry_points(group="mlflow.tracking_store"))
    if scheme.partition("+")[0] not in known and uri not in _SCHEMELESS and scheme not in plugins:
        why = "MLflow has no such kind of store: give http://host:5000, sqlite:///file.db, postgresql://..."
        raise ConfigError(key, uri, why)
    if file := _SQLITE_FILE.fullmatch(uri):
        path = Path(file["path"]).expanduser().absolute()
        return Store(f"{file['scheme']}:///{path}{file['options'] or ''}", path, path.parent)
    return Store(uri, home=home.absolute() if scheme.startswith(_DATABASES) else None)


def url(tracking_uri: str, experiment_id: str, run_id: str) -> str | None:
    """Return the link to the run's overview, for a database under the address where `ui_command` shows it."""
    if tracking_uri.startswith(("http://", "https://")):
        root = _USER.sub("://", masked(tracking_uri)).rstrip("/")  # a link with *** for a password opens nothing
    elif tracking_uri.split(":")[0] in _SCHEMELESS:
        return None
    else:
        root = DEFAULT_UI
    return f"{root}/{run_page(experiment_id, run_id)}"


def run_page(experiment_id: str, run_id: str, page: str = "") -> str:
    """Return the link to a page of a run (the overview, /traces, /artifacts/PATH) from others of the same server."""
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"#/experiments/{experiment_id}/runs/{run_id}{page}?workflowType=machine_learning"


def ui_command(tracking_uri: str) -> str:
    """Return the shell command that shows a database, from any directory; empty for a server, which shows itself."""
    if tracking_uri.startswith(("http://", "https://", *_SCHEMELESS)):
        return ""
    next_to_python = Path(sys.executable).with_name("mlflow")
    is_found = shutil.which("mlflow") == str(next_to_python) or not next_to_python.exists()
    program = "mlflow" if is_found else shlex.quote(str(next_to_python))  # an environment that is not activated
    return f"{program} ui --backend-store-uri {shlex.quote(tracking_uri)}"
