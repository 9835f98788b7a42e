"""The run in MLflow: how it is found, and what a server accepts of it."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from resilient_train.record.journal import Entry, entries
from resilient_train.record.outbox import OUTBOX
from resilient_train.secrets import masked
from resilient_train.tracking.connection import DATABASES, UploadCursor, database_of, url

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
        from mlflow.tracing.client import TracingClient

        database = database_of(uri)
        if database is not None and not database.exists():
            _create(database)
        self.client, self.tracing, self._say = MlflowClient(uri), TracingClient(uri), say
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
        # No other outbox has its first line, except those of copies of the directory.
        with open(run_dir / OUTBOX, "rb") as file:
            first = file.readline()
        if not first.endswith(b"\n"):
            raise EOFError(f"{OUTBOX} holds nothing yet")
        self._key = hashlib.sha256(first + self.cursor.get("copy", "").encode()).hexdigest()[:32]
        runs = self._of_key()
        if not runs:
            began_ms = next((one["at"] for one, _ in entries(run_dir / OUTBOX) if one is not None), None)
            # Without a source: its row would push the first line of the description off the screen of a laptop.
            tags = {"mlflow.user": psutil.Process().username(), _KEY: self._key}
            runs = [self.client.create_run(self.experiment_id, began_ms, tags, run_dir.name).info.run_id]
        if self.cursor.get("run_id") not in runs:  # a person may have deleted it
            run_id = runs[0]
            self.cursor.note(run_id=run_id, url=url(masked(uri), self.experiment_id, run_id), delivered=0, traced=[])
        self.run_id: str = self.cursor["run_id"]

    def send(self, call: Callable[..., object], *what: Any, **named: Any) -> None:
        """Call it with the id of the run, and say why where MLflow would refuse it next time, too."""
        from mlflow.exceptions import MlflowException

        try:
            call(self.run_id, *what, **named)
        except (MlflowException, NotImplementedError) as error:
            if isinstance(error, MlflowException) and error.error_code not in _REFUSALS:
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
        if not (known := shown.get(_NOTE)) or _digest(known) == shown.get(_OURS):
            tags |= {_NOTE: note, _OURS: _digest(note)}
        self._log("tags", [RunTag(key, value) for key, value in tags.items()])

    def _log(self, kind: str, items: list[Any], most: int = _MOST_PARAMS) -> None:
        for start in range(0, len(items), most):
            self.send(self.client.log_batch, **{kind: items[start : start + most]})

    def forget_twins(self) -> None:
        """Delete other runs of the same outbox: a server that hung may have created one and never answered."""
        for run_id in self._of_key():
            if run_id != self.run_id:
                self.client.delete_run(run_id)

    def _of_key(self) -> list[str]:
        found = self.client.search_runs([self.experiment_id], f"tags.`{_KEY}` = '{self._key}'")
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
