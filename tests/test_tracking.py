"""What is noted reaches MLflow exactly, and MLflow never makes training wait."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf

from resilient_train.errors import ConfigError
from resilient_train.record import mlflow_sender
from resilient_train.record.delivery.store import shown
from resilient_train.record.tracking import NullTracker, TrackedRun, TrackingConfig, build, ui_command, url

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# MLflow 3.17 declares a mapping in a way that SQLAlchemy 2.1 is going to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

EXPERIMENT = "resilient_train"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing that a tracker starts or sets outlive its test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in mlflow_sender.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield
    for thread in threading.enumerate():
        if thread.name == "mlflow-sender":
            thread.join(60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for one database, since MLflow takes seconds to create each; with a name that needs care."""
    return tmp_path_factory.mktemp("a home") / "50% #1"


def config(uri: str | None = None, *, drain_s: float = 60.0, system_metrics: bool = False) -> TrackingConfig:
    return TrackingConfig("mlflow", uri, EXPERIMENT, system_metrics, drain_s)


def client_of(run: TrackedRun | None) -> MlflowClient:
    from mlflow import MlflowClient

    assert run
    return MlflowClient(run.tracking_uri)


def fetched(run: TrackedRun | None) -> Run:
    assert run
    return client_of(run).get_run(run.run_id)


def history(run: TrackedRun | None, key: str) -> list[tuple[int, int, float]]:
    assert run
    return [(one.step, one.timestamp, one.value) for one in client_of(run).get_metric_history(run.run_id, key)]


def test_every_row_arrives_once_with_its_tick_and_the_time_of_its_call(home: Path) -> None:
    """2,500 rows of two metrics, noted before and after the tracker may use the CPU."""
    tracker = build(config(), Path("rows"), home)
    rows = [(tick, 1_700_000_000_000 + 7 * tick, 1 / (tick + 1)) for tick in range(2500)]
    for tick, time_ms, loss in rows[:100]:
        tracker.metrics(tick, {"loss": loss, "norm": 2 * loss}, time_ms)
    tracker.begin()
    for tick, time_ms, loss in rows[100:]:
        tracker.metrics(tick, {"loss": loss, "norm": 2 * loss}, time_ms)
    run = tracker.finish("completed")
    assert history(run, "loss") == rows
    assert history(run, "norm") == [(tick, time_ms, 2 * loss) for tick, time_ms, loss in rows]


def test_a_row_without_a_time_has_that_of_the_call(home: Path) -> None:
    """The row is stamped when it is noted, not when it is sent."""
    tracker = build(config(), Path("now"), home)
    values = {"loss": 1.0}
    before = time.time_ns() // 1_000_000
    tracker.metrics(7, values)
    after = time.time_ns() // 1_000_000
    values["loss"] = 2.0  # the caller may use its dict again
    time.sleep(0.01)
    [(tick, time_ms, loss)] = history(tracker.finish("completed"), "loss")
    assert (tick, loss) == (7, 1.0)
    assert before <= time_ms <= after


def test_values_that_are_not_finite_arrive_and_harm_nobody(home: Path) -> None:
    """A database has no infinity: MLflow stores the largest number instead."""
    tracker = build(config(), Path("nan"), home)
    tracker.metrics(1, {"loss": math.nan, "norm": math.inf, "odd": "no number"})  # type: ignore[dict-item]
    tracker.metrics(2, {"loss": 1.0, "norm": 1.0})
    run = tracker.finish("completed")
    assert math.isnan(history(run, "loss")[0][2])
    assert math.isnan(history(run, "odd")[0][2])
    assert history(run, "norm")[0][2] == sys.float_info.max
    assert history(run, "loss")[1][2] == 1.0


def test_params_tags_and_files_arrive(home: Path, tmp_path: Path) -> None:
    """More of them than one batch holds, longer than a value may be, and a directory too."""
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "two.txt").write_text("two")
    tracker = build(config(), Path("all"), home)
    tracker.params({f"layer.{index}": index for index in range(250)} | {"long": "x" * 7000, "none": None, "empty": ""})
    tracker.tags({f"tag.{index}": index for index in range(250)} | {"verdict": "first"})
    tracker.begin()
    tracker.tags({"verdict": "second", "mlflow.note.content": "# Report"})
    tracker.artifact(tmp_path / "one.txt")
    tracker.artifact(tmp_path / "more")
    run = tracker.finish("completed")
    data = fetched(run).data
    assert {f"layer.{index}": str(index) for index in range(250)}.items() <= data.params.items()
    assert (data.params["none"], data.params["empty"]) == ("None", "")
    assert data.params["long"] == "x" * 5997 + "..."
    assert {f"tag.{index}": str(index) for index in range(250)}.items() <= data.tags.items()
    assert (data.tags["verdict"], data.tags["mlflow.note.content"]) == ("second", "# Report")
    assert data.tags["mlflow.source.name"] == "resilient_train"
    assert [file.name for file in sorted((home / "mlartifacts").rglob("*.txt"))] == ["two.txt", "one.txt"]
    assert run
    assert [one.path for one in client_of(run).list_artifacts(run.run_id)] == ["more", "one.txt"]


def test_a_name_that_mlflow_refuses_is_bent_until_it_fits(home: Path) -> None:
    """One refused name would take a thousand other values with it."""
    bent = {
        "train/loss": "train/loss",
        "acc@1": "acc_1",
        "/a//b/": "a/b",
        "../up": "up",
        "..c": "c",
        "": "_",
        "x" * 300: "x" * 250,
        "größe": "größe",
    }
    tracker = build(config(), Path("names"), home)
    tracker.metrics(1, {name: float(index) for index, name in enumerate(bent)})
    tracker.params({"a\nb": 1})
    run = tracker.finish("completed")
    assert fetched(run).data.metrics == {stored: float(index) for index, stored in enumerate(bent.values())}
    assert fetched(run).data.params == {"a_b": "1"}


@pytest.mark.parametrize(
    ("status", "stored"),
    [("completed", "FINISHED"), ("failed", "FAILED"), ("gave_up", "FAILED"), ("preempted", "KILLED")],
)
def test_the_run_ends_as_training_did(home: Path, status: str, stored: str) -> None:
    """Four runs after each other in one process, each of its own."""
    tracker = build(config(), Path(f"ends-{status}"), home)
    tracker.begin()
    assert tracker.finish(status) == tracker.finish(status) == tracker.run
    info = fetched(tracker.run).info
    assert (info.status, info.run_name) == (stored, f"ends-{status}")
    assert info.end_time
    assert info.end_time >= info.start_time


def test_what_mlflow_refuses_is_dropped_and_said_and_the_rest_arrives(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter that changes its value and a file that is gone would be refused for ever."""
    tracker = build(config(), Path("refused"), home)
    tracker.begin()
    tracker.params({"lr": 1})
    while tracker.run is None or "lr" not in fetched(tracker.run).data.params:
        time.sleep(0.05)
    tracker.params({"lr": 2})
    tracker.artifact(tmp_path / "gone.txt")
    tracker.metrics(1, {"loss": 0.5})
    run = tracker.finish("completed")
    assert history(run, "loss")[0][2] == 0.5
    assert fetched(run).data.params == {"lr": "1"}
    assert len(caplog.messages) == 2
    assert "values refused: 2" in caplog.messages[-1]


def test_system_metrics_are_shown_when_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own monitor samples, and stops with the run."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
    tracker = build(config(system_metrics=True), Path("machine"), home)
    tracker.begin()
    while tracker.run is None or "system/cpu_utilization_percentage" not in fetched(tracker.run).data.metrics:
        time.sleep(0.1)
    assert fetched(tracker.finish("completed")).info.status == "FINISHED"


SCRIPT = """
import sys
from pathlib import Path
from resilient_train.record.tracking import TrackingConfig, build

tracker = build(TrackingConfig("mlflow", None, "resilient_train", False, 60.0), Path("script"), Path(sys.argv[1]))
for tick in range(1000):
    tracker.metrics(tick, {"loss": 1.0})
tracker.params({"lr": 1})
tracker.artifact(Path(__file__))
assert not {"mlflow", "sqlalchemy"} & set(sys.modules)
assert tracker.run is None
tracker.begin()
run = tracker.finish("completed")
print(run.run_id)
"""


def test_processes_that_start_together_share_a_new_database(tmp_path: Path) -> None:
    """Each loads MLflow only after `begin`, prints nothing of MLflow's, and leaves its directory alone."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    home = tmp_path / "new" / "home"
    processes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, str(script), str(home)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        processes.append(
            subprocess.Popen(
                command, cwd=tmp_path / name, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    ends = [process.communicate(timeout=120) for process in processes]
    for process, name, (out, err) in zip(processes, ("one", "two"), ends, strict=True):
        assert (process.returncode, err) == (0, "")
        run = TrackedRun(out.strip(), f"sqlite:///{home}/mlflow.db", None)
        assert len(history(run, "loss")) == 1000
        assert list((tmp_path / name).iterdir()) == []
    assert sorted(path.name for path in home.iterdir()) == ["mlartifacts", "mlflow.db"]


KILLED = """
import os, sys
from pathlib import Path
from resilient_train.record.tracking import TrackingConfig, build

def half_made(home):
    return any(path.stat().st_size > 100_000 for path in home.rglob("*.db"))

home = Path(sys.argv[1])
build(TrackingConfig("mlflow", None, "resilient_train", False, 60.0), Path("killed"), home).begin()
while not half_made(home):
    pass
os._exit(9)
"""


def test_a_kill_while_the_database_is_created_does_not_ruin_it(tmp_path: Path) -> None:
    """MLflow itself cannot open a database again that was left in the middle of its migrations."""
    script, home = tmp_path / "killed.py", tmp_path / "home"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, str(script), str(home)], env=environment, check=False).returncode == 9
    assert not (home / "mlflow.db").exists()
    tracker = build(config(), Path("after"), home)
    tracker.metrics(1, {"loss": 0.5})
    assert history(tracker.finish("completed"), "loss")[0][2] == 0.5


FORK = """
import os, sys, time
from pathlib import Path
from resilient_train.record.tracking import TrackingConfig, build

tracker = build(TrackingConfig("mlflow", None, "resilient_train", False, 60.0), Path("fork"), Path(sys.argv[1]))
tracker.begin()
while "pandas" not in sys.modules:  # in the middle of MLflow's import
    time.sleep(0.001)
if child := os.fork():
    print(child, flush=True)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import pandas
os._exit(0 if hasattr(pandas, "DataFrame") else 1)
"""


def test_a_process_forked_while_mlflow_loads_can_import_the_same_modules(tmp_path: Path) -> None:
    """A data worker would otherwise wait for ever for a thread that it does not have."""
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        assert process.wait(timeout=60) == 0
    except subprocess.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def late_server(free_port: int, tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server that has only just been asked to start."""
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(free_port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "a"),
    ]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        yield f"http://127.0.0.1:{free_port}"
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def test_a_server_that_comes_late_gets_everything(
    late_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What was noted while nobody listened is kept and sent; one warning, no prints, no chatter of libraries."""
    monkeypatch.setattr(mlflow_sender, "RETRY_AT_MOST_S", 1.0)
    (tmp_path / "one.txt").write_text("one")
    tracker = build(config(late_server), Path("late"), tmp_path)
    tracker.begin()
    for tick in range(1200):
        tracker.metrics(tick, {"loss": math.nan if tick == 3 else float(tick), "norm": math.inf}, 1000 + tick)
    tracker.params({"lr": 1})
    tracker.artifact(tmp_path / "one.txt")
    while tracker.run is None:
        time.sleep(0.05)
    run = tracker.finish("completed")
    assert run
    assert [row[:2] for row in history(run, "loss")] == [(tick, 1000 + tick) for tick in range(1200)]
    assert fetched(run).data.params == {"lr": "1"}
    assert [one.path for one in client_of(run).list_artifacts(run.run_id)] == ["one.txt"]
    assert fetched(run).info.status == "FINISHED"
    assert run.url
    assert run.url.startswith(f"{late_server}/#/experiments/")
    assert len(caplog.messages) == 1
    assert "Training is not affected" in caplog.messages[0]
    assert capfd.readouterr() == ("", "")


def test_a_dead_server_delays_nothing_and_is_said_once(
    free_port: int, home: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Notes are taken as fast as ever; the end says in one line what MLflow does not have."""
    tracker = build(config(f"http://user:secret@127.0.0.1:{free_port}"), Path("dead"), home)
    tracker.begin()
    started = time.monotonic()
    for tick in range(1000):
        tracker.metrics(tick, {"loss": 1.0})
    assert tracker.finish("failed") is None
    assert time.monotonic() - started < 30  # far below the 60 s that the end may take: nothing answers, so why wait
    first, last = caplog.messages
    assert "Training is not affected" in first
    assert "records waiting: 1,000, end status not set (ConnectionRefusedError" in last
    assert "\n" not in first + last
    assert "secret" not in first + last
    assert capfd.readouterr() == ("", "")


def test_a_server_that_never_answers_holds_the_end_up_no_longer_than_allowed(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is taken and then nothing comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tracker = build(config(f"http://127.0.0.1:{listener.getsockname()[1]}", drain_s=0.5), Path("mute"), home)
        tracker.metrics(1, {"loss": 1.0})
        started = time.monotonic()
        assert tracker.finish("completed") is None
        assert time.monotonic() - started < 10
    assert "records waiting: 1," in caplog.messages[-1]


def test_a_full_queue_drops_the_newest_and_counts_them(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is bounded, however long nobody takes the records."""
    monkeypatch.setattr(mlflow_sender, "QUEUE_LIMIT", 10)
    tracker = build(config(), Path("full"), home)
    for tick in range(25):
        tracker.metrics(tick, {"loss": 1.0})
    run = tracker.finish("completed")
    assert [tick for tick, _, _ in history(run, "loss")] == list(range(10))
    assert "records dropped by a full queue: 15" in caplog.messages[-1]


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "/data/mlruns", "file:mlruns", "file:///data/mlruns"])
def test_a_plain_directory_is_refused_before_training(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow refuses it as well, but only once it is loaded."""
    with pytest.raises(ConfigError, match=r"^tracking\.uri="):
        build(config(uri), Path("file"), tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI="):
        build(config(), Path("file"), tmp_path)


def test_a_database_is_found_again_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative address is meant from where the run was started; its files lie beside it."""
    (tmp_path / "start").mkdir()
    (tmp_path / "later").mkdir()
    (tmp_path / "one.txt").write_text("one")
    monkeypatch.chdir(tmp_path / "start")
    tracker = build(config("sqlite:///mine.db"), Path("relative"), tmp_path / "home")
    tracker.artifact(Path("../one.txt"))
    monkeypatch.chdir(tmp_path / "later")
    run = tracker.finish("completed")
    assert run
    assert run.tracking_uri == f"sqlite:///{tmp_path}/start/mine.db"
    assert sorted(path.name for path in (tmp_path / "start").iterdir()) == ["mine.db", "mlartifacts"]
    assert [one.path for one in client_of(run).list_artifacts(run.run_id)] == ["one.txt"]
    assert list((tmp_path / "later").iterdir()) == []


def test_the_environment_names_the_store_when_the_configuration_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """As it does for MLflow itself."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port}")
    tracker = build(config(drain_s=0), Path("environment"), tmp_path)
    assert tracker.finish("completed") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        ("sqlite:////home/me/mlflow.db", "mlflow ui --backend-store-uri sqlite:////home/me/mlflow.db"),
        ("sqlite:////my runs/mlflow.db", "mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'"),
        ("http://tracking:5000", ""),
        ("databricks", ""),
    ],
)
def test_the_command_that_opens_a_database_can_be_pasted(
    uri: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server needs none; where the environment is not activated, the program is named with its path."""
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    assert ui_command(uri) == command
    monkeypatch.setenv("PATH", "/usr/bin")
    assert ui_command(uri) == (f"{programs}/{command}" if command else "")


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("sqlite:////home/me/mlflow.db", "http://127.0.0.1:5000"),
        ("postgresql://me:secret@db/mlflow", "http://127.0.0.1:5000"),
        ("https://me:secret@tracking.example/mlflow/", "https://me:***@tracking.example/mlflow"),
    ],
)
def test_the_link_opens_the_charts_and_gives_no_password_away(uri: str, root: str) -> None:
    """A database has its page where `mlflow ui` listens."""
    assert url(uri, "1", "abc") == f"{root}/#/experiments/1/runs/abc/model-metrics?workflowType=machine_learning"
    assert "secret" not in shown(uri)


@pytest.mark.parametrize("name", ["mlflow", "none"])
def test_the_configuration_files_hold_every_field(name: str, tmp_path: Path) -> None:
    """Their values are the defaults; the dataclass has none."""
    directory = Path(mlflow_sender.__file__).parents[1] / "conf" / "tracking"
    values = OmegaConf.to_container(OmegaConf.load(directory / f"{name}.yaml"))
    assert isinstance(values, dict)
    assert list(values) == [field.name for field in fields(TrackingConfig)]
    assert values["kind"] == name
    build(TrackingConfig(**{str(key): value for key, value in values.items()}), Path("defaults"), tmp_path)


def test_no_tracking_takes_every_call_and_has_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """Callers need no `if`."""
    tracker = build(TrackingConfig("none", None, EXPERIMENT, False, 0), Path("nothing"), Path())
    assert isinstance(tracker, NullTracker)
    with caplog.at_level(logging.DEBUG):
        tracker.begin()
        tracker.metrics(1, {"loss": 1.0})
        tracker.params({})
        tracker.tags({})
        tracker.artifact(Path("missing"))
        assert tracker.finish("completed") is tracker.run is None
    assert caplog.messages == []
