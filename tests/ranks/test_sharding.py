"""Weights that are spread over processes: state, checkpoints, and another number of processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from group import Done, launch
from kills import in_journal, summary
from safetensors.torch import load_file
from torch import nn

from resilient_train.command import checkpoints
from resilient_train.data.samples import Slicing
from resilient_train.ground.errors import ConfigError
from resilient_train.processes.world import blocks
from resilient_train.zoo.models import MLP

DIGITS = ["model=mlp", "data=digits", "objective=classification", "accelerate.cpu=true", "tracking=none"]
OFTEN = ["checkpoint.disk.every=10", "checkpoint.memory.every=5", "checkpoint.verify_after=3", "run.steps=60"]


# Samples of an update.


@pytest.mark.parametrize(
    ("batch_size", "world", "samples", "wanted"),
    [
        (32, 1, 64, (32, 2)),
        (32, 2, 32, (16, 1)),
        (16, 4, 128, (16, 2)),
        (16, 2, 128, (16, 4)),
        (32, 3, 96, (32, 1)),
        (10, 1, 64, (8, 8)),
        (32, 3, 64, None),
        (1, 4, 2, None),
    ],
)
def test_another_number_of_processes_makes_the_same_updates(
    batch_size: int, world: int, samples: int, wanted: tuple[int, int] | None
) -> None:
    """Micro-batches are no larger than they were, so they fit into memory; what does not come out even is refused."""
    sliced = Slicing(batch_size, 1, 0, world).for_samples(samples)
    assert wanted == (None if sliced is None else (sliced.batch_size, sliced.accumulation))
    assert sliced is None or sliced.samples == samples


# Blocks.


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.inner = inner


class Repeats(nn.Module):
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Linear(4, 4), nn.ModuleList(layers)


@pytest.mark.parametrize(
    ("model", "names", "count"),
    [
        (Repeats(Block(), Block(), Block()), None, 3),
        (Repeats(nn.Linear(4, 4), nn.Linear(4, 4)), ["Linear"], 3),
        (Repeats(Block(Block()), Block(Block())), None, 2),
        (nn.Sequential(Block(), nn.Linear(4, 4), Block()), None, 0),
    ],
)
def test_blocks_are_what_the_model_or_the_user_names(model: nn.Module, names: list[str] | None, count: int) -> None:
    """None of them within another."""
    assert len(blocks(model, names)) == count


def test_an_unknown_class_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"accelerate\.blocks.*Bock is no class"):
        blocks(Repeats(Block()), ["Bock"])


# Real processes.


def launched(folder: Path, processes: int, *overrides: str) -> Done:
    return launch(folder, processes, "-m", "resilient_train", *DIGITS, *OFTEN, *overrides)


FAULTS = "drill.faults=[{bad_moments:{at:[35],rank:all}},{crash:{at:[55]}}]"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a healthy run of two processes that share the weights, and one with faults until it was killed."""
    folder = tmp_path_factory.mktemp("sharding")
    done = launched(folder, 2, "accelerate.fsdp=true", "run.dir=healthy")
    assert done.is_well, done
    assert "FSDP2 over 2 processes" in done.stdout
    killed = launched(folder, 2, "accelerate.fsdp=true", "run.dir=killed", FAULTS)
    assert killed.codes[0] == -signal.SIGKILL
    assert "; rewound to step" in killed.stdout, killed
    return folder


@pytest.fixture
def killed(place: Path, tmp_path: Path) -> Path:
    """A copy of the run that was killed: its checkpoints are of two processes."""
    run_dir = tmp_path / "killed"
    shutil.copytree(place / "killed", run_dir)
    return run_dir


def test_rewound_killed_and_gone_on_with_it_is_the_run_without_a_fault(place: Path, killed: Path) -> None:
    """Every bit: weights, moments, schedule and position, gathered over the ranks."""
    done = launched(killed.parent, 2, "accelerate.fsdp=true", "run.dir=killed", FAULTS)
    assert done.is_well, done
    here, there = summary(killed), summary(place / "healthy")
    for key in ("weights_sha256", "state_sha256", "final_loss", "eval"):
        assert here[key] == there[key], key
    assert here["incidents"] == {"total": 2, "recovered": 2, "by_cause": {"optimizer": 1, "process": 1}}
    mine, theirs = load_file(killed / "weights.safetensors"), load_file(place / "healthy/weights.safetensors")
    assert all(torch.equal(mine[name], weight) for name, weight in theirs.items())


class Turning(MLP):
    """With a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.ones(4, dtype=torch.complex64))


def test_ranks_agree_on_the_checkpoint_after_all_were_demoted(tmp_path: Path) -> None:
    """They write the newest state that is still verified together, at the next update.

    Before, a trial has run the model without a backward, behind which no weight of a single block is in parts. Files of
    weights hold full ones.
    """
    own = ["objective=custom", "objective._target_=test_resume.diverges", "accelerate.fsdp=true", "run.dir=run"]
    own += ["checkpoint.disk.every=40", "checkpoint.memory.every=10", "run.eval_every=10"]
    done = launched(tmp_path, 2, *own, "model=custom", "model._target_=test_sharding.Turning")
    assert done.is_well, done
    run_dir, exported = tmp_path / "run", tmp_path / "exported.safetensors"
    saved = [one["step"] for one in in_journal(run_dir, "checkpoint_saved")]
    assert "step-00000040 is demoted" in done.stdout
    assert (saved[0], 0 < saved[1] <= 35, saved[-1]) == (40, True, 60)
    assert checkpoints.main([str(run_dir), "--weights", str(exported)]) == 0
    found, trained = load_file(exported), load_file(run_dir / "weights.safetensors")
    assert found.keys() == trained.keys() == {*MLP().state_dict(), "turns"}
    assert all(torch.equal(found[name], weight) for name, weight in trained.items())


def test_another_number_of_processes_goes_on(place: Path, killed: Path) -> None:
    """From the same sample, with updates of the same samples: the run ends at the same loss up to rounding."""
    done = launched(killed.parent, 1, "run.dir=killed", FAULTS)  # of replicas: one
    assert done.is_well, done
    assert "an update stays 64 samples: 32 rows x 2 micro-batches x 1 processes" in done.stdout
    here, there = summary(killed), summary(place / "healthy")
    assert here["final_loss"] == pytest.approx(there["final_loss"], rel=1e-4)
    assert here["eval"] == pytest.approx(there["eval"], rel=1e-4)
    mine, theirs = load_file(killed / "weights.safetensors"), load_file(place / "healthy/weights.safetensors")
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-3, atol=1e-5)
