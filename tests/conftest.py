"""What more than one test file needs. Real things only: a wheel that was built, a folder it was installed to."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Two test processes share two cores: more threads would wait for each other. Before torch reads it, and for children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import compiled  # noqa: F401  # before torch is imported
import frozen
import pytest
import slow
import torch
from accelerate.state import AcceleratorState, GradientState
from command import Outcome, command
from filelock import FileLock
from flaky_mlflow import started_server
from hydra.core.global_hydra import GlobalHydra
from hypothesis import settings
from kills import Nursery
from power import Careless

if "PYTEST_XDIST_WORKER" in os.environ:  # a process that runs a part of the whole suite comes to need all of these
    frozen.freeze("mlflow", "transformers.trainer", "lightning.pytorch", "trl")

from resilient_train.ground import files

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SERVER = "server.json"  # in the folder that all processes share: its process and its address
settings.register_profile("suite", settings(), deadline=None, derandomize=True)  # the same on any machine, busy or not
settings.load_profile("suite")
sys.path += [str(folder) for folder in HERE.iterdir() if folder.is_dir()]  # for processes that import a test file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `scripts/test --all` runs, and start with the files that take longest."""
    names = dict.fromkeys(slow.listed())
    order = {path: place for place, path in enumerate(dict.fromkeys(map(slow.file_of, names)))}
    for item in items:
        if slow.is_slow(item.nodeid, names) or "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: order.get(slow.file_of(item.nodeid), len(order)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the server, if there is one: when all processes of the session are done, or are interrupted."""
    known: Path = session.config._tmp_path_factory.getbasetemp() / SERVER  # type: ignore[attr-defined]
    if "PYTEST_XDIST_WORKER" not in os.environ and known.exists():
        os.killpg(json.loads(known.read_text())[0], signal.SIGKILL)


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session have in common; what is made in it needs a file lock."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(place: Path, make: Callable[[Path], object]) -> Path:
    """Let one of all processes make it; it is there when it is whole."""
    with FileLock(place.with_suffix(".lock")):
        if not place.exists():
            make(unfinished := place.with_suffix(".tmp"))
            unfinished.rename(place)
    return place


@pytest.fixture(scope="session")
def wheel(shared_tmp: Path) -> Path:
    """The wheel of this checkout, built without a network."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(ROOT), "--outdir"]
    folder = made_once(shared_tmp / "wheel", lambda to: subprocess.run([*build, str(to)], cwd=shared_tmp, check=True))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed_wheel(shared_tmp: Path, wheel: Path) -> Path:
    """A folder with the wheel's files as pip lays them out: as PYTHONPATH it comes before an editable install."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), "--target"]
    return made_once(shared_tmp / "installed", lambda to: subprocess.run([*install, str(to)], check=True))


@pytest.fixture(scope="session")
def empty_store(shared_tmp: Path) -> Path:
    """A file of SQLite with MLflow's tables, empty: to make one takes MLflow seconds, a copy takes none."""

    def make(to: Path) -> None:
        from mlflow import MlflowClient

        MlflowClient(f"sqlite:///{to}").search_experiments()

    return made_once(shared_tmp / "empty.db", make)


@pytest.fixture(scope="session")
def server(shared_tmp: Path, empty_store: Path) -> str:
    """The address of a real MLflow server, which runs to the end of the session: each test has an experiment there."""

    def start(to: Path) -> None:
        store = shutil.copy(empty_store, shared_tmp / "server.db")
        to.write_text(json.dumps(started_server(shared_tmp, f"sqlite:///{store}")))

    return str(json.loads(made_once(shared_tmp / SERVER, start).read_text())[1])


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> command:
    """Run `resilient_train ARGUMENTS` in this process: a tenth of the time of a new one, the same code."""
    from resilient_train.command import command as door

    def run(arguments: Sequence[str]) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["resilient_train", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("HYDRA_FULL_ERROR", "")
        GlobalHydra.instance().clear()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            door.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert "pytest-timeout" not in said.err, "what ended it was the patience of the test, not the run"
        return Outcome(ended.value.code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts runs of a module's tests in processes of their own, which can be killed."""
    with Nursery(tmp_path_factory.mktemp("nursery")) as nursery:
        yield nursery


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder as working directory, for runs inside of the test's process."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state for the process: not for the next test."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What this library says, but for details."""
    caplog.set_level(logging.INFO, "resilient_train")
    return caplog


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here: nothing waits for the disk."""
    monkeypatch.setattr(files, "disk", Careless())


@pytest.fixture(autouse=True)
def checked_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries turn the checks of torch.distributions off when they are imported."""
    if (torch := sys.modules.get("torch")) is not None and "torch.distributions" in sys.modules:
        monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.fixture(autouse=True)
def no_modules_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests write modules of the same name: each imports its own."""
    before, home = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(home):
            del sys.modules[name]
