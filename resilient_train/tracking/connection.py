"""The way to a run in MLflow: the run is found there, or begun, and never begun twice."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from resilient_train.files import open_plain
from resilient_train.tracking.store import KnownRun, Store, TrackedRun, shown, url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# A tag: what the run is found again by when nothing else is known of it. MLflow's pages hide tags of this name.
KEY = "mlflow.resilience.key"

# Set where the user has not; they hold for the process that delivers.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # whoever delivers tries again; urllib3 does so out loud, for minutes
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
}

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED")


@dataclass(frozen=True)
class Connection:
    """A run in MLflow that is there, and the client that reaches it."""

    client: MlflowClient
    uri: str  # with its secrets, if it has any
    experiment_id: str
    run: TrackedRun

    @property
    def run_id(self) -> str:
        return self.run.run_id


def connect(store: Store, experiment: str, known: KnownRun, outbox: Path, began_ms: int) -> Connection:
    """Take up the run that the outbox belongs to, or begin it. Raises whatever keeps it from that."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    import_module("mlflow.utils.logging_utils").should_suppress_logs_in_thread.set(True)
    if store.database and not store.database.exists():
        _create(store.database)
    client = MlflowClient(store.uri)
    experiment_id = _experiment(client, experiment, store.artifacts)
    where = shown(store.uri)
    run_id = known.recall(where, experiment)
    key = _key(outbox, known)
    if run_id is None or not is_there(client, run_id):
        twins = _of_key(client, experiment_id, key)
        if not twins:
            tags = {"mlflow.source.name": "resilient_train", "mlflow.source.type": "LOCAL", "mlflow.user": _user()}
            twins = [client.create_run(experiment_id, began_ms, tags | {KEY: key}, known.name)]
        run_id = twins[0].info.run_id
        known.note(run_id=run_id, delivered=0, seal=None, files=[], shown={})
    return Connection(client, store.uri, experiment_id, TrackedRun(run_id, where, url(where, experiment_id, run_id)))


def forget_twins(connection: Connection, known: KnownRun, outbox: Path) -> None:
    """Delete other runs of the same outbox: a server that hung may have begun one that nobody heard of."""
    for twin in _of_key(connection.client, connection.experiment_id, _key(outbox, known)):
        if twin.info.run_id != connection.run_id:
            connection.client.delete_run(twin.info.run_id)


def is_refusal(error: Exception) -> bool:
    """Say whether the answer would be the same next time: then what it is about is dropped, not tried again."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, NotImplementedError):  # a server that is too old for it
        return True
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


def is_unreachable(error: BaseException | None) -> bool:
    """Say whether nobody answered: then there is no use in asking for something else."""
    from requests.exceptions import ConnectionError as NoConnection
    from requests.exceptions import Timeout

    while error is not None:
        if isinstance(error, NoConnection | Timeout | ConnectionError | TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_there(client: MlflowClient, run_id: str) -> bool:
    """Say whether a run is there; somebody may have deleted it since it was begun."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", *_REFUSALS):
            return False
        raise


def root_cause(error: BaseException) -> str:
    """Dig out what a person understands: `Connection refused` lies five wrappers deep."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return f"{type(error).__name__}: {error}"


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    known = client.get_experiment_by_name(name)
    if known is None:
        with contextlib.suppress(Exception):  # another run was first
            return str(client.create_experiment(name, artifacts))
        known = client.get_experiment_by_name(name)
        if known is None:
            return str(client.create_experiment(name, artifacts))  # for the reason it gives
    return str(known.experiment_id)


def _of_key(client: MlflowClient, experiment_id: str, key: str) -> Sequence[Run]:
    """All runs of the same outbox, the oldest first: one, unless an answer was lost on its way."""
    return list(client.search_runs([experiment_id], f"tags.`{KEY}` = '{key}'", order_by=["attributes.start_time ASC"]))


def _key(outbox: Path, known: KnownRun) -> str:
    """What the run is known by: the first line of its outbox, which only copies of its directory have as well."""
    with open_plain(outbox) as file:
        return hashlib.sha256(file.readline(2**20) + known.copy.encode()).hexdigest()[:32]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _create(database: Path) -> None:
    """Have MLflow create its database out of sight: a kill half way through its migrations would ruin it for good."""
    from mlflow import MlflowClient

    database.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{database.name}-", dir=database.parent) as unseen:
        new = Path(unseen) / "new.db"
        MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
        try:
            os.link(new, database)
        except FileExistsError:
            pass  # another process was first, and has perhaps written to it
        except OSError:  # a file system without hard links
            new.rename(database)
