"""Sweeps: what the jobs are called, and what a person sees of them at the end and in MLflow."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from command import command

from resilient_train.app.sweep import name_of

SMALL = ["model=mlp", "data=digits", "objective=classification", "run.steps=12", "tracking.drain_s=600"]


@pytest.mark.parametrize(
    ("line", "job", "name"),
    [
        (["run.seed=0,1", "model=mlp"], ["run.seed=1", "model=mlp"], "seed=1"),
        (["model.width=1,2", "head.width=1,2"], ["model.width=1", "head.width=2"], "model.width=1, head.width=2"),
        (["optimizer=sgd,adamw"], ["optimizer=sgd"], "optimizer=sgd"),
        (["+model.password=hunter22,a1b2c3"], ["+model.password=hunter22"], "password=***"),
        ([], ["run.seed=1", "model=mlp"], "seed=1, model=mlp"),
    ],
)
def test_a_job_is_named_by_what_differs(
    line: list[str], job: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last part of each key where that is unique, without secrets."""
    monkeypatch.setattr(sys, "argv", ["resilient-train", "--multirun", *line])
    assert name_of(job) == name


def test_a_sweep_ends_with_a_table_and_is_one_run_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: command, empty_store: Path
) -> None:
    """A job that is refused is in the table as well; those that trained are child runs of the run of the sweep."""
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    swept = ["run.seed=0,1", "optimizer.lr=1e-3,high", "drill=nan_grad"]
    outcome = run_command(["--multirun", *SMALL, *swept, f"tracking.uri={uri}"])
    assert outcome.code == 2
    table = [line.split() for line in outcome.stdout.partition("the sweep has ended:")[2].splitlines()[1:]]
    assert [line[:3] for line in table[1:]] == [
        ["seed=0,", "lr=0.001", "recovered"],
        ["seed=0,", "lr=high", "refused"],
        ["seed=1,", "lr=0.001", "recovered"],
        ["seed=1,", "lr=high", "refused"],
    ]
    client = MlflowClient(uri)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    names = {run.info.run_name: run for run in runs}
    (parent,) = [run for name, run in names.items() if str(name).startswith("sweep ")]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {run.info.run_name for run in children} == {"seed=0, lr=0.001", "seed=1, lr=0.001"}
    assert "the runs below it" in parent.data.tags["mlflow.note.content"]
    assert {run.info.status for run in runs} == {"FINISHED"}
