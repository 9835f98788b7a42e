"""Sweeps: what the jobs are called, and what a person sees of them at the end and in MLflow."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from command import command
from kills import Nursery

from resilient_train.app import sync
from resilient_train.app.config.command_line import name_of
from resilient_train.record.journal import entries
from resilient_train.record.outbox import METRICS, OUTBOX
from resilient_train.tracking import presentation as sweep

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
            [fared(f"seed={one}", "recovered", incidents=1, to_do=("fix `div` at `ecg.py:48`",)) for one in (1, 2)],
            "**All 2 jobs recovered.** **Do:** fix `div` at `ecg.py:48` (2 jobs); 2 incidents in all.",
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
    here: Path, run_command: command, nursery: Nursery, empty_store: Path
) -> None:
    """A job that is refused is in the table and counted in MLflow; those that trained are child runs with their rows.

    Another run writes to the same file of SQLite meanwhile, and is none of them.
    """
    from mlflow import MlflowClient

    uri = f"sqlite:///{shutil.copy(empty_store, here / 'mlflow.db')}"
    both = [*SMALL, "drill=nan_grad", "run.log_every=4", f"tracking.uri={uri}"]
    other = nursery.start(*both, f"run.dir={here}/other/run")
    outcome = run_command(["--multirun", *both, "optimizer.lr=1e-3,2e-3,3e-3,4e-3,high"])
    assert outcome.code == 2
    assert re.search(r"\n  lr=high: optimizer.lr=high: must be a finite number\n", outcome.stdout)
    before, _, end = outcome.stdout.partition("the sweep has ended:")
    names = ["lr=0.001", "lr=0.002", "lr=0.003", "lr=0.004"]
    table = [line.split()[:2] for line in end.splitlines()[2:7]]
    assert table == [*([name, "recovered"] for name in names), ["lr=high", "refused"]]
    assert other.wait() == 0, other.output
    client = MlflowClient(uri)
    (home,) = [one.experiment_id for one in client.search_experiments() if one.name == "resilient_train"]
    runs = {run.info.run_id: run for run in client.search_runs([home])}
    (parent,) = {run.data.tags.get("mlflow.parentRunId") for run in runs.values()} - {None}
    children = [run for run in runs.values() if run.data.tags.get("mlflow.parentRunId") == parent]
    assert sorted(str(run.info.run_name) for run in children) == names
    whole = runs[str(parent)]
    assert whole.info.status == "FAILED"  # not all of its jobs fared well
    assert str(whole.info.run_name).endswith(": 1 of 5 jobs needs attention")
    tags, note = whole.data.tags, whole.data.tags["mlflow.note.content"]
    assert (tags["resilience.status"], tags["resilience.incidents"]) == ("failed", "4")
    assert tags["resilience.cause"] == "transient"
    assert note.startswith("**1 of 5 jobs needs attention.** **Do:** look at lr=high (refused); 4 incidents in all.")
    assert all(f"runs/{run.info.run_id}?" in note for run in children)
    assert "| optimizer.lr=high: must be a finite number" in note
    assert "to see it, start" not in before
    assert end.count("to see it, start") == 1
    assert f"runs/{parent}?" in end
    for file in here.rglob("summary.json"):
        run = runs.pop(json.loads(file.read_text())["mlflow"]["run_id"])
        assert (run.info.status, run.data.tags["resilience.incidents"]) == ("FINISHED", "1")
        assert {"config.yaml", "train.log"} <= {one.path for one in client.list_artifacts(run.info.run_id)}
        assert f"lr={run.data.params['optimizer.lr']}" == run.info.run_name or file.parent.parent.name == "other"
        written = [one for one, _ in entries(file.with_name(OUTBOX)) if one is not None and one["kind"] == METRICS]
        mine = [(one["tick"], one["values"]["loss"]) for one in written if "loss" in one["values"]]
        assert f"| {json.loads(file.read_text())['final_loss']:.4g}&" in note or file.parent.parent.name == "other"
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(one.step, one.value) for one in history] == mine
    assert list(runs) == [parent]


def test_a_job_that_fails_before_its_first_update_is_a_failed_run_of_the_sweep(
    here: Path, run_command: command, empty_store: Path
) -> None:
    """The sweep's address is printed, although the last job was refused; `sync` knows the run."""
    from mlflow import MlflowClient

    Path("failing.py").write_text("def loss(model, batch):\n    raise RuntimeError('no channels')\n")
    uri = f"sqlite:///{shutil.copy(empty_store, here / 'mlflow.db')}"
    line = [*SMALL[:2], *SMALL[3:], f"tracking.uri={uri}", "objective=custom"]
    outcome = run_command(["--multirun", *line, "objective._target_=failing.loss,failing.gone"])
    assert outcome.code == 2
    _, _, end = outcome.stdout.partition("the sweep has ended:")
    assert [line.split()[1:3] for line in end.splitlines()[2:4]] == [["failed", "(1)"], ["refused", "(2)"]]
    assert "_target_=failing.loss: RuntimeError: no channels" in end
    client = MlflowClient(uri)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (child,) = [one for one in runs if "mlflow.parentRunId" in one.data.tags]
    (parent,) = [one for one in runs if one is not child]
    assert {one.info.status for one in runs} == {"FAILED"}
    assert f"runs/{parent.info.run_id}?" in end
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("**2 of 2 jobs need attention.**")
    assert "RuntimeError: no channels (" in note
    assert child.data.params["run.steps"] == "12"
    (directory,) = {file.parent for file in here.rglob("summary.json")}
    assert sync.main([str(directory)]) == 0
