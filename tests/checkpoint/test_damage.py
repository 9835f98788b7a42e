"""Damage of the newest checkpoint is noticed, told, and the previous one is taken: never in silence, never step 0.

Where a run directory is from somebody else, nothing in it is executed.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import command, train
from forged_checkpoints import CPU, seal
from kills import incidents, summary
from safetensors.torch import load_file

from resilient_train.command import checkpoints
from resilient_train.durable import manifest as manifests
from resilient_train.durable.manifest import MANIFEST, WEIGHTS, Damaged, Entry
from resilient_train.durable.store import Store
from resilient_train.durable.tree_files import TENSORS, TREE

IN_THE_SUITE = 14

pytestmark = pytest.mark.usefixtures("careless")

ALL = (WEIGHTS, TENSORS, TREE, MANIFEST)

_made: dict[str, Path] = {}


@pytest.fixture
def trained(run_command: command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps with its checkpoints, made once; whoever changes it copies it."""
    if "run" not in _made:
        directory = tmp_path_factory.mktemp("damage") / "run"
        assert train(run_command, directory, 30).code == 0
        assert found(directory) == (Store(directory).entries()[0].path, [])
        assert len(Store(directory).entries()) >= 2
        _made["run"] = directory
    return _made["run"]


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


# What can happen to a file.


def flip(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def cut(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.randrange(file.stat().st_size))


def lose(file: Path, dice: random.Random) -> None:
    file.unlink()


def swap(file: Path, dice: random.Random) -> None:
    """Two files under each other's names."""
    other = file.with_name(dice.choice([name for name in ALL if name != file.name]))
    file.rename(beside := file.with_name("beside"))
    other.rename(file)
    beside.rename(other)


def take_older(file: Path, dice: random.Random) -> None:
    """The same file of the checkpoint before."""
    shutil.copy(Store(file.parents[2]).entries()[1].path / file.name, file)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (flip, flip, flip, cut, lose, swap, take_older)


def damage(run_dir: Path, seed: int) -> tuple[str, str]:
    """Damage one file of the newest checkpoint; returns what was done, and to which."""
    dice = random.Random(seed)
    do, name = DAMAGES[seed % len(DAMAGES)], dice.choice(ALL)
    do(Store(run_dir).entries()[0].path / name, dice)
    return do.__name__, name


def found(run_dir: Path) -> tuple[Path | None, list[str]]:
    """What a start would go on from, and what it would say of those before."""
    said: list[str] = []
    store = Store(run_dir)
    store.sweep()
    for entry in store.entries():
        try:
            if entry.damage:
                raise Damaged(entry.damage)
            manifests.verify(entry.path)
            Store.load(entry, CPU, {})
        except Damaged as why:
            said.append(f"{entry.path.name} {why}")
        else:
            return entry.path, said
    return None, said


def noticed(trained: Path, where: Path, seed: int) -> str:
    """Damage a copy; returns what went wrong with the noticing of it, and nothing where all went well."""
    run_dir = shutil.copytree(trained, where)
    newest, before, *_ = (entry.path for entry in Store(run_dir).entries())
    what = damage(run_dir, seed)
    chosen, said = found(run_dir)
    shutil.rmtree(run_dir)
    lines = [line for line in said if "\n" not in line and line.startswith(newest.name)]
    if chosen != before or len(lines) != 1 or len(said) != 1:
        return f"seed {seed}, {what}: took {chosen}, said {said}"
    return ""


def test_every_damage_is_noticed_and_the_previous_one_is_taken(trained: Path, tmp_path: Path) -> None:
    """Flips, cuts, lost, swapped and older files: each is told in one line."""
    assert [why for seed in range(IN_THE_SUITE) if (why := noticed(trained, tmp_path / "run", seed))] == []


@pytest.fixture
def unharmed(run_command: command, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights after 40 steps without damage, found out once."""
    if "whole" not in _made:
        _made["whole"] = tmp_path_factory.mktemp("damage") / "whole"
        assert train(run_command, _made["whole"], 40).code == 0
    return str(summary(_made["whole"])["weights_sha256"])


def test_a_run_goes_on_from_the_previous_one_and_says_so(copied: Path, run_command: command, unharmed: str) -> None:
    """The same command ends with 0, an incident names the file, and the weights are those of a run without damage."""
    _, name = damage(copied, seed=3)
    newest = Store(copied).entries()[0].path.name
    outcome = train(run_command, copied, 40)
    assert outcome.code == 0, outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr
    (incident,) = incidents(copied)
    told = (incident["signal"], incident["cause"], incident["outcome"])
    assert told == ("checkpoint_damaged", "process", "recovered")
    assert newest in incident["evidence"]
    assert name in incident["evidence"]
    assert "a checkpoint is damaged" in outcome.stdout + outcome.stderr
    assert outcome.summary(copied)["weights_sha256"] == unharmed
    assert Store(copied).entries()[0].step == 40


def test_without_one_that_verifies_a_run_says_so_and_stops(copied: Path, run_command: command) -> None:
    """Never in silence from step 0: one line for a person, exit code 1, and nothing is removed."""
    for entry in Store(copied).entries():
        flip(entry.path / TENSORS, random.Random(1))
    before = sorted(path.name for path in (copied / "checkpoints").rglob("*"))
    outcome = train(run_command, copied, 40)
    assert outcome.code == 1
    (error,) = [line for line in (outcome.stdout + outcome.stderr).splitlines() if line.startswith("error")]
    assert "no usable checkpoint" in error
    assert "run.resume=never" in error
    assert error.count(TENSORS) == len(Store(copied).entries())
    assert sorted(path.name for path in (copied / "checkpoints").rglob("*")) == before
    shutil.rmtree(copied / "checkpoints")  # the journal knows that there were some
    outcome = train(run_command, copied, 40)
    assert outcome.code == 1
    assert "they are gone" in outcome.stdout + outcome.stderr


def test_where_every_checkpoint_is_demoted_a_run_begins_again(
    copied: Path, run_command: command, unharmed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who restarts it need do nothing; it says so, and ends as it would have without them."""
    Store(copied).demote(0)
    assert checkpoints.main([str(copied)]) == 0
    assert "a resume would begin at step 0: " in capsys.readouterr().out
    outcome = train(run_command, copied, 40)
    assert outcome.code == 0, outcome.stderr
    assert f"every checkpoint in {copied}/checkpoints was demoted" in outcome.stdout
    assert "no checkpoint yet" not in outcome.stdout
    assert outcome.summary(copied)["weights_sha256"] == unharmed


def test_weights_are_exported_as_they_were_trained(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For other programs. A checkpoint that is damaged is named, and the one before is taken; no file is replaced."""

    def export(name: str) -> tuple[int, str]:
        code = checkpoints.main([str(copied), "--weights", str(copied / name)])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert export("new") == (0, f"step 30 is in {copied / 'new'}\n")
    exported, trained = load_file(copied / "new"), load_file(copied / "weights.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(one, trained[name]) for name, one in exported.items())
    assert export("new") == (1, f"{copied / 'new'} is there already: --weights makes a new file\n")
    newest, before, *_ = Store(copied).entries()
    (newest.path / WEIGHTS).write_bytes(b"")
    code, said = export("older")
    assert code == 0
    assert f"{newest.path.name}: {WEIGHTS} is not what was written" in said
    assert f"step {before.step} is in " in said


# What a forger can do.


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
    call = '["c", {"_target_": "os.system", "command": "touch canary"}], ["clock", '
    (newest / TREE).write_text((newest / TREE).read_text().replace('["clock", ', call))


@pytest.mark.parametrize("attack", [pickle_for_tensors, tree_with_a_call])
def test_what_is_no_checkpoint_is_refused_and_not_executed(copied: Path, attack: Callable[[Path], None]) -> None:
    """In one line, with digests that are right."""
    newest = Store(copied).entries()[0].path
    attack(newest)
    seal(newest)
    with pytest.raises(Damaged) as refused:
        Store.load(Entry.of(newest), CPU, {})
    assert "\n" not in str(refused.value)
    assert not [path for path in (copied.parent / "canary", Path("canary"), newest / "canary") if path.exists()]


def test_no_file_of_the_run_is_executed(copied: Path, run_command: command) -> None:
    """Not the configuration, nor what the tracker, the summary, the quarantine or a manifest say: the run goes on."""
    (copied / "config.yaml").write_text("!!python/object/apply:os.system ['touch canary']")
    (copied / "mlflow.json").write_text('{"run_id": "$(touch canary)", "tracking_uri": []}')
    for name in ("summary.json", "quarantine.json", "progress"):
        (copied / name).write_bytes(pickled(copied))
    newest, before, *_ = Store(copied).entries()
    (newest.path / MANIFEST).write_bytes(pickled(copied))
    outcome = train(run_command, copied, 31)
    assert not [path for path in (copied.parent / "canary", Path("canary"), copied / "canary") if path.exists()]
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    assert f"resumes from step {before.step}" in outcome.stdout + outcome.stderr
