"""What MLflow shows around a run is there once, however often it is uploaded: checkpoints, the view of the run list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from stories import RUN, story

from resilient_train.tracking import presentation
from resilient_train.tracking.presentation import VIEW, prepare_run_list, show_models
from resilient_train.tracking.story import Checkpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{shutil.copy(empty_store, tmp_path_factory.mktemp('store'))}")


@pytest.fixture
def experiment(client: MlflowClient, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    made: str = client.create_experiment(request.node.name, tmp_path.as_uri())
    return made


@pytest.fixture
def run(client: MlflowClient, experiment: str) -> str:
    made: str = client.create_run(experiment).info.run_id
    return made


def models(client: MlflowClient, experiment: str) -> dict[str, LoggedModel]:
    found = client.search_logged_models([experiment])
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def test_checkpoints_are_models_of_the_run_and_each_is_there_once(
    client: MlflowClient, experiment: str, run: str
) -> None:
    """They say where the newest lies; a better one makes no second model."""
    show_models(client, experiment, run, story(best=None, last_good=None))
    assert models(client, experiment) == {}
    show_models(client, experiment, run, story(best=None))
    assert models(client, experiment).keys() == {"last-good"}
    newer = Checkpoint(275, RUN / "checkpoints" / "step-00000275", "verified")
    for _ in range(2):
        show_models(client, experiment, run, story(last_good=newer))
    found = models(client, experiment)
    assert found.keys() == {"last-good", "best"}
    assert {str(one.status) for one in found.values()} == {"READY"}
    assert {one.source_run_id for one in found.values()} == {run}
    tags = {name: one.tags for name, one in found.items()}
    assert (tags["last-good"]["resilience.step"], tags["last-good"]["resilience.path"]) == ("275", str(newer.path))
    assert (tags["best"]["resilience.step"], tags["best"]["eval.loss"]) == ("200", "2.261")
    assert "Step 200, loss 2.261" in tags["best"]["mlflow.note.content"]
    outputs = client.get_run(run).outputs
    assert outputs is not None
    assert sorted(one.model_id for one in outputs.model_outputs) == sorted(one.model_id for one in found.values())


def test_models_that_were_begun_are_finished_and_doubles_go(client: MlflowClient, experiment: str, run: str) -> None:
    """A kill between two calls, or two processes at once, leave nothing that the next does not set right."""
    first = client.create_logged_model(experiment, "best", run)
    client.create_logged_model(experiment, "best", run)
    show_models(client, experiment, run, story())
    best = models(client, experiment)["best"]
    assert (best.model_id, str(best.status), best.tags["resilience.step"]) == (first.model_id, "READY", "200")
    other = client.create_run(experiment).info.run_id
    show_models(client, experiment, other, story())  # each run has its own
    show_models(client, experiment, run, story(best=None))  # what was the best may turn out not to be trusted
    found = {(one.source_run_id, one.name): one for one in client.search_logged_models([experiment])}
    assert found.keys() == {(one, name) for one in (run, other) for name in ("best", "last-good")}
    assert found[run, "best"].tags["resilience.state"] == "gone"


def test_the_list_of_runs_is_prepared_once(client: MlflowClient, experiment: str) -> None:
    """The columns are named as the page names them; older pages find the same without a name."""
    prepare_run_list(client, experiment)
    tag = f"mlflow.sharedViewState.{VIEW}"
    before = client.get_experiment(experiment).tags[tag]
    prepare_run_list(client, experiment)
    assert client.get_experiment(experiment).tags[tag] == before
    view = json.loads(before)
    state = json.loads(view["state"])
    assert {"tags.`resilience.status`", "tags.`resilience.cause`", "metrics.`train/loss`"} <= set(
        state["selectedColumns"]
    )
    assert state.items() <= view.items()
    assert isinstance(view["name"], str)
    assert isinstance(view["createdAt"], int)


def test_what_somebody_has_made_of_the_view_stays(
    client: MlflowClient, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is as it was prepared is prepared anew."""
    tag = f"mlflow.sharedViewState.{VIEW}"
    with monkeypatch.context() as patched:
        patched.setattr(presentation, "NAME", "of an older version")
        prepare_run_list(client, experiment)
    prepare_run_list(client, experiment)
    ours = json.loads(client.get_experiment(experiment).tags[tag])
    assert ours["name"] == presentation.NAME
    for theirs in (
        json.dumps(ours | {"updatedAt": 1_800_000_000_000, "name": "mine"}),
        "deflate;eJyrViouSSxJVbJSKi4pysxLV6oFADqUBjk=",
    ):
        client.set_experiment_tag(experiment, tag, theirs)
        prepare_run_list(client, experiment)
        assert client.get_experiment(experiment).tags[tag] == theirs


def test_a_store_that_does_not_take_the_view_is_no_trouble(client: MlflowClient, experiment: str) -> None:
    """It is gone, or it may not be written to."""
    prepare_run_list(client, "123456789")
    client.delete_experiment(experiment)
    prepare_run_list(client, experiment)
