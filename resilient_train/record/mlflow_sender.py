"""The one thread that talks to MLflow, so that training never has to."""

from __future__ import annotations

import getpass
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from resilient_train.record.delivery.store import KnownRun, Store, TrackedRun, url
from resilient_train.secrets import masked

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

SEND_EVERY_S = 1.5
RETRY_AT_MOST_S = 30.0
LAST_PAUSES_S = (1.0, 1.0, 0.0)  # after each attempt to conclude: a server that is gone is not waited for
ROWS_AT_ONCE = 200
MOST_METRICS, MOST_PARAMS, PARAM_LENGTH, TAG_LENGTH, NAME_LENGTH = 1000, 100, 6000, 8000, 250  # MLflow's own limits
QUEUE_LIMIT = 50_000  # rows, about 1 KB each: hours of an absent server

# Set where the user has not. They hold for the whole process, since MLflow reads nothing else.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender tries again itself; urllib3 does so out loud, for minutes
}

# Answers that would be the same next time: what they are about is dropped. Everything else is tried again.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")

_log = logging.getLogger("resilient_train")
T = TypeVar("T")

# A process forked while a module is being imported waits for ever when it imports that module too: its lock is
# held by a thread the child does not have. A data worker could, so a fork waits for the one import that is slow.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


class Metrics(NamedTuple):
    """What was measured at one tick."""

    tick: int
    time_ms: int
    values: Mapping[str, float]


class Params(NamedTuple):
    """What the run was given."""

    values: Mapping[str, Any]


class Tags(NamedTuple):
    """What is said about the run; the last word on a name counts."""

    values: Mapping[str, Any]


Record = Metrics | Params | Tags
Batch: TypeAlias = "tuple[Sequence[Metric], Sequence[Param], Sequence[RunTag]]"  # what `log_batch` takes


class Sender:
    """Queues records and, from `start` on, delivers them; nothing it meets reaches the caller as an exception."""

    def __init__(self, store: Store, experiment: str, known: KnownRun, system_metrics: bool) -> None:
        self.run: TrackedRun | None = None
        self._store, self._experiment, self._known = store, experiment, known
        self._wants_system_metrics = system_metrics
        self._session: tuple[MlflowClient, str] | None = None
        self._monitor: Any = None
        self._records: deque[Record] = deque()
        self._taken: list[Record] = []  # out of the queue, not known to have arrived
        self._files: deque[Path] = deque()  # apart, so that a broken artifact store does not hold up the curves
        self._thread = threading.Thread(target=self._main, name="mlflow-sender", daemon=True)
        self._started_ms = self._ended_ms = 0
        self._status = "FINISHED"
        self._closing, self._concluded = threading.Event(), False
        self._dropped = self._refused = self._failures = 0
        self._complained, self._last_error = False, ""
        # Here and not in the thread: setenv while another thread reads the environment can crash the process.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    @property
    def where(self) -> str:
        """The address for a person to read."""
        return masked(self._store.uri)

    def put(self, record: Record) -> None:
        """Queue a record; costs less than a microsecond and never waits."""
        if len(self._records) < QUEUE_LIMIT:
            self._records.append(record)
        else:
            self._dropped += 1

    def put_file(self, path: Path) -> None:
        """Queue a file or a directory, which is read when it is sent."""
        self._files.append(path.absolute())

    def start(self) -> None:
        """Let the thread begin; a second call does nothing."""
        if not self._started_ms:
            self._started_ms = _now_ms()
            self._thread.start()

    def close(self, status: str, within_s: float) -> None:
        """Deliver what is queued and end the run with `status`, for no longer than `within_s`."""
        if not self._closing.is_set():
            self._status, self._ended_ms = status, _now_ms()
            self.start()
            self._closing.set()
        self._thread.join(within_s)

    @property
    def undelivered(self) -> str:
        """Say in one line what MLflow does not have; empty when it has everything."""
        counts = {
            "records waiting": len(self._records) + len(self._taken),
            "files waiting": len(self._files),
            "records dropped by a full queue": self._dropped,
            "values refused": self._refused,
        }
        parts = [f"{name}: {count:,}" for name, count in counts.items() if count]
        parts += [] if self._concluded else ["end status not set"]
        return f"{', '.join(parts)} ({self._last_error or 'no error, only too slow'})" if parts else ""

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            pause = SEND_EVERY_S if self._succeeds(self._deliver) else min(2 * pause + 1, RETRY_AT_MOST_S)
        for pause in LAST_PAUSES_S:
            if self._succeeds(self._conclude):
                break
            time.sleep(pause)

    def _succeeds(self, action: Callable[[MlflowClient, str], None]) -> bool:
        try:
            action(*self._connect())
        except Exception as error:  # whatever goes wrong with tracking, the run goes on
            self._failures += 1
            # A single failure is no news: the server may have closed an idle connection.
            self._note(_root_cause(error), aloud=self._failures > 1)
            return False
        self._failures = 0
        return True

    def _note(self, error: str, aloud: bool = True) -> None:
        self._last_error = " ".join(masked(error).split())[:200]
        if aloud and not self._complained:
            self._complained = True
            _log.warning("MLflow at %s: %s. Training is not affected.", self.where, self._last_error)

    def _deliver(self, client: MlflowClient, run_id: str) -> None:
        self._send_records(client, run_id)
        self._send_files(client, run_id)

    def _conclude(self, client: MlflowClient, run_id: str) -> None:
        self._send_records(client, run_id)
        if self._monitor:
            self._monitor.finish()
            self._monitor = None
        client.set_terminated(run_id, self._status, self._ended_ms)
        self._concluded = True
        self._send_files(client, run_id)

    def _connect(self) -> tuple[MlflowClient, str]:
        if self._session is None:
            with _importing:
                from mlflow import MlflowClient
            import_module("mlflow.utils.logging_utils").should_suppress_logs_in_thread.set(True)
            if self._store.database and not self._store.database.exists():
                _create(self._store.database)
            client = MlflowClient(self._store.uri)
            known = client.get_experiment_by_name(self._experiment)
            experiment_id = (
                known.experiment_id if known else client.create_experiment(self._experiment, self._store.artifacts)
            )
            run_id = self._known.recalled(self.where, self._experiment)
            if run_id is None or not _is_there(client, run_id):
                run_id = self._begun(client, experiment_id)
            self.run = TrackedRun(run_id, self.where, url(self.where, experiment_id, run_id))
            self._session = client, run_id
            if self._wants_system_metrics:
                self._start_monitor(run_id)
        return self._session

    def _begun(self, client: MlflowClient, experiment_id: str) -> str:
        tags = {"mlflow.source.name": "resilient_train", "mlflow.source.type": "LOCAL", "mlflow.user": _user()}
        run_id: str = client.create_run(experiment_id, self._started_ms, tags, self._known.name).info.run_id
        self._known.note(run_id, self.where, self._experiment)
        return run_id

    def _start_monitor(self, run_id: str) -> None:
        try:
            module = import_module("mlflow.system_metrics.system_metrics_monitor")
            monitor = module.SystemMetricsMonitor(run_id, tracking_uri=self._store.uri)
            monitor.start()
            self._monitor = monitor
        except Exception as error:  # psutil or a driver is missing: the curves of the run are worth having without
            _log.warning("No system metrics in MLflow: %s", _root_cause(error))

    def _send_records(self, client: MlflowClient, run_id: str) -> None:
        while self._taken or self._records:
            if not self._taken:
                self._taken = [self._records.popleft() for _ in range(min(len(self._records), ROWS_AT_ONCE))]
            # After a failure all of it is sent again: a metric with the same key, tick, time and value is one row.
            for batch in _batches(self._taken):
                self._send_batch(client, run_id, batch)
            self._taken = []

    def _send_batch(self, client: MlflowClient, run_id: str, batch: Batch) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client.log_batch(run_id, *batch)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            self._refuse(sum(map(len, batch)), error.message)

    def _send_files(self, client: MlflowClient, run_id: str) -> None:
        while self._files:
            path = self._files[0]
            if path.exists():
                client.log_artifact(run_id, str(path))
            else:
                self._refuse(1, f"{path} is gone")
            self._files.popleft()

    def _refuse(self, count: int, why: str) -> None:
        self._refused += count
        self._note(why)


def _is_there(client: MlflowClient, run_id: str) -> bool:
    """Take up a run that an earlier process began; somebody may have deleted it since."""
    from mlflow.exceptions import MlflowException

    try:
        info = client.get_run(run_id).info
        if info.lifecycle_stage != "active":
            return False
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", *_REFUSALS):
            return False
        raise
    return True


def _batches(rows: Sequence[Record]) -> Iterator[Batch]:
    """Translate rows into batches that keep MLflow's limits."""
    from mlflow.entities import Metric, Param, RunTag

    metrics: list[Metric] = []
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    for row in rows:
        match row:
            case Metrics(tick, time_ms, values):
                metrics += [Metric(_name(key), _number(value), time_ms, tick) for key, value in values.items()]
            case Params(values):
                params |= {_name(key): _cut(value, PARAM_LENGTH) for key, value in values.items()}
            case Tags(values):
                tags |= {_name(key): _cut(value, TAG_LENGTH) for key, value in values.items()}
    yield from ((some, (), ()) for some in _slices(metrics, MOST_METRICS))
    yield from (((), some, ()) for some in _slices([Param(*item) for item in params.items()], MOST_PARAMS))
    yield from (((), (), some) for some in _slices([RunTag(*item) for item in tags.items()], MOST_PARAMS))


def _slices(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    return (items[start : start + length] for start in range(0, len(items), length))


@lru_cache(maxsize=4096)
def _name(key: str) -> str:
    """Return the nearest name that MLflow accepts: it refuses a whole batch for one `acc@1` or `../x`."""
    parts = re.sub(r"[^\w.\- :/]", "_", str(key)).split("/")
    plain = "/".join(part for part in parts if part not in ("", ".", ".."))
    return plain.lstrip("./")[:NAME_LENGTH].rstrip("/") or "_"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan  # a curve of NaN is found sooner than one that is missing


def _cut(value: Any, length: int) -> str:
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def _root_cause(error: BaseException) -> str:
    """Dig out what a person understands: `Connection refused` lies five wrappers deep."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return f"{type(error).__name__}: {error}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


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
