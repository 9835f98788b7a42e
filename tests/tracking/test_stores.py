"""Other places than a server of one's own: PostgreSQL behind it, and one SQLite file for many runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from moody import mlflow_server
from postgres import postgres, programs
from test_delivery import client_of, prove, trained, uploader

from resilient_train.record.journal import entries
from resilient_train.record.outbox import METRICS, OUTBOX

# MLflow 3.17 declares a mapping in a way that SQLAlchemy 2.1 is going to drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.timeout(1800),  # each run here has a process that loads MLflow
]

ROOT = Path(__file__).parents[2]
SWEEP = ["--multirun", "model=mlp", "data=digits", "objective=classification", "run.steps=20", "run.log_every=5"]
SWEEP += ["run.eval_every=0", "drill=nan_grad", "tracking.drain_s=600", "optimizer.lr=1e-3,2e-3"]


@pytest.mark.skipif(programs() is None, reason="postgresql is not installed")
def test_a_server_with_postgresql_has_everything_once(tmp_path: Path) -> None:
    """Also after the cursor is lost, and from a database that is used without a server."""
    with postgres() as database:
        with mlflow_server(tmp_path, database) as address:
            run_dir = trained(tmp_path / "run", address, "story")
            for _ in range(2):
                one = uploader(run_dir, address, "story")
                one.finish()
                one.close()
                (run_dir / "mlflow.json").unlink()
            prove(run_dir, address, "story")
        direct = uploader(trained(tmp_path / "direct", database, "direct"), database, "direct")
        direct.finish()
        prove(tmp_path / "direct", database, "direct")


def test_a_sweep_of_four_fills_one_file_with_four_runs(tmp_path: Path, empty_store: Path) -> None:
    """Each with its own rows, incidents and name; and another sweep, at the same time, does not mind."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"
    sweeps = []
    for place, seeds in (("sweep", "1,2"), ("two", "3")):
        (tmp_path / place).mkdir()
        command = [sys.executable, "-m", "resilient_train", *SWEEP, f"run.seed={seeds}"]
        pipe = subprocess.PIPE
        sweeps.append(
            subprocess.Popen(command, cwd=tmp_path / place, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    for sweep in sweeps:
        out, err = sweep.communicate(timeout=1500)
        assert sweep.returncode == 0, out + err
        assert err == ""
    client = client_of(environment["MLFLOW_TRACKING_URI"])
    home = client.get_experiment_by_name("resilient_train")
    assert home is not None
    runs = client.search_runs([home.experiment_id])
    known = {run.info.run_id: run for run in runs if "mlflow.parentRunId" in run.data.tags}
    parents = {run.data.tags["mlflow.parentRunId"] for run in known.values()}
    assert parents == {run.info.run_id for run in runs} - known.keys()
    assert len(parents) == 2
    directories = [path.parent for path in tmp_path.glob("*/runs/*/summary.json")]
    assert len(directories) == len(known) == 6
    for run_dir in directories:
        run = known.pop(json.loads((run_dir / "summary.json").read_text())["mlflow"]["run_id"])
        lr, seed = (run.data.params[key] for key in ("optimizer.lr", "run.seed"))
        assert run.info.run_name == (f"lr={lr}" if seed == "3" else f"lr={lr}, seed={seed}")
        assert (run.info.status, run.data.tags["resilience.incidents"]) == ("FINISHED", "1")
        assert (float(run.data.params["optimizer.lr"]), run.data.params["run.seed"]) in [
            (lr, seed) for lr in (1e-3, 2e-3) for seed in ("1", "2", "3")
        ]
        written = [entry for entry, _ in entries(run_dir / OUTBOX) if entry is not None]
        rows = [one for one in written if one["kind"] == METRICS and "loss" in one["values"]]
        mine = [(one["tick"], one["values"]["loss"]) for one in rows]
        theirs = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
        assert theirs == mine
    assert known == {}
