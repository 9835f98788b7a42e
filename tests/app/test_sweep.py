"""Sweeps: what a person sees of their jobs at the end and in MLflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command import command
from kills import Nursery

from resilient_train.app import sync
from resilient_train.record.journal import entries
from resilient_train.record.outbox import METRICS, OUTBOX

SMALL = ["model=mlp", "data=digits", "objective=classification", "run.steps=12", "tracking.drain_s=600"]


def tracked(place: Path) -> list[Path]:
    """The summaries of the runs that MLflow has; a start that was refused leaves one, too."""
    return [file for file in place.rglob("summary.json") if json.loads(file.read_text())["mlflow"] is not None]


def test_the_jobs_of_a_sweep_are_runs_in_mlflow(
    here: Path, run_command: command, nursery: Nursery, empty_store: Path
) -> None:
    """One that is refused ends no other; those that trained are runs with the sweep as a tag, and with their rows.

    Another run writes to the same file of SQLite meanwhile, and is none of them.
    """
    from mlflow import MlflowClient

    uri = f"sqlite:///{shutil.copy(empty_store, here / 'mlflow.db')}"
    both = [*SMALL, "drill=nan_grad", "run.log_every=4", f"tracking.uri={uri}"]
    other = nursery.start(*both, f"run.dir={here}/other/run")
    outcome = run_command(["--multirun", *both, "optimizer.lr=1e-3,2e-3,high"])
    assert outcome.code == 2
    assert "error: optimizer.lr=high: must be a finite number, not text\n" in outcome.stderr
    assert other.wait() == 0, other.output
    client = MlflowClient(uri)
    (home,) = [one.experiment_id for one in client.search_experiments() if one.name == "resilient_train"]
    runs = {run.info.run_id: run for run in client.search_runs([home])}
    jobs = [run for run in runs.values() if "resilience.sweep" in run.data.tags]
    assert sorted(run.data.params["optimizer.lr"] for run in jobs) == ["0.001", "0.002"]
    assert len({run.data.tags["resilience.sweep"] for run in jobs}) == 1
    assert all(f"runs/{run.info.run_id}?" in outcome.stdout for run in jobs)
    for file in tracked(here):
        run = runs.pop(json.loads(file.read_text())["mlflow"]["run_id"])
        assert (run.info.status, run.data.tags["resilience.incidents"]) == ("FINISHED", "1")
        assert {"config.yaml", "train.log"} <= {one.path for one in client.list_artifacts(run.info.run_id)}
        assert run.info.run_name == file.parent.name
        written = [one for one, _ in entries(file.with_name(OUTBOX)) if one is not None and one["kind"] == METRICS]
        mine = [(one["tick"], one["values"]["loss"]) for one in written if "loss" in one["values"]]
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert [(one.step, one.value) for one in history] == mine
    assert not runs


def test_a_job_that_fails_before_its_first_update_is_a_failed_run(
    here: Path, run_command: command, empty_store: Path
) -> None:
    """`sync` knows the run."""
    from mlflow import MlflowClient

    Path("failing.py").write_text("def loss(model, batch):\n    raise RuntimeError('no channels')\n")
    uri = f"sqlite:///{shutil.copy(empty_store, here / 'mlflow.db')}"
    line = [*SMALL[:2], *SMALL[3:], f"tracking.uri={uri}", "objective=custom"]
    outcome = run_command(["--multirun", *line, "objective._target_=failing.loss,failing.gone"])
    assert outcome.code == 2
    assert "RuntimeError: no channels" in outcome.stderr
    client = MlflowClient(uri)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.status == "FAILED"
    assert run.data.params["run.steps"] == "12"
    (summary,) = tracked(here)
    assert sync.main([str(summary.parent)]) == 0
