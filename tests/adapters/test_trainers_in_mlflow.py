"""What MLflow shows of guarded trainers: the same as of a run of the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from warm import ENVIRONMENT

from resilient_train.app import sync

pytest.importorskip("transformers")
pytest.importorskip("lightning")

pytestmark = [
    # MLflow 3.17 declares a mapping in a way that SQLAlchemy 2.1 is going to drop.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.timeout(400),
]

PROGRAM = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import hf_programs, lightning_programs as programs, resilient_train
for library in sys.argv[3:]:
    place = Path(sys.argv[2], library)
    uri = f"sqlite:///{place}.db"
    if library == "transformers":
        trainer = hf_programs.trainer("vit", place, "nan_grad", steps=100)
        resilient_train.hf.guard(trainer, tracking=uri).train()
    else:
        module = programs.Net("nan_gradient", at=30) if library == "lightning" else programs.Manual(
            "alone", "nan_gradient", at=30)
        programs.trainer_of(place, guarded=True, tracking=uri, max_epochs=4).fit(module, programs.loader())
"""


LIBRARIES = ["transformers", "lightning", "manual"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """Where one process has trained with each of them in turn, each with a database of its own."""
    place = tmp_path_factory.mktemp("trained")
    for library in LIBRARIES:
        shutil.copy(empty_store, place / f"{library}.db")
    words = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), str(place), *LIBRARIES]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd=place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_incident_is_a_trace_and_the_page_has_the_verdict(library: str, trained: Path) -> None:
    from mlflow import MlflowClient

    place, uri = trained / library, f"sqlite:///{trained}/{library}.db"
    run_dir = place / "resilient_train"
    assert sync.main([str(run_dir)]) == 0  # what the process could not upload in its last seconds
    [line] = (run_dir / "incidents.jsonl").read_text().splitlines()
    incident = json.loads(line)
    client = MlflowClient(uri)
    experiments = [one.experiment_id for one in client.search_experiments(filter_string="name != 'Default'")]
    [run] = client.search_runs(experiments)
    tags = run.data.tags
    assert run.info.status == "FINISHED"
    assert (tags["resilience.status"], tags["resilience.incidents"]) == ("recovered", "1")
    assert tags["resilience.cause"] == incident["cause"] == "transient"
    assert "recovered" in tags["mlflow.note.content"]
    [trace] = client.search_traces(locations=experiments)
    found = {key.partition(".")[2]: value for key, value in trace.info.tags.items() if key.startswith("resilience.")}
    expected = {key: incident[key] for key in ("step", "signal", "cause", "outcome")} | {"incident": 1}
    assert found.items() >= {key: str(value) for key, value in expected.items()}.items()
    assert trace.info.request_metadata["mlflow.sourceRun"] == run.info.run_id
    assert [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")][-1] >= 90
