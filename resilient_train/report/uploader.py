"""Uploads what a run directory holds to MLflow: each entry of the outbox once, and the run as it is now.

Of a run MLflow shows a description, tags and files. All of it may be uploaded again, to the same place.
"""

from __future__ import annotations

import fcntl
import math
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psutil

from resilient_train.durable.endings import CONFIG, LOOP
from resilient_train.durable.incident_log import INCIDENTS
from resilient_train.durable.journal import BEGAN, METRICS, OUTBOX, entries
from resilient_train.ground.files import digest_of
from resilient_train.ground.secrets import masked
from resilient_train.ground.types import fact
from resilient_train.ground.wording import describe, printable, say, tags
from resilient_train.report.connection import DATABASES, UploadCursor, database_of, root_cause, url
from resilient_train.report.story import Story, left, read_story, things_to_do, verdict

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENTRIES_AT_ONCE = 200

_AS_THEY_ARE = (CONFIG, LOOP, INCIDENTS, "train.log")  # files of the run directory
_REST_S = 10.0  # between two descriptions, which take a second where there are many incidents

# Set where the user has not.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the caller retries; urllib3 would do so for minutes, with warnings
}

# A tag to find the run by when its id is lost. MLflow's pages hide tags of this name.
_KEY = "mlflow.resilience.key"
_NOTE = "mlflow.note.content"
_OURS = "mlflow.resilience.note"  # the digest of the last description that this program wrote

# MLflow's own limits, of a request and of characters.
_MOST_METRICS, _MOST_OTHERS = 1000, 100
_TAG_LENGTH, _PARAM_LENGTH, _NAME_LENGTH = 8000, 6000, 250

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED")


class Uploader:
    """Uploads one run directory to one store. Whatever goes wrong raises, and the next call continues there."""

    def __init__(self, run_dir: Path, uri: str, experiment: str, say: Callable[[str], None]) -> None:
        """`say` gets what MLflow will never take."""
        self.run_dir, self._uri, self._experiment, self._say = run_dir, uri, experiment, say
        self._outbox: int | None = None  # the file, locked: one process uploads at a time
        self._client: MlflowClient | None = None
        self._rests_until = 0.0

    def upload(self, *, is_last: bool = False) -> None:
        """Upload all that is there by now: first the entries of the outbox; if it `is_last`, also how the run ended."""
        if self._outbox is None:
            self._outbox = os.open(self.run_dir / OUTBOX, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._outbox, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError("another process is uploading it") from None
        client = self._client = self._client or self._connected()
        self._upload_entries(client, self._outbox)
        if is_last or time.monotonic() > self._rests_until:
            self._describe(client, is_last=is_last)
            self._rests_until = time.monotonic() + _REST_S
        for name in _AS_THEY_ARE if is_last else ():
            file = self.run_dir / name  # of a directory that somebody else made it may be anything
            if file.is_file() and not file.is_symlink():
                self._send(client.log_artifact, str(file))

    def close(self) -> None:
        if self._outbox is not None:
            os.close(self._outbox)

    def _connected(self) -> MlflowClient:
        """Find the run that the run directory belongs to, or create it. Raises whatever prevents that."""
        os.environ.update(ENVIRONMENT | os.environ)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        database = database_of(self._uri)
        if database is not None and not database.exists():
            _create(database)
        client = MlflowClient(self._uri)
        home = self.run_dir.parent if database is None else database.parent
        # MLflow's own default is ./mlruns, another place for each working directory. A server has its own.
        artifacts = home.joinpath("mlartifacts").as_uri() if self._uri.startswith(DATABASES) else None
        try:
            experiment_id = str(client.create_experiment(self._experiment, artifacts))
        except MlflowException:  # it is there, perhaps since another run was first
            found = client.get_experiment_by_name(self._experiment)
            assert found is not None
            experiment_id = str(found.experiment_id)
        self.cursor = UploadCursor(self.run_dir)
        self.cursor.aim(masked(self._uri), self._experiment)
        # No other outbox begins with this entry, except those of copies of the directory, which are the same run.
        first = next((one for one, _ in entries(self.run_dir / OUTBOX) if one is not None), None)
        if first is None:
            raise EOFError(f"{OUTBOX} holds nothing yet")
        key = digest_of(first)[:32]
        order = ["attributes.start_time ASC"]
        known = client.search_runs([experiment_id], f"tags.`{_KEY}` = '{key}'", order_by=order)
        runs = [one.info.run_id for one in known]
        if not runs:
            # Without a source: its row would push the first line of the description off the screen of a laptop.
            tags_of_run = {"mlflow.user": psutil.Process().username(), _KEY: key}
            runs = [client.create_run(experiment_id, first["at"], tags_of_run, self.run_dir.name).info.run_id]
        if self.cursor.get("run_id") not in runs:  # a person may have deleted it
            link = url(masked(self._uri), experiment_id, runs[0])
            self.cursor.note(run_id=runs[0], url=link, delivered=0)
        return client

    def _send(self, call: Callable[..., object], *what: Any, **named: Any) -> None:
        """Call it with the id of the run, and say why where MLflow would refuse it next time, too."""
        from mlflow.exceptions import MlflowException

        try:
            call(self.cursor["run_id"], *what, **named)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            self._say(f"MLflow refused {root_cause(error)}")

    def _log(self, client: MlflowClient, kind: str, items: list[Any], most: int = _MOST_OTHERS) -> None:
        for start in range(0, len(items), most):
            self._send(client.log_batch, **{kind: items[start : start + most]})

    def _upload_entries(self, client: MlflowClient, outbox: int) -> None:
        from mlflow.entities import Metric, Param

        end = self.cursor.get("delivered", 0)
        while portion := list(islice(entries(self.run_dir / OUTBOX, end), ENTRIES_AT_ONCE)):
            metrics = []
            for row in (entry for entry, _ in portion if entry is not None):
                if row["kind"] == METRICS:
                    for key, value in row["values"].items():
                        metrics.append(Metric(metric_name(key), _number(value), row["at"], row["tick"]))
                elif row["kind"] == BEGAN:  # a parameter that is there keeps its first value
                    there = client.get_run(self.cursor["run_id"]).data.params
                    params = {name(key): cut(value, _PARAM_LENGTH) for key, value in row["params"].items()}
                    self._log(client, "params", [Param(*one) for one in params.items() if one[0] not in there])
            self._log(client, "metrics", metrics, _MOST_METRICS)
            end = portion[-1][1]
            with suppress(OSError):  # else a power cut could take it, and other lines its place
                os.fsync(outbox)
            self.cursor.note(delivered=end)

    def _describe(self, client: MlflowClient, *, is_last: bool) -> None:
        """Show how the run stands, with a description unless a person has written another one."""
        from mlflow.entities import RunTag

        story = read_story(self.run_dir)
        is_over = is_last and story.state not in ("running", "none")
        there = client.get_run(self.cursor["run_id"])
        if is_over and there.info.status != story.in_mlflow:
            self._send(client.set_terminated, story.in_mlflow)
        elif not is_over and there.info.status != "RUNNING":
            self._send(client.update_run, "RUNNING")
        shown = {key: cut(value, _TAG_LENGTH) for key, value in tags(story.incidents, story.status).items()}
        known, ours = (there.data.tags.get(key) for key in (_NOTE, _OURS))
        if not known or digest_of(known) == ours:
            description = note(story)
            shown |= {_NOTE: description, _OURS: digest_of(description)}
        self._log(client, "tags", [RunTag(key, value) for key, value in shown.items()])


def _create(database: Path) -> None:
    """Let MLflow create its database under another name: a kill in the middle of its migrations would ruin it."""
    from mlflow import MlflowClient

    database.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{database.name}-", dir=database.parent) as scratch:
        new = Path(scratch) / "new.db"
        MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another process was first
            os.link(new, database)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan  # a curve of NaN is noticed sooner than a missing one


def name(key: str) -> str:
    """Return the nearest name that MLflow accepts: it refuses a whole batch for one `acc@1` or `../x`."""
    path = posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", str(key)))
    return path.lstrip("./")[:_NAME_LENGTH].rstrip("/") or "_"


def metric_name(key: str) -> str:
    return name(key if "/" in key else f"train/{key}")


def cut(value: Any, length: int) -> str:
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


_MARKS = {one: f"\\{one}" for one in "*_[]~"} | {one: f"&#{ord(one)};" for one in "&<>|\\@$¨"} | {"`": ""}

LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_TO_DO, _MOST_LINES = 3, 80  # of incidents
_LONGEST = 400  # characters of a line


def note(story: Story) -> str:
    """Return the description in MLflow, with as many of the newest incidents as fit below its limit."""
    headline, details = verdict(story)
    things = [text(one) for one in things_to_do(story, _MOST_TO_DO)]
    first = f"**{text(headline)}.**"
    if things:
        first += f" **Do:** {' '.join(things)}"
    whole = "\n".join([first, "", *_listed([details, *left(story), say(fact("axis"))])])
    if story.incidents:
        newest = [describe(one, "line") for one in story.incidents[:-_MOST_LINES:-1]]
        whole = "\n".join([whole, "", "The incidents, the newest first:", "", *_listed(newest)])
    return whole if len(whole) <= LIMIT else whole[:LIMIT].rpartition("\n")[0]


def _listed(lines: Iterable[str]) -> list[str]:
    return [f"- {text(line)}" for line in lines]


def text(raw: str) -> str:
    """Show words as they are, in one line of markdown. Never at its start."""
    marks = [_MARKS.get(one, one) for one in printable(" ".join(raw.split()))]
    return "".join(marks[:_LONGEST])
