"""Where a run is uploaded to, what it is called there, and how much of it has arrived; without MLflow's import."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
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
from resilient_train.wording import counted

MLFLOW_JSON = "mlflow.json"  # its name in a run directory
DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens unless told otherwise
DATABASES = ("postgresql", "mysql", "mssql", "sqlite")
SCHEMELESS = ("databricks", "databricks-uc", "uc")  # MLflow takes these words as whole addresses

_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]+)(.*)")


@dataclass(frozen=True)
class TrackedRun:
    """The run as MLflow knows it, in the form that `summary.json` holds; `tracking_uri` is without its password."""

    run_id: str
    tracking_uri: str
    url: str | None


class UploadCursor(dict[str, Any]):
    """mlflow.json: where a run is uploaded to, its name there; "delivered": how many bytes of the outbox MLflow has."""

    def __init__(self, directory: Path) -> None:
        known = read_json(directory / MLFLOW_JSON)
        super().__init__(known if isinstance(known, dict) else {})
        self._directory = directory

    @property
    def run(self) -> TrackedRun | None:
        return TrackedRun(self["run_id"], self["tracking_uri"], self.get("url")) if "run_id" in self else None

    def aim(self, tracking_uri: str, experiment: str) -> None:
        """Note where the run is uploaded to; what is known of its run elsewhere is forgotten."""
        destination = {"tracking_uri": tracking_uri, "experiment": experiment}
        if not destination.items() <= self.items():
            self._forget_run()
            self.note(**destination)

    def settle(self) -> None:
        """Note where a run trains, and whether that is a copy of another directory: then it is a run of its own.

        One that was moved or is mounted elsewhere is the same run.
        """
        here = self._directory.absolute()
        place = {"path": str(here), "host": gethostname(), "inode": here.stat().st_ino}
        was = self.get("place", place)
        if was["host"] != place["host"]:
            is_copy = was["inode"] != place["inode"]  # of the same directory on a shared disk it is the same
        else:
            is_copy = os.path.exists(was["path"]) and not os.path.samefile(was["path"], here)
        if is_copy:
            self._forget_run()
            self["copy"] = uuid4().hex
        self.note(place=place)

    def note(self, **facts: Any) -> None:
        """Write down more; whatever gets lost is looked up in MLflow, or uploaded a second time to the same place."""
        self.update(facts)
        with suppress(OSError):
            commit_text(self._directory / MLFLOW_JSON, json.dumps(self, indent=2) + "\n")

    def _forget_run(self) -> None:
        for name in ("run_id", "url", "delivered", "traced"):
            self.pop(name, None)


def left_in(directory: Path) -> int:
    """Count the entries of the outbox that MLflow does not have, as far as the run directory knows."""
    try:
        return sum(1 for _ in entries(directory / OUTBOX, UploadCursor(directory).get("delivered", 0)))
    except OSError:
        return 0


def lacking(directory: Path) -> str:
    left = left_in(directory)
    return f"it lacks {counted(left, 'entry')} of {OUTBOX}" if left else "what it shows is not complete"


def locate(uri: str | None, home: Path) -> str:
    """Return the address of the store: as configured, else MLFLOW_TRACKING_URI, else a SQLite file in `home`."""
    key = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    uri = uri or os.environ.get(key) or f"sqlite:///{home.absolute() / 'mlflow.db'}"
    try:
        kind = urlsplit(uri).scheme.partition("+")[0]
    except ValueError:  # a bracket that is left open
        kind = ""
    plugins = (one.name for one in entry_points(group="mlflow.tracking_store"))
    if uri not in SCHEMELESS and kind not in ("http", "https", *SCHEMELESS, *DATABASES, *plugins):
        why = "MLflow takes no such address, nor a plain directory: give http://host:5000, sqlite:///file.db, ..."
        raise ConfigError(key, uri, why)
    file = _SQLITE_FILE.fullmatch(uri)  # of a relative path, the process that uploads may have another place
    return uri if file is None else f"{file[1]}{Path(file[2]).expanduser().absolute()}{file[3]}"


def database_of(uri: str) -> Path | None:
    """Return the file of a SQLite database; None for any other store."""
    file = _SQLITE_FILE.fullmatch(uri)
    return None if file is None else Path(file[2])


def url(tracking_uri: str, experiment_id: str, run_id: str) -> str | None:
    """Return the link to the run's overview, for a database under the address where `ui_command` shows it."""
    if tracking_uri.split(":")[0] in SCHEMELESS:
        return None
    is_server = tracking_uri.startswith(("http://", "https://"))
    # A link with *** for a password opens nothing.
    root = re.sub("://[^/?#]*@", "://", tracking_uri).rstrip("/") if is_server else DEFAULT_UI
    return f"{root}/{run_page(experiment_id, run_id)}"


def run_page(experiment_id: str, run_id: str, page: str = "") -> str:
    """Return the link to a page of a run (the overview, /traces, /artifacts/PATH) from others of the same server."""
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"#/experiments/{experiment_id}/runs/{run_id}{page}?workflowType=machine_learning"
