"""What is noted reaches MLflow exactly, by way of a file and of a process that is not the one that trains."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flaky_mlflow import free_port

from resilient_train.durable.journal import BEGAN, METRICS, OUTBOX, Outbox, entries
from resilient_train.ground.errors import ConfigError
from resilient_train.report.connection import UploadCursor, locate, url
from resilient_train.report.story import command
from resilient_train.report.tracker import TrackingConfig, build
from resilient_train.report.uploader import Uploader

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

pytestmark = pytest.mark.timeout(900)

EXPERIMENT = "resilient_train"
LONG_S = 300.0  # what a run's end may wait for, where a test is about something else


@pytest.fixture(autouse=True)
def alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what the machine says of a store, and what a slow one is told of its waiting."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    caplog.set_level(logging.WARNING, "resilient_train")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A place with a database; its name needs care."""
    home = tmp_path_factory.mktemp("a home") / "50% #1"
    home.mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    return home


def config(uri: str | None = None) -> TrackingConfig:
    return TrackingConfig("mlflow", uri, EXPERIMENT, LONG_S)


def client_of(run: dict[str, Any] | None) -> MlflowClient:
    from mlflow import MlflowClient

    assert run
    return MlflowClient(run["tracking_uri"])


def fetched(run: dict[str, Any] | None) -> Run:
    assert run
    return client_of(run).get_run(run["run_id"])


def history(run: dict[str, Any] | None, key: str) -> list[tuple[int, int, float]]:
    assert run
    return [(one.step, one.timestamp, one.value) for one in client_of(run).get_metric_history(run["run_id"], key)]


def outbox(run_dir: Path, params: dict[str, Any] | None = None) -> Outbox:
    run_dir.mkdir(parents=True)
    box = Outbox(run_dir / OUTBOX)
    box.put(BEGAN, key=str(run_dir), params=params or {})
    return box


def uploaded(run_dir: Path, home: Path) -> dict[str, Any]:
    """Upload it as the process of a run would, but here, where MLflow is loaded already."""
    with contextlib.closing(Uploader(run_dir, locate(None, home), EXPERIMENT, pytest.fail)) as uploader:
        uploader.upload(is_last=True)
    run = UploadCursor(run_dir).run
    assert run is not None
    return run


BENT = {
    "train/loss": "train/loss",
    "acc@1": "train/acc_1",
    "/a//b/": "a/b",
    "../up": "up",
    "..c": "train/..c",
    "": "train",
    "x" * 300: "train/" + "x" * 244,
    "größe": "train/größe",
}


def test_what_mlflow_does_not_take_as_it_is_arrives_all_the_same(home: Path, tmp_path: Path) -> None:
    """Refused names are bent, as one would take a thousand other values with it; long values are cut, many are dealt.

    A database has no infinity: MLflow stores the largest number instead.
    """
    run_dir = tmp_path / "all"
    given = {f"layer.{index}": index for index in range(250)} | {"long": "x" * 7000, "a\nb": 1, "empty": ""}
    box = outbox(run_dir, given)
    (run_dir / "train.log").write_text("two")
    box.put(METRICS, tick=1, values={name: float(index) for index, name in enumerate(BENT)})
    box.put(METRICS, tick=2, values={"nan": math.nan, "inf": math.inf, "odd": "no number", "none": None})
    run = uploaded(run_dir, home)
    values = fetched(run).data.metrics
    assert all(math.isnan(values.pop(f"train/{name}")) for name in ("nan", "odd", "none"))
    assert values.pop("train/inf") == sys.float_info.max
    assert values == {stored: float(index) for index, stored in enumerate(BENT.values())}
    params = fetched(run).data.params
    layers = {f"layer.{index}": str(index) for index in range(250)}
    assert params == layers | {"long": "x" * 5997 + "...", "a_b": "1", "empty": ""}
    assert [one.path for one in client_of(run).list_artifacts(run["run_id"])] == ["train.log"]
    assert len([*(home / "mlartifacts").rglob("train.log")]) == 1


def test_a_new_database_is_shared_and_no_kill_ruins_it(tmp_path: Path) -> None:
    """MLflow itself cannot open a database again that was left in the middle of its migrations.

    Of processes that start together one creates it, and all upload; nothing else is left next to it.
    """
    home = tmp_path / "home"
    commands = []
    for name in ("one", "two"):
        outbox(tmp_path / name / "run").put(METRICS, tick=1, values={"loss": 0.5})
        command = [sys.executable, "-m", "resilient_train", "sync", str(tmp_path / name / "run")]
        commands.append([*command, "--uri", f"sqlite:///{home}/mlflow.db"])
    with subprocess.Popen(commands[0]) as syncing:
        while not any(path.stat().st_size > 100_000 for path in home.rglob("*.db")):
            assert syncing.poll() is None
        syncing.kill()
    assert not (home / "mlflow.db").exists()
    shutil.rmtree(home)
    together = [subprocess.Popen(one) for one in commands]
    assert [one.wait(400) for one in together] == [0, 0]
    for name in ("one", "two"):
        run = UploadCursor(tmp_path / name / "run").run
        assert [row[2] for row in history(run, "train/loss")] == [0.5]
    assert [path.name for path in home.iterdir()] == ["mlflow.db"]


def test_a_dead_server_is_said_once_with_how_to_upload_the_rest(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And without the password that its address holds; the caller may use its dict again."""
    tracker = build(config(f"http://user:secret@127.0.0.1:{free_port()}"), tmp_path, home)
    values = {"loss": 0.0}
    for tick in range(1000):
        values["loss"] = float(tick)
        tracker.write({"kind": "metrics", "tick": tick, "values": values})
    assert tracker.finish() is None
    rows = [one for one, _ in entries(tmp_path / OUTBOX) if one is not None and one["kind"] == METRICS]
    assert all(one["values"]["loss"] == one["tick"] for one in rows)
    (last,) = caplog.messages
    assert " did not get everything (" in last
    assert "ConnectionRefusedError" in last
    assert last.endswith(command("sync", tmp_path))
    assert "secret" not in "".join(caplog.messages) + (tmp_path / OUTBOX).read_text()
    assert capfd.readouterr() == ("", "")


def test_a_store_is_named_by_the_configuration_or_else_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for MLflow itself, which refuses a plain directory as well, but only once it is loaded. A relative
    address is meant from where the run was started."""
    monkeypatch.chdir(tmp_path)
    assert locate("sqlite:///mine.db", tmp_path / "home") == f"sqlite:///{tmp_path}/mine.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert locate(None, tmp_path) == "http://127.0.0.1:1"
    assert locate("http://127.0.0.1:2", tmp_path) == "http://127.0.0.1:2"
    for uri in ("mlruns", "file:///data/mlruns"):
        with pytest.raises(ConfigError, match=r"^tracking\.uri="):
            build(config(uri), tmp_path, tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI="):
            build(config(), tmp_path, tmp_path)


def test_the_link_opens_the_overview() -> None:
    """A database has its page where `mlflow ui` listens; a link with *** for a password would open nothing."""
    for uri, root in {
        "sqlite:////home/me/mlflow.db": "http://127.0.0.1:5000",
        "postgresql://me:secret@db/mlflow": "http://127.0.0.1:5000",
        "https://me:secret@tracking.example/mlflow/": "https://tracking.example/mlflow",
    }.items():
        assert url(uri, "1", "abc") == f"{root}/#/experiments/1/runs/abc?workflowType=machine_learning"
