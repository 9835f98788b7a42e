"""The connection to a run in MLflow: its store, its name there, how much of it has arrived, and what MLflow accepts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import psutil

from resilient_train.errors import ConfigError
from resilient_train.files import commit_text, read_json
from resilient_train.record.journal import Entry, entries
from resilient_train.record.outbox import BEGAN, OUTBOX
from resilient_train.secrets import masked

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_log = logging.getLogger("resilient_train")

MLFLOW_JSON = "mlflow.json"  # its name in a run directory
DEFAULT_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens unless told otherwise

_SQLITE_FILE = re.compile(r"(?P<scheme>sqlite(\+\w+)?):///(?P<path>(?!:memory:)[^?]+)(?P<options>\?.*)?")
_USER = re.compile(r"://[^/?#]*@")
_DATABASES = ("postgresql", "mysql", "mssql", "sqlite")
SCHEMELESS = ("databricks", "databricks-uc", "uc")  # MLflow takes these words as whole addresses


@dataclass(frozen=True)
class TrackedRun:
    """The run as MLflow knows it, in the form that `summary.json` holds; `tracking_uri` is without its password."""

    run_id: str
    tracking_uri: str
    url: str | None


class UploadCursor:
    """mlflow.json: where a run is uploaded to, what it is called there, and how much of its outbox has arrived."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._file = directory, directory / MLFLOW_JSON
        known = read_json(self._file)
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return what is known: "delivered" is how many bytes of the outbox MLflow has."""
        return self._known.get(name, otherwise)

    @property
    def run(self) -> TrackedRun | None:
        run_id = self.get("run_id")
        return None if run_id is None else TrackedRun(run_id, self.get("tracking_uri", ""), self.get("url"))

    def aim(self, tracking_uri: str, experiment: str) -> None:
        """Note where the run is uploaded to; what is known of its run elsewhere is forgotten."""
        destination = {"tracking_uri": tracking_uri, "experiment": experiment}
        if destination.items() <= self._known.items():
            return
        self._known = {name: one for name, one in self._known.items() if name in ("place", "copy")}
        self.note(**destination)

    def settle(self) -> None:
        """Note where a run trains, and whether that is a copy of another directory: then it is a run of its own.

        One that was moved or is mounted elsewhere is the same run.
        """
        directory, was = self.directory.absolute(), self.get("place")
        facts = directory.stat()
        here = {"path": str(directory), "host": gethostname(), "device": facts.st_dev, "inode": facts.st_ino}
        if was is not None and _is_copy(was, here):
            _log.info("%s is a copy: MLflow shows it as a run of its own", directory)
            self._known = {name: self._known[name] for name in ("tracking_uri", "experiment") if name in self._known}
            self._known["copy"] = uuid4().hex
        if was != here:
            self.note(place=here)

    def note(self, **facts: Any) -> None:
        """Write down more; whatever gets lost is looked up in MLflow, or uploaded a second time to the same place."""
        self._known |= facts
        with contextlib.suppress(OSError):
            commit_text(self._file, json.dumps(self._known, indent=2) + "\n")


def _is_copy(was: dict[str, Any], here: dict[str, Any]) -> bool:
    if was["path"] == here["path"]:
        return False
    with contextlib.suppress(OSError):
        there = os.stat(was["path"])
        if (there.st_dev, there.st_ino) != (here["device"], here["inode"]) and there.st_ino == was["inode"]:
            return True  # both are there
    if was["inode"] == here["inode"]:
        return False
    # A move to another disk leaves nothing behind. Devices of another host have other numbers.
    return bool(was["host"] != here["host"] or was["device"] == here["device"])


def left_in(directory: Path) -> int:
    """Count the entries of the outbox that MLflow does not have, as far as the run directory knows."""
    try:
        return sum(1 for _ in entries(directory / OUTBOX, UploadCursor(directory).get("delivered", 0)))
    except OSError:
        return 0


@dataclass(frozen=True)
class Store:
    uri: str
    database: Path | None = None  # its SQLite file
    # Where a new experiment puts its files: MLflow's own default is ./mlruns, another place for each working directory.
    artifacts: str | None = None  # None leaves the choice to the server


def locate(uri: str | None, home: Path) -> Store:
    """Choose the store: the one configured, else MLFLOW_TRACKING_URI, else a SQLite file in `home`."""
    key = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    uri = uri or os.environ.get(key) or f"sqlite:///{home.absolute() / 'mlflow.db'}"
    try:
        scheme = urlsplit(uri).scheme
    except ValueError as error:  # a bracket that is left open
        raise ConfigError(key, uri, f"is no address ({error}): give one such as http://host:5000") from None
    if scheme in ("", "file") and uri not in SCHEMELESS:
        why = "MLflow no longer takes a plain directory: give sqlite:///mlflow.db or the address of a server"
        raise ConfigError(key, uri, why)
    known = ("http", "https", *SCHEMELESS, *_DATABASES)
    plugins = (one.name for one in entry_points(group="mlflow.tracking_store"))
    if scheme.partition("+")[0] not in known and uri not in SCHEMELESS and scheme not in plugins:
        why = "MLflow has no such kind of store: give http://host:5000, sqlite:///file.db, postgresql://..."
        raise ConfigError(key, uri, why)
    if file := _SQLITE_FILE.fullmatch(uri):
        path = Path(file["path"]).expanduser().absolute()
        return Store(f"{file['scheme']}:///{path}{file['options'] or ''}", path, _artifacts(path.parent))
    return Store(uri, artifacts=_artifacts(home.absolute()) if scheme.startswith(_DATABASES) else None)


def _artifacts(home: Path) -> str:
    return home.joinpath("mlartifacts").as_uri()


def url(tracking_uri: str, experiment_id: str, run_id: str) -> str | None:
    """Return the link to the run's overview, for a database under the address where `ui_command` shows it."""
    if tracking_uri.startswith(("http://", "https://")):
        root = _USER.sub("://", masked(tracking_uri)).rstrip("/")  # a link with *** for a password opens nothing
    elif tracking_uri.split(":")[0] in SCHEMELESS:
        return None
    else:
        root = DEFAULT_UI
    return f"{root}/{run_page(experiment_id, run_id)}"


def run_page(experiment_id: str, run_id: str, page: str = "") -> str:
    """Return the link to a page of a run (the overview, /traces, /artifacts/PATH) from others of the same server."""
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"#/experiments/{experiment_id}/runs/{run_id}{page}?workflowType=machine_learning"


# ------------------------------------------------------------------------------------------------------ the connection

# A tag to find the run by when its id is lost. MLflow's pages hide tags of this name.
KEY = "mlflow.resilience.key"
_NOTE = "mlflow.note.content"
_OURS = "mlflow.resilience.note"  # the digest of the last description that this program wrote

# Set where the user has not, in the process that uploads.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the uploader retries; urllib3 would do so for minutes, with warnings
}

_TAG_LENGTH = 8000  # of MLflow's own limits
MOST_METRICS, _MOST_PARAMS, _PARAM_LENGTH, _NAME_LENGTH = 1000, 100, 6000, 250
# MLflow's page sorts the sections of charts by name, and shows metrics without a section last. With these names the
# curves of the training come first.
_SECTIONS = {"eval": "validation", "knobs": "treatment"}

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED")

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    client: MlflowClient
    uri: str  # with its secrets, if it has any
    experiment_id: str
    run: TrackedRun
    key: str  # of the tag by which it is found
    cursor: UploadCursor

    @property
    def run_id(self) -> str:
        return self.run.run_id

    def forget_twins(self) -> None:
        """Delete other runs of the same outbox: a server that hung may have created one and never answered."""
        for twin in _of_key(self.client, self.experiment_id, self.key):
            if twin.info.run_id != self.run_id:
                self.client.delete_run(twin.info.run_id)

    def add_params(self, values: Mapping[str, Any]) -> None:
        """Add parameters; one that is there keeps its first value."""
        from mlflow.entities import Param

        there = self.client.get_run(self.run_id).data.params
        params = {name(key): cut(value, _PARAM_LENGTH) for key, value in values.items()}
        new = [Param(key, value) for key, value in params.items() if key not in there]
        for some in slices(new, _MOST_PARAMS):
            self.client.log_batch(self.run_id, params=some)

    def show_tags(self, tags: Mapping[str, str], note: str) -> None:
        """Set the tags and the description of the run, unless a person has written another description."""
        from mlflow.entities import RunTag

        there, tags = self.client.get_run(self.run_id).data.tags, dict(tags)
        if _digest(there.get(_NOTE, "")) in (_digest(""), there.get(_OURS)):
            tags |= {_NOTE: note, _OURS: _digest(cut(note, _TAG_LENGTH))}
        for some in slices([RunTag(name(key), cut(value, _TAG_LENGTH)) for key, value in tags.items()], _MOST_PARAMS):
            self.client.log_batch(self.run_id, tags=some)


def connect(store: Store, experiment: str, run_dir: Path) -> Connection:
    """Find the run that a run directory belongs to, or create it. Raises whatever prevents that."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from mlflow import MlflowClient

    import_module("mlflow.utils.logging_utils").should_suppress_logs_in_thread.set(True)
    if store.database and not store.database.exists():
        _create(store.database)
    client, where = MlflowClient(store.uri), masked(store.uri)
    experiment_id = _experiment(client, experiment, store.artifacts)
    cursor = UploadCursor(run_dir)
    cursor.aim(where, experiment)
    key = _key(cursor)
    if (known := cursor.run) is not None and is_there(client, known.run_id):
        run_id = known.run_id
    else:
        twins = _of_key(client, experiment_id, key)
        run_id = twins[0].info.run_id if twins else _begin(client, experiment_id, key, cursor.directory)
        cursor.note(run_id=run_id, delivered=0)
    run = TrackedRun(run_id, where, url(where, experiment_id, run_id))
    cursor.note(url=run.url)
    return Connection(client, store.uri, experiment_id, run, key, cursor)


def _key(cursor: UploadCursor) -> str:
    """Return the key of a run: no other outbox has its first line, except those of copies of the directory."""
    outbox = cursor.directory / OUTBOX
    with open(outbox, "rb") as file:
        first = file.readline(2**20)
    if not first.endswith(b"\n"):
        raise FileNotFoundError(f"{outbox} holds nothing yet")
    return hashlib.sha256(first + cursor.get("copy", "").encode()).hexdigest()[:32]


def _begin(client: MlflowClient, experiment: str, key: str, run_dir: Path) -> str:
    written = [entry for entry, _ in entries(run_dir / OUTBOX) if entry is not None]
    began = next((one for one in written if one["kind"] == BEGAN), {})
    began_ms = written[0]["at"] if written else None
    # Without a source: its row would push the first line of the description off the screen of a laptop.
    tags = {"mlflow.user": psutil.Process().username(), KEY: key}
    if sweep := began.get("sweep"):
        tags["resilience.sweep"] = cut(sweep, _TAG_LENGTH)
    return str(client.create_run(experiment, began_ms, tags, run_dir.name).info.run_id)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_refusal(error: Exception) -> bool:
    """Say whether MLflow would give the same answer next time: what it refuses is dropped, not retried."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, NotImplementedError):  # a server that is too old for it
        return True
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


def is_unreachable(error: BaseException | None) -> bool:
    """Say whether the server did not answer: then nothing else needs to be tried now."""
    from requests.exceptions import ConnectionError as NoConnection
    from requests.exceptions import Timeout

    while error is not None:
        if isinstance(error, NoConnection | Timeout | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_there(client: MlflowClient, run_id: str) -> bool:
    """Say whether a run is there; a person may have deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", *_REFUSALS):
            return False
        raise


def root_cause(error: BaseException) -> str:
    """Return the innermost cause: `Connection refused` lies five wrappers deep."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return f"{type(error).__name__}: {error}"


def metrics_of(entry: Entry) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(metric_name(key), _number(one), entry["at"], entry["tick"]) for key, one in entry["values"].items()]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan  # a curve of NaN is noticed sooner than a missing one


@lru_cache(maxsize=4096)
def name(key: str) -> str:
    """Return the nearest name that MLflow accepts: it refuses a whole batch for one `acc@1` or `../x`."""
    parts = re.sub(r"[^\w.\- :/]", "_", str(key)).split("/")
    parts = [part for part in parts if part not in ("", ".", "..")]
    return "/".join(parts).lstrip("./")[:_NAME_LENGTH].rstrip("/") or "_"


def metric_name(key: str) -> str:
    section, slash, rest = key.partition("/")
    return name(f"{_SECTIONS.get(section, section)}/{rest}" if slash else f"train/{key}")


def cut(value: Any, length: int) -> str:
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    try:
        return str(client.create_experiment(name, artifacts) if found is None else found.experiment_id)
    except Exception:
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return str(found.experiment_id)  # another run was first


def _of_key(client: MlflowClient, experiment: str, key: str) -> Sequence[Run]:
    # One, unless an answer was lost.
    return list(client.search_runs([experiment], f"tags.`{KEY}` = '{key}'", order_by=["attributes.start_time ASC"]))


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


def slices(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    return (items[start : start + length] for start in range(0, len(items), length))
