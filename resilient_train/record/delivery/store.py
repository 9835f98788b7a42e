"""Where MLflow keeps the run, and how a person opens it there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from resilient_train.errors import ConfigError
from resilient_train.files import commit_text, read_json
from resilient_train.secrets import masked

DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens unless told otherwise

_SQLITE_FILE = re.compile(r"(?P<scheme>sqlite(\+\w+)?):///(?P<path>(?!:memory:)[^?]+)(?P<options>\?.*)?")
_SCHEMELESS = ("databricks", "databricks-uc", "uc")  # MLflow takes these words as whole addresses


@dataclass(frozen=True)
class TrackedRun:
    """The run as MLflow knows it; `tracking_uri` is without its password."""

    run_id: str
    tracking_uri: str
    url: str | None

    def as_dict(self) -> dict[str, str | None]:
        """Return the form that `summary.json` holds."""
        return asdict(self)


class KnownRun:
    """The run's name in MLflow, kept in its directory so that a resume goes on there."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.name
        self._file = directory / "mlflow.json"

    def recalled(self, tracking_uri: str, experiment: str) -> str | None:
        """Return the id of the run, if it was begun in this store and experiment."""
        known = read_json(self._file)
        if not isinstance(known, dict):
            return None
        run_id = known.get("run_id")
        is_here = known.get("tracking_uri") == tracking_uri and known.get("experiment") == experiment
        return run_id if is_here and isinstance(run_id, str) and re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", run_id) else None

    def note(self, run_id: str, tracking_uri: str, experiment: str) -> None:
        """Write down where the run was begun; without it a resume begins another one, which is no harm."""
        with contextlib.suppress(OSError):
            known = {"run_id": run_id, "tracking_uri": tracking_uri, "experiment": experiment}
            commit_text(self._file, json.dumps(known, indent=2) + "\n")


@dataclass(frozen=True)
class Store:
    """A tracking store; `database` is its SQLite file, null for everything else."""

    uri: str
    database: Path | None = None

    @property
    def artifacts(self) -> str | None:
        """Say where a new experiment puts its files; null leaves the choice to the server."""
        # MLflow's own default is ./mlruns: another place for each directory somebody starts from.
        return (self.database.parent / "mlartifacts").as_uri() if self.database else None


def locate(uri: str | None, home: Path) -> Store:
    """Choose the store: the one configured, else MLFLOW_TRACKING_URI, else a SQLite file in `home`."""
    key = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    uri = uri or os.environ.get(key) or f"sqlite:///{home.absolute() / 'mlflow.db'}"
    if urlsplit(uri).scheme in ("", "file") and uri not in _SCHEMELESS:
        why = "MLflow no longer takes a plain directory: give sqlite:///mlflow.db or the address of a server"
        raise ConfigError(key, uri, why)
    if file := _SQLITE_FILE.fullmatch(uri):
        path = Path(file["path"]).expanduser().absolute()
        return Store(f"{file['scheme']}:///{path}{file['options'] or ''}", path)
    return Store(uri)


def url(tracking_uri: str, experiment_id: str, run_id: str) -> str | None:
    """Return the link to the run's charts, for a database under the address where `ui_command` shows it."""
    if tracking_uri.startswith(("http://", "https://")):
        root = masked(tracking_uri).rstrip("/")
    elif tracking_uri.split(":")[0] in _SCHEMELESS:
        return None
    else:
        root = DEFAULT_UI
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"{root}/#/experiments/{experiment_id}/runs/{run_id}/model-metrics?workflowType=machine_learning"


def ui_command(tracking_uri: str) -> str:
    """Return the shell command that shows a database, from any directory; empty for a server, which shows itself."""
    if tracking_uri.startswith(("http://", "https://", *_SCHEMELESS)):
        return ""
    beside_python = Path(sys.executable).with_name("mlflow")
    is_found = shutil.which("mlflow") == str(beside_python) or not beside_python.exists()
    program = "mlflow" if is_found else shlex.quote(str(beside_python))  # an environment that is not activated
    return f"{program} ui --backend-store-uri {shlex.quote(tracking_uri)}"
