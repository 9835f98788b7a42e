"""A run directory from somebody else: nothing in it is executed, and nothing outside of it is written."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Outcome, command, train
from forged_checkpoints import CPU, seal
from safetensors.torch import load_file

from resilient_train.durable.resume import explain_mismatch
from resilient_train.durable.store import MANIFEST, WEIGHTS, Damaged, Entry, Store
from resilient_train.durable.tree_files import TENSORS, TREE, SerializedTree, load_tree
from resilient_train.zoo.models import MLP

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


Attack = Callable[[Path, Path], Any]  # on the run directory, and its newest checkpoint


def pickle_for(name: str) -> Attack:
    """A pickle with a digest that is right, except in place of the manifest itself."""

    def attack(run_dir: Path, newest: Path) -> None:
        (newest / name).write_bytes(pickled(run_dir))
        if name != MANIFEST:
            seal(newest)

    return attack


def tree_with_a_call(run_dir: Path, newest: Path) -> None:
    call = '"clock": {"_target_": "os.system", "command": "touch canary"}, "c": '
    (newest / TREE).write_text((newest / TREE).read_text().replace('"clock": ', call))
    seal(newest)


def tree(change: Callable[[dict[str, Any]], Any]) -> Attack:
    """Change the parts of the state of the run, with digests that are right."""

    def attack(run_dir: Path, newest: Path) -> None:
        content = load_tree(newest)
        change(content["parts"])
        (made := run_dir.parent / "made").mkdir()  # what was read may still lie in the files
        SerializedTree(content).write(made)
        for file in made.iterdir():
            file.replace(newest / file.name)
        seal(newest)

    return attack


OF_ANOTHER_RUN: dict[str, Attack] = {
    "a weight of another shape": tree(
        lambda parts: parts["weights"].update({next(iter(MLP().state_dict())): torch.zeros(3)})
    ),
    "a part too many": tree(lambda parts: parts.update({"kept.other": 1})),
    "a group too many": tree(lambda parts: parts["optimizer.0"]["groups"].append({})),
    "another optimizer": tree(lambda parts: parts.update({"optimizer.0": {"x": 1}})),
}

# With digests that are right, or in place of the manifest: nothing of the newest checkpoint is loaded.
REFUSED: dict[str, Attack] = {
    **{f"a pickle for {name}": pickle_for(name) for name in (TENSORS, MANIFEST)},
    "a tree with a call": tree_with_a_call,
}


@pytest.mark.parametrize("what", OF_ANOTHER_RUN)
def test_the_state_of_another_run_does_not_fit(run_dir: Path, what: str) -> None:
    """It is refused in one line before anything of it is taken."""
    entry, known = Store(run_dir).entries()[0], load_file(run_dir / WEIGHTS)
    live = pickle.loads(pickle.dumps(Store.load(entry, CPU, known).parts))  # our own: it lets go of the files
    OF_ANOTHER_RUN[what](run_dir, entry.path)
    why = explain_mismatch(live, Store.load(Entry.of(entry.path), CPU, known).parts)
    assert why
    assert len(why.splitlines()) == 1


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_checkpoint_is_refused_and_not_executed(run_dir: Path, what: str) -> None:
    """In one line."""
    newest = Store(run_dir).entries()[0].path
    REFUSED[what](run_dir, newest)
    with pytest.raises(Damaged) as refused:
        Store.load(Entry.of(newest), CPU, {})
    assert "\n" not in str(refused.value)
    assert not [path for path in (run_dir.parent / "canary", Path("canary"), newest / "canary") if path.exists()]


def attacked(run_dir: Path, run_command: command, attack: Attack) -> Outcome:
    """Resume a run after an attack: nothing was executed, and no traceback is shown."""
    (run_dir / "summary.json").unlink()
    attack(run_dir, Store(run_dir).entries()[0].path)
    outcome = train(run_command, run_dir, 21)
    assert not [path for path in (run_dir.parent / "canary", Path("canary"), run_dir / "canary") if path.exists()]
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    return outcome


def test_no_file_of_the_run_is_executed(run_dir: Path, run_command: command) -> None:
    """Not the configuration, nor what the tracker, the summary or the quarantine say: the run goes on."""

    def attack(run_dir: Path, newest: Path) -> None:
        (run_dir / "config.yaml").write_text("!!python/object/apply:os.system ['touch canary']")
        (run_dir / "mlflow.json").write_text('{"run_id": "$(touch canary)", "tracking_uri": []}')
        for name in ("summary.json", "quarantine.json", "progress"):
            (run_dir / name).write_bytes(pickled(run_dir))

    outcome = attacked(run_dir, run_command, attack)
    assert "resumes from step 20" in outcome.stdout + outcome.stderr
