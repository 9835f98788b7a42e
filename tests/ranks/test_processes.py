"""The loop on several real processes: one run, seen as one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import command
from group import Done, launch
from kills import in_journal, summary
from safetensors.torch import load_file
from torch import nn

from resilient_train.report.story import read_story

OWN = ["model=custom", "model._target_=user_programs.Plain", "data.eval._target_=user_programs.Fixed"]
OWN += ["data=custom", "data.train._target_=user_programs.Augmented"]
OWN += ["objective=custom", "objective._target_=user_programs.mse_and_more"]
OWN += ["accelerate.cpu=true", "data.batch_size=3", "run.steps=20", "run.name=run", "run.eval_every=10"]


def launched(folder: Path, processes: int, *overrides: str) -> Done:
    return launch(folder, processes, "-m", "resilient_train", *OWN, *overrides)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs/run/weights.safetensors")


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: command) -> Path:
    """The run that the others are held to: one process that accumulates four micro-batches."""
    folder = tmp_path / "one"
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = run_command([*OWN, "accelerate.gradient_accumulation_steps=4", "tracking=none"])
    assert done.code == 0, done.stderr
    return folder


def test_processes_and_micro_batches_make_the_same_updates(
    one_process: Path, tmp_path: Path, empty_store: Path
) -> None:
    """The same run on 1 and 2 processes sees the same updates, and so ends at the same weights up to rounding.

    Rank 0 alone talks: one directory, one line each, one MLflow run; the other rank has a log file of its own.
    """
    folder = tmp_path / "place"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    cut = ["accelerate.gradient_accumulation_steps=2", "data.num_workers=1"]
    done = launched(folder, 2, *cut, "tracking.drain_s=600")
    assert done.is_well, done.stderr
    mine, theirs = weights(folder), weights(one_process)
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5)
    here, there = summary(folder / "runs/run"), summary(one_process / "runs/run")
    assert here["final_loss"] == pytest.approx(there["final_loss"], rel=1e-4)
    assert here["eval"] == pytest.approx(there["eval"], rel=1e-4)
    assert "2 processes" in done.stdout

    files = {"train.log", "train.rank1.log", "summary.json", "incidents.jsonl", "weights.safetensors", "config.yaml"}
    files |= {"journal.jsonl", "progress", "mlflow.json", "outbox.jsonl", "upload.log", "checkpoints", ".lock"}
    assert files == set(os.listdir(folder / "runs/run"))
    assert done.stdout.count("step 10/20") == 1
    assert done.stdout.count("completed 20 steps") == 1
    from mlflow.tracking import MlflowClient

    client = MlflowClient(here["mlflow"]["tracking_uri"])
    experiment = client.get_experiment_by_name("resilient_train")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_a_metric_that_one_rank_lacks_holds_nobody_up(tmp_path: Path) -> None:
    """It is the mean over those that have it; and the same command again says that the run is complete."""
    what = ["data.batch_size=1", "run.log_every=1", "objective._target_=user_programs.sometimes_rare", "tracking=none"]
    done = launched(tmp_path / "place", 2, *what, "data.eval._target_=user_programs.Augmented")
    assert done.is_well, done.stderr
    assert "rare" in done.stdout
    assert "rare" in summary(tmp_path / "place/runs/run")["eval"]
    again = launched(tmp_path / "place", 2, *what, "data.eval._target_=user_programs.Augmented")
    assert again.is_well, again.stderr
    assert "is complete" in again.stdout


WORDS = "the archive says: Broken pipe, as gloo does"  # an error that speaks like a connection that is gone
MINE = f"RuntimeError: {WORDS} ({__file__}:"


def fails_on_rank_1(model: nn.Module, batch: Any) -> torch.Tensor:
    fails_on_rank_1.calls += 1  # type: ignore[attr-defined]
    if fails_on_rank_1.calls >= 6 and os.environ["RANK"] == "1":  # type: ignore[attr-defined]
        raise RuntimeError(WORDS)
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


fails_on_rank_1.calls = 0  # type: ignore[attr-defined]

LOOP = """
import torch
from accelerate import Accelerator
from test_processes import fails_on_rank_1
from resilient_train import Guard, join

join(cpu=True)
accelerator = Accelerator(cpu=True)
rows = [(torch.randn(3), torch.zeros(1)) for _ in range(64)]
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
guard = Guard(accelerator, model, optimizer, data=rows, batch_size=4, objective=fails_on_rank_1, run_dir="runs/run",
              disk=0, resume=True)
for batch in guard.batches(20):
    guard.step(batch)
"""


@pytest.mark.parametrize("who", ["command", "loop"])
def test_an_error_of_a_rank_is_that_error_and_no_samples_are_blamed(who: str, tmp_path: Path) -> None:
    """Whatever its words: on that rank, with its line. A run that failed is no crash for the next start."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "loop.py").write_text(LOOP)
    objective, plain = "objective._target_=test_processes.fails_on_rank_1", "data.train._target_=user_programs.Fixed"
    words = ["-m", "resilient_train", *OWN, "tracking=none", objective, plain] if who == "command" else ["loop.py"]
    done = launch(folder, 2, *words)
    assert done.codes == [1, 1]
    assert who == "loop" or f"error on rank 1: {MINE}" in done.stderr
    run_dir = folder / "runs/run"
    assert in_journal(run_dir, "incident_treated") == []
    assert in_journal(run_dir, "process_ended") == []
    ended = read_story(run_dir)
    assert (ended.state, ended.exit_code) == ("failed", 1)
    assert str(ended.why).startswith(f"rank 1: {MINE}")


@pytest.mark.parametrize("mistake", ["run.dir=taken", "model._target_=user_programs.nothing"])
def test_a_mistake_is_told_once_and_nobody_waits(mistake: str, tmp_path: Path) -> None:
    """A directory that only rank 0 can judge ends every rank, with one line. So does what each of them meets itself."""
    (tmp_path / "place/taken").mkdir(parents=True)
    (tmp_path / "place/taken/thesis.txt").touch()
    done = launched(tmp_path / "place", 2, mistake, "tracking=none")
    assert done.codes == [2, 2]
    assert done.stderr.count(f"error: {mistake.partition('=')[0]}=") == 1
    assert "Traceback" not in done.stderr
