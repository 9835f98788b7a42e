"""Where a run is uploaded to, and how much of it has arrived; without MLflow's import."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from resilient_train.ground.errors import ConfigError
from resilient_train.ground.files import commit_text, read_json
from resilient_train.ground.secrets import masked

MLFLOW_JSON = "mlflow.json"  # its name in a run directory
DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens unless told otherwise
DATABASES = ("postgresql", "mysql", "mssql", "sqlite")
SCHEMELESS = ("databricks", "databricks-uc", "uc")  # MLflow takes these words as whole addresses

_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)([^?]+)(.*)")


class UploadCursor(dict[str, Any]):
    """mlflow.json: where a run is uploaded to, its name there; "delivered": how many bytes of the outbox MLflow has."""

    def __init__(self, directory: Path) -> None:
        known = read_json(directory / MLFLOW_JSON)
        super().__init__(known if isinstance(known, dict) else {})
        self._directory = directory

    @property
    def run(self) -> dict[str, Any] | None:
        """The run as MLflow knows it and `summary.json` holds it; `tracking_uri` is without its password."""
        known = {name: self.get(name) for name in ("run_id", "tracking_uri", "url")}
        return known if known["run_id"] else None

    def aim(self, tracking_uri: str, experiment: str) -> None:
        """Note where the run is uploaded to; what is known of its run elsewhere is forgotten."""
        destination = {"tracking_uri": tracking_uri, "experiment": experiment}
        if not destination.items() <= self.items():
            for name in ("run_id", "url", "delivered"):
                self.pop(name, None)
            self.note(**destination)

    def note(self, **facts: Any) -> None:
        """Write down more; whatever gets lost is looked up in MLflow, or uploaded a second time to the same place."""
        self.update(facts)
        with suppress(OSError):
            commit_text(self._directory / MLFLOW_JSON, json.dumps(self, indent=2) + "\n")


def locate(uri: str | None, home: Path) -> str:
    """Return the address of the store: as configured, else MLFLOW_TRACKING_URI, else a SQLite file in `home`."""
    key = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    uri = uri or os.environ.get(key) or f"sqlite:///{home.absolute() / 'mlflow.db'}"
    kind = uri.partition(":")[0].partition("+")[0].lower()
    if kind not in ("http", "https", *SCHEMELESS, *DATABASES):
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
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"{root}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def root_cause(error: BaseException) -> str:
    """Return the innermost cause in one line, without secrets: `Connection refused` lies five wrappers deep."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return " ".join(masked(f"{type(error).__name__}: {error}").split())[:300]
