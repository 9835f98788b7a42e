"""Whatever a server does and whoever is killed: in the end MLflow has everything, once.

What MLflow holds is compared with the run directory, row by row. The server is a real one, behind a door that can be
dead, hang, fail, or swallow the answer to what it has done.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from flaky_mlflow import Door, Mood
from stories import incident

from resilient_train.command import sync
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.journal import BEGAN, METRICS, OUTBOX, Outbox, entries
from resilient_train.durable.lock import DirectoryLock
from resilient_train.report.connection import MLFLOW_JSON, UploadCursor, locate
from resilient_train.report.story import read_story
from resilient_train.report.tracker import OutboxTracker, TrackingConfig, build
from resilient_train.report.uploader import Uploader

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
ROWS, INCIDENTS = 450, 2
PARAMS = {f"layer.{index}": str(index) for index in range(120)}


@pytest.fixture
def door(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    door = Door(server)
    yield door
    door.close()


# ------------------------------------------------------------------------------------------------- a run, and its proof


def met(book: IncidentLog, number: int) -> None:
    book.add(incident(5, None, id=number))
    book.record_treatment(incident(5, None, id=number))
    book.close(incident(5, id=number))


def trained(run_dir: Path, rows: range = range(ROWS), incidents: int = INCIDENTS) -> Path:
    """Leave in `run_dir` what a run leaves there that has ended, or a part of it."""
    run_dir.mkdir(exist_ok=True)
    box, book = Outbox(run_dir / OUTBOX), IncidentLog(run_dir)
    box.put(BEGAN, params=PARAMS)
    for tick in rows:
        box.put(METRICS, tick=tick, values={"loss": 1 / (tick + 1), "norm": 2.0 * tick})
    (run_dir / "config.yaml").write_text("run: {}\n")
    for number in range(book.next_id, incidents + 1):
        met(book, number)
    (run_dir / "summary.json").write_text(json.dumps({"status": "completed", "exit_code": 0, "steps": ROWS}))
    book.close_files()
    return run_dir


def client_of(address: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(address)


def prove(run_dir: Path, address: str, experiment: str) -> None:
    """Hold what MLflow has against the run directory: every row, parameter, file and tag, exactly once."""
    client = client_of(address)
    home = client.get_experiment_by_name(experiment)
    assert home is not None
    [run] = client.search_runs([home.experiment_id])
    written = [entry for entry, _ in entries(run_dir / OUTBOX) if entry is not None]
    rows = [one for one in written if one["kind"] == METRICS]
    for key in ("loss", "norm"):
        mine = sorted((one["tick"], one["at"], one["values"][key]) for one in rows)
        theirs = sorted(
            (one.step, one.timestamp, one.value) for one in client.get_metric_history(run.info.run_id, f"train/{key}")
        )
        assert theirs == mine
    assert run.data.params == PARAMS
    assert run.info.status == "FINISHED"
    story = read_story(run_dir)
    assert run.data.tags["resilience.status"] == "recovered"
    assert run.data.tags["resilience.incidents"] == str(len(story.incidents))
    assert run.data.tags["resilience.cause"] == "transient"
    assert 0 < len(run.data.tags["mlflow.note.content"]) < 8000
    artifacts = [one.path for one in client.list_artifacts(run.info.run_id)]
    assert artifacts == ["config.yaml", "incidents.jsonl"]


def uploader(run_dir: Path, address: str, experiment: str) -> Uploader:
    return Uploader(run_dir, locate(address, run_dir.parent), experiment, pytest.fail)


def finished(run_dir: Path, address: str, experiment: str) -> str:
    with contextlib.closing(uploader(run_dir, address, experiment)) as one:
        one.upload(is_last=True)
    return run_id_of(run_dir)


def run_id_of(run_dir: Path) -> str:
    run = UploadCursor(run_dir).run
    assert run is not None
    return str(run["run_id"])


# ----------------------------------------------------------------------------------------------------------- the server


@pytest.mark.parametrize("mood", ["fail", "swallow"])
def test_at_whatever_request_a_server_fails_nothing_is_lost_or_doubled(
    tmp_path: Path, door: Door, server: str, mood: Mood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door shuts after the first request, then after the second one, and so on; with a new process each time."""
    from mlflow.utils import rest_utils

    experiment = f"at each request {mood}"
    run_dir = trained(tmp_path / "run", range(250), incidents=1)
    really: Any = rest_utils.http_request
    left = 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            door.mood = mood
        return really(*args, **kwargs)

    for module in [one for one in sys.modules.values() if getattr(one, "http_request", None) is really]:
        monkeypatch.setattr(module, "http_request", counted)
    for at in range(1, 200):
        left, door.mood = at, "pass"
        with contextlib.suppress(Exception):
            finished(run_dir, door.address, experiment)
            break
    left, door.mood = 0, "pass"
    assert at > 7
    prove(run_dir, server, experiment)


def test_a_run_that_goes_on_is_the_same_run(tmp_path: Path, server: str) -> None:
    """With more rows and incidents, in another process, from a folder that was moved; a lost cursor costs only time."""
    run_dir = trained(tmp_path / "run", range(200), incidents=1)
    with contextlib.closing(uploader(run_dir, server, "goes on")) as first:
        first.upload()
        run_id = run_id_of(run_dir)
        first.upload(is_last=True)
    moved = run_dir.rename(tmp_path / "moved")
    trained(moved, range(200, ROWS))
    (moved / MLFLOW_JSON).unlink()
    assert finished(moved, server, "goes on") == run_id
    prove(moved, server, "goes on")


@pytest.mark.parametrize(("lock", "status"), [("free", "KILLED"), ("held", "RUNNING")])
def test_a_run_that_ended_without_a_word_is_shown_as_killed(
    tmp_path: Path, server: str, lock: str, status: str
) -> None:
    experiment = f"a word, {lock}"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("run: {}\n")
    box = Outbox(run_dir / OUTBOX)
    box.put(BEGAN, params={})
    (run_dir / "progress").touch()
    held = DirectoryLock(run_dir) if lock == "held" else None
    run_id = finished(run_dir, server, experiment)
    if held is not None:
        held.release()
    run = client_of(server).get_run(run_id)
    assert (run.info.status, run.info.end_time is None) == (status, status == "RUNNING")
    assert run.data.tags["resilience.status"] == ("killed" if status == "KILLED" else "well")


# ----------------------------------------------------------------------------------------------- processes and commands

LIVE = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[4], sys.argv[4] + "/tracking"]
from resilient_train.report.tracker import TrackingConfig, build
from test_delivery import met, DirectoryLock, IncidentLog

run_dir, address, experiment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
run_dir.mkdir(exist_ok=True)
lock = DirectoryLock(run_dir)
config = TrackingConfig("mlflow", address, experiment, 60.0)
tracker = build(config, run_dir, run_dir.parent, {f"layer.{index}": index for index in range(120)})
(run_dir / "config.yaml").write_text("run: {}")
book = IncidentLog(run_dir)
for number in range(book.next_id, 3):
    met(book, number)
tick = 0
while True:
    tracker.write({"kind": "metrics", "tick": tick, "values": {"loss": 1 / (tick + 1), "norm": 2.0 * tick}})
    tick += 1
    time.sleep(0.002)
"""


def test_a_run_is_there_while_it_lasts_and_a_kill_is_made_up_for(
    tmp_path: Path, door: Door, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server hangs, the trainer is killed, and nobody outlives it for long; then `sync`, twice."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", LIVE, str(run_dir), door.address, "killed", str(ROOT / "tests")]
    client = client_of(server)
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as process:
        try:
            while (home := client.get_experiment_by_name("killed")) is None or not (
                runs := client.search_runs([home.experiment_id], "metrics.`train/norm` > 100")
            ):
                time.sleep(0.1)
            assert runs[0].info.status == "RUNNING"
            door.mood = "hang"
            [uploader_pid] = _children(process.pid)
        finally:
            process.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{uploader_pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{uploader_pid}").exists()
    door.mood = "pass"
    (run_dir / "summary.json").write_text('{"status": "completed", "exit_code": 0}')
    for _ in range(2):
        assert sync.main([str(run_dir)]) == 0
        assert "has everything" in capsys.readouterr().out
    prove(run_dir, server, "killed")


def test_the_end_of_a_run_waits_no_longer_than_allowed_and_says_what_is_left(
    tmp_path: Path, door: Door, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, experiment = trained(tmp_path / "run"), "drain"
    door.mood = "hang"
    tracker = build(TrackingConfig("mlflow", door.address, experiment, drain_s=4.0), run_dir, tmp_path)
    assert isinstance(tracker, OutboxTracker)
    began = time.monotonic()
    assert tracker.finish() is None
    assert time.monotonic() - began < 60  # of a machine that is busy; far below what a client of MLflow waits by itself
    assert not any(b"--follow" in Path(f"/proc/{one}/cmdline").read_bytes() for one in _children(os.getpid()))
    with monkeypatch.context() as impatient:
        impatient.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        assert sync.main([str(run_dir)]) == 1
    door.mood = "pass"
    assert sync.main([str(run_dir)]) == 0
    prove(run_dir, server, experiment)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        *(("nothing there", "no run there"), ("a secret", "MLFLOW_TRACKING_URI"), ("elsewhere", "--uri")),
        *(("an address", "nowhere: MLflow takes no such"), ("no outbox", "a run that was not tracked")),
    ],
)
def test_sync_says_in_one_line_what_it_lacks(
    tmp_path: Path, what: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    address = {"a secret": "http://***@127.0.0.1:1", "elsewhere": "sqlite:////not/here/mlflow.db"}
    address["an address"] = "http://127.0.0.1:1"
    if what != "nothing there":
        (run_dir / ("config.yaml" if what == "no outbox" else OUTBOX)).touch()
    if what in address:
        UploadCursor(run_dir).aim(address[what], "e")
    assert sync.main([str(run_dir), *(["--uri", "nowhere"] if what == "an address" else [])]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


class Listening(BaseHTTPRequestHandler):
    """Notes who comes to it with what, and has nothing for anybody."""

    came: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.came.append(self.headers.get("Authorization"))
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


def test_sync_sends_credentials_only_where_a_person_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that only the directory names gets none, from a file neither."""
    (tmp_path / ".mlflow").mkdir()
    file = tmp_path / ".mlflow/credentials"
    file.write_text("[mlflow]\nmlflow_tracking_username=me\nmlflow_tracking_password=mine\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with HTTPServer(("127.0.0.1", 0), Listening) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Listening.came.clear()
        for scheme in ("HTTP", "http"):
            uri, run_dir = f"{scheme}://127.0.0.1:{server.server_port}", tmp_path / scheme
            run_dir.mkdir()
            (run_dir / OUTBOX).touch()
            UploadCursor(run_dir).aim(uri, "e")
            assert sync.main([str(run_dir)]) == 2
            said = capsys.readouterr().err
            assert f"add --uri {uri}" in said
            assert said.count("\n") == 1
        assert not any(Listening.came), "its server has got the password"
