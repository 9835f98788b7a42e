"""Sweeps: what the jobs are called, and what a person sees of them at the end and in MLflow."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from command import command

from resilient_train.app.config.command_line import name_of
from resilient_train.tracking import sweep

SMALL = ["model=mlp", "data=digits", "objective=classification", "run.steps=12", "tracking.drain_s=600"]


@pytest.mark.parametrize(
    ("line", "job", "name"),
    [
        (["run.seed=0,1", "model=mlp"], ["run.seed=1", "model=mlp"], "seed=1"),
        (["model.width=1,2", "head.width=1,2"], ["model.width=1", "head.width=2"], "model.width=1, head.width=2"),
        (["optimizer=sgd,adamw"], ["optimizer=sgd"], "optimizer=sgd"),
        (["+model.password=hunter22,a1b2c3"], ["+model.password=hunter22"], "password=***"),
        (
            ["run.seed=0,1", "+data.train.bad=false", "optimizer.lr=1e-3", "+model.name='a b'"],
            ["run.seed=1", "+data.train.bad=False", "optimizer.lr=0.001", "+model.name='a b'"],
            "seed=1",  # Hydra passes on the same values in another form
        ),
        ([], ["run.seed=1", "model=mlp"], "seed=1, model=mlp"),
    ],
)
def test_a_job_is_named_by_what_differs(
    line: list[str], job: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last part of each key where that is unique, without secrets."""
    monkeypatch.setattr(sys, "argv", ["resilient-train", "--multirun", *line])
    assert name_of(job) == name


def fared(name: str, status: str, **more: Any) -> sweep.Job:
    return sweep.Job(name, status, f"#/experiments/1/runs/{name[-1]}a", **more)


@pytest.mark.parametrize(
    ("jobs", "first", "status"),
    [
        ([fared("seed=1", "clean")], "**The only job fared well.** Nothing to change; no incidents.", "clean"),
        (
            [fared("seed=1", "clean"), fared("seed=2", "recovered", incidents=3, is_running=True)],
            "**All 2 jobs fared well so far.** Nothing to change; 3 incidents in all.",
            "recovered",
        ),
        (
            [fared("seed=1", "recovered", incidents=2), fared("seed=2", "unrecovered", incidents=1)],
            "**1 of 2 jobs needs attention.** **Do:** look at [seed=2](#/experiments/1/runs/2a) (not recovered); "
            "3 incidents in all.",
            "unrecovered",
        ),
        (
            [*(fared(f"seed={one}", "no_progress") for one in range(4)), fared("seed=4", "gave_up")],
            "**5 of 5 jobs need attention.** **Do:** look at [seed=0](#/experiments/1/runs/0a) (the loss did not fall)",
            "gave_up",
        ),
    ],
)
def test_the_page_of_a_sweep_says_first_whether_all_jobs_fared_well(
    jobs: list[sweep.Job], first: str, status: str
) -> None:
    """And which of them to look at; the tag is the worst of theirs."""
    assert sweep.note_of(jobs).startswith(first)
    assert sweep.tags_of(jobs)["resilience.status"] == status


def test_the_page_of_a_large_sweep_has_the_jobs_that_need_attention() -> None:
    """As many as there is room for, those first."""
    jobs = [fared(f"model.width={10**6 + at}, seed=1", "failed" if at > 900 else "clean") for at in range(1000)]
    note = sweep.note_of(jobs)
    assert len(note) < 8_000
    rows = [line for line in note.splitlines() if line.startswith("| [")]
    assert len(rows) > 20
    assert all("**failed**" in line for line in rows)
    assert f"And {1000 - len(rows)} more" in note


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
    assert [line[:3] for line in table[1:5]] == [
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
    assert {run.info.status for run in children} == {"FINISHED"}
    assert parent.info.status == "FINISHED"
    assert str(parent.info.run_name).endswith(": all 2 jobs fared well")
    tags, note = parent.data.tags, parent.data.tags["mlflow.note.content"]
    assert (tags["resilience.status"], tags["resilience.incidents"]) == ("recovered", "2")
    assert tags["resilience.cause"] == "transient"
    assert note.startswith("**All 2 jobs fared well.** Nothing to change; 2 incidents in all.")
    assert all(f"runs/{run.info.run_id}?" in note for run in children)
    end = outcome.stdout.partition("the sweep has ended:")[2]
    assert outcome.stdout.count("to see it, start") == end.count("to see it, start") == 1
    assert f"runs/{parent.info.run_id}?" in end
