"""A run directory from somebody else: nothing in it is executed, and nothing outside of it is written."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import command, train
from forged_checkpoints import CPU, seal

from resilient_train.durable.manifest import MANIFEST, Damaged, Entry
from resilient_train.durable.store import Store
from resilient_train.durable.tree_files import TENSORS, TREE

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("careless")]

_made: list[Path] = []


@pytest.fixture
def run_dir(run_command: command, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A copy of a run of 20 steps with two good checkpoints or more."""
    if not _made:
        directory = tmp_path_factory.mktemp("user_programs") / "run"
        assert train(run_command, directory, 20).code == 0
        assert len(Store(directory).entries()) >= 2
        _made.append(directory)
    return shutil.copytree(_made[0], tmp_path / "run")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def pickled(run_dir: Path) -> bytes:
    return pickle.dumps(Trap(run_dir.parent / "canary"))


def pickle_for_tensors(newest: Path) -> None:
    (newest / TENSORS).write_bytes(pickled(newest.parents[1]))


def tree_with_a_call(newest: Path) -> None:
    call = '"clock": {"_target_": "os.system", "command": "touch canary"}, "c": '
    (newest / TREE).write_text((newest / TREE).read_text().replace('"clock": ', call))


@pytest.mark.parametrize("attack", [pickle_for_tensors, tree_with_a_call])
def test_what_is_no_checkpoint_is_refused_and_not_executed(run_dir: Path, attack: Callable[[Path], None]) -> None:
    """In one line, with digests that are right."""
    newest = Store(run_dir).entries()[0].path
    attack(newest)
    seal(newest)
    with pytest.raises(Damaged) as refused:
        Store.load(Entry.of(newest), CPU, {})
    assert "\n" not in str(refused.value)
    assert not [path for path in (run_dir.parent / "canary", Path("canary"), newest / "canary") if path.exists()]


def test_no_file_of_the_run_is_executed(run_dir: Path, run_command: command) -> None:
    """Not the configuration, nor what the tracker, the summary, the quarantine or a manifest say: the run goes on."""
    (run_dir / "config.yaml").write_text("!!python/object/apply:os.system ['touch canary']")
    (run_dir / "mlflow.json").write_text('{"run_id": "$(touch canary)", "tracking_uri": []}')
    for name in ("summary.json", "quarantine.json", "progress"):
        (run_dir / name).write_bytes(pickled(run_dir))
    newest, before, *_ = Store(run_dir).entries()
    (newest.path / MANIFEST).write_bytes(pickled(run_dir))
    outcome = train(run_command, run_dir, 21)
    assert not [path for path in (run_dir.parent / "canary", Path("canary"), run_dir / "canary") if path.exists()]
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert f"resumes from step {before.step}" in outcome.stdout + outcome.stderr
