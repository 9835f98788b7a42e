"""Where a run is uploaded to, what it is called there, and how much of it has arrived; without MLflow's import."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import psutil

from resilient_train.durable.journal import OUTBOX, Entry, entries
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.files import commit_text, digest_of, read_json
from resilient_train.ground.secrets import masked
from resilient_train.ground.wording import counted

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
            self._forget_run()
            self.note(**destination)

    def settle(self) -> None:
        """Note where a run trains. In a copy of a directory that is still there, it is a run of its own."""
        here, was = str(self._directory.absolute()), self.get("place")
        if isinstance(was, str) and was != here and Path(was, OUTBOX).exists() and not self._directory.samefile(was):
            self._forget_run()
            self["copy"] = uuid4().hex
        self.note(place=here)

    def note(self, **facts: Any) -> None:
        """Write down more; whatever gets lost is looked up in MLflow, or uploaded a second time to the same place."""
        self.update(facts)
        with suppress(OSError):
            commit_text(self._directory / MLFLOW_JSON, json.dumps(self, indent=2) + "\n")

    def _forget_run(self) -> None:
        for name in ("run_id", "url", "delivered"):
            self.pop(name, None)


def lacking(directory: Path) -> str:
    """Say how many entries of the outbox MLflow does not have, as far as the run directory knows."""
    with suppress(OSError):
        if left := sum(1 for _ in entries(directory / OUTBOX, UploadCursor(directory).get("delivered", 0))):
            return f"it lacks {counted(left, 'entry')} of {OUTBOX}"
    return "what it shows is not complete"


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


# Set where the user has not, in the process that uploads.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the uploader retries; urllib3 would do so for minutes, with warnings
}

# A tag to find the run by when its id is lost. MLflow's pages hide tags of this name.
_KEY = "mlflow.resilience.key"
_NOTE = "mlflow.note.content"
_OURS = "mlflow.resilience.note"  # the digest of the last description that this program wrote

# MLflow's own limits, of a request and of characters.
_MOST_METRICS, _MOST_PARAMS = 1000, 100
_TAG_LENGTH, _PARAM_LENGTH, _NAME_LENGTH = 8000, 6000, 250
# MLflow's page sorts the sections of charts by name, and shows metrics without a section last. With these names the
# curves of the training come first.
_SECTIONS = {"eval": "validation", "knobs": "treatment"}

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED")


class MlflowRun:
    def __init__(self, uri: str, experiment: str, run_dir: Path, say: Callable[[str], None]) -> None:
        """Find the run that a run directory belongs to, or create it. Raises whatever prevents that."""
        os.environ.update(ENVIRONMENT | os.environ)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        database = database_of(uri)
        if database is not None and not database.exists():
            _create(database)
        self.client, self._say = MlflowClient(uri), say
        home = run_dir.parent if database is None else database.parent
        # MLflow's own default is ./mlruns, another place for each working directory. A server has its own.
        artifacts = home.joinpath("mlartifacts").as_uri() if uri.startswith(DATABASES) else None
        try:
            self.experiment_id = str(self.client.create_experiment(experiment, artifacts))
        except MlflowException:  # it is there, perhaps since another run was first
            found = self.client.get_experiment_by_name(experiment)
            assert found is not None
            self.experiment_id = str(found.experiment_id)
        self.cursor = UploadCursor(run_dir)
        self.cursor.aim(masked(uri), experiment)
        # No other outbox begins with this entry, except those of copies of the directory.
        first = next((one for one, _ in entries(run_dir / OUTBOX) if one is not None), None)
        if first is None:
            raise EOFError(f"{OUTBOX} holds nothing yet")
        self._key = digest_of([first, self.cursor.get("copy")])[:32]
        runs = self._of_key()
        if not runs:
            # Without a source: its row would push the first line of the description off the screen of a laptop.
            tags = {"mlflow.user": psutil.Process().username(), _KEY: self._key}
            runs = [self.client.create_run(self.experiment_id, first["at"], tags, run_dir.name).info.run_id]
        if self.cursor.get("run_id") not in runs:  # a person may have deleted it
            run_id = runs[0]
            self.cursor.note(run_id=run_id, url=url(masked(uri), self.experiment_id, run_id), delivered=0)
        self.run_id: str = self.cursor["run_id"]

    def send(self, call: Callable[..., object], *what: Any, **named: Any) -> None:
        """Call it with the id of the run, and say why where MLflow would refuse it next time, too."""
        from mlflow.exceptions import MlflowException

        try:
            call(self.run_id, *what, **named)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            self._say(f"MLflow refused {root_cause(error)}")

    def add_metrics(self, rows: Iterable[Entry]) -> None:
        from mlflow.entities import Metric

        self._log(
            "metrics",
            [
                Metric(metric_name(key), _number(value), row["at"], row["tick"])
                for row in rows
                for key, value in row["values"].items()
            ],
            _MOST_METRICS,
        )

    def add_params(self, values: Mapping[str, Any]) -> None:
        """Add parameters; one that is there keeps its first value."""
        from mlflow.entities import Param

        there = self.client.get_run(self.run_id).data.params
        params = {name(key): cut(value, _PARAM_LENGTH) for key, value in values.items()}
        self._log("params", [Param(key, value) for key, value in params.items() if key not in there])

    def describe(self, status: str, ended_ms: int | None, tags: Mapping[str, str], note: str) -> None:
        """Show how the run stands, with a description unless a person has written another one."""
        from mlflow.entities import RunTag

        there = self.client.get_run(self.run_id)
        if there.info.status != status:
            if status == "RUNNING":
                self.send(self.client.update_run, status)
            else:
                self.send(self.client.set_terminated, status, ended_ms)
        tags, shown = {key: cut(value, _TAG_LENGTH) for key, value in tags.items()}, there.data.tags
        if not (known := shown.get(_NOTE)) or digest_of(known) == shown.get(_OURS):
            tags |= {_NOTE: note, _OURS: digest_of(note)}
        self._log("tags", [RunTag(key, value) for key, value in tags.items()])

    def _log(self, kind: str, items: list[Any], most: int = _MOST_PARAMS) -> None:
        for start in range(0, len(items), most):
            self.send(self.client.log_batch, **{kind: items[start : start + most]})

    def _of_key(self) -> list[str]:
        found = self.client.search_runs(
            [self.experiment_id], f"tags.`{_KEY}` = '{self._key}'", order_by=["attributes.start_time ASC"]
        )
        return [one.info.run_id for one in found]


def _create(database: Path) -> None:
    """Let MLflow create its database under another name: a kill in the middle of its migrations would ruin it."""
    from mlflow import MlflowClient

    database.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{database.name}-", dir=database.parent) as scratch:
        new = Path(scratch) / "new.db"
        MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
        try:
            os.link(new, database)
        except FileExistsError:
            pass  # another process was first
        except OSError:  # a file system without hard links
            new.rename(database)


def root_cause(error: BaseException) -> str:
    """Return the innermost cause in one line, without secrets: `Connection refused` lies five wrappers deep."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return " ".join(masked(f"{type(error).__name__}: {error}").split())[:300]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan  # a curve of NaN is noticed sooner than a missing one


def name(key: str) -> str:
    """Return the nearest name that MLflow accepts: it refuses a whole batch for one `acc@1` or `../x`."""
    parts = [part for part in re.sub(r"[^\w.\- :/]", "_", str(key)).split("/") if part.strip(".")]
    return "/".join(parts).lstrip("./")[:_NAME_LENGTH].rstrip("/") or "_"


def metric_name(key: str) -> str:
    section, slash, rest = key.partition("/")
    return name(f"{_SECTIONS.get(section, section)}/{rest}" if slash else f"train/{key}")


def cut(value: Any, length: int) -> str:
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."
