"""Sweeps: what a person sees of their jobs at the end and in MLflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command import command

from resilient_train.command import sync
from resilient_train.durable.journal import METRICS, OUTBOX, entries


def test_the_jobs_of_a_sweep_are_runs_in_mlflow(here: Path, run_command: command, empty_store: Path) -> None:
    """One that is refused ends no other and is no run; one that fails before its first update is a failed one, which
    `sync` knows. Each has the sweep among its parameters, and its own rows."""
    from mlflow import MlflowClient

    Path("failing.py").write_text("def loss(model, batch):\n    raise RuntimeError('no channels')\n")
    uri = f"sqlite:///{shutil.copy(empty_store, here / 'mlflow.db')}"
    words = ["model=mlp", "data=digits", "objective=custom", "run.steps=12", "run.log_every=4", "drill=nan_grad"]
    words += ["tracking.drain_s=600", f"tracking.uri={uri}"]
    objectives = "objective._target_=resilient_train.zoo.objectives.classification,failing.loss,failing.gone"
    outcome = run_command(["--multirun", *words, objectives])
    assert outcome.code == 2
    assert "failing.gone" in outcome.stderr
    assert "RuntimeError: no channels" in outcome.stderr
    client = MlflowClient(uri)
    (home,) = [one.experiment_id for one in client.search_experiments() if one.name == "resilient_train"]
    runs = {run.data.params["objective._target_"].rpartition(".")[2]: run for run in client.search_runs([home])}
    assert len({run.data.params["sweep"] for run in runs.values()}) == 1
    summaries = {file: json.loads(file.read_text())["mlflow"] for file in here.rglob("summary.json")}
    places = {known["run_id"]: file.parent for file, known in summaries.items() if known is not None}
    assert {run.info.run_id for run in runs.values()} == places.keys()
    trained, failed = runs["classification"], runs["loss"]
    assert f"runs/{trained.info.run_id}?" in outcome.stdout
    assert (trained.info.status, trained.data.tags["resilience.incidents"]) == ("FINISHED", "1")
    place = places[trained.info.run_id]
    assert {"config.yaml", "train.log"} <= {one.path for one in client.list_artifacts(trained.info.run_id)}
    assert trained.info.run_name == place.name
    written = [one for one, _ in entries(place / OUTBOX) if one is not None and one["kind"] == METRICS]
    history = client.get_metric_history(trained.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [
        (one["tick"], one["values"]["loss"]) for one in written if "loss" in one["values"]
    ]
    assert (failed.info.status, failed.data.params["run.steps"]) == ("FAILED", "12")
    assert sync.main([str(places[failed.info.run_id])]) == 0
