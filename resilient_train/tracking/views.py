"""What MLflow shows around a run: a run list with the columns that matter here, and the run's checkpoints as models."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from resilient_train.tracking.markdown import code, text
from resilient_train.tracking.story import Checkpoint, Story

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

KEY = "resilience"  # of the view, in its link
NAME = "How the runs fare"
LAST_GOOD, BEST = "last-good", "best"

_TAG = f"mlflow.sharedViewState.{KEY}"
_MADE_MS = 1_735_689_600_000  # always the same, so that a view that a person saved is recognized by its time
_COLUMNS = {  # and their widths
    "tags.`resilience.status`": 130,
    "tags.`resilience.incidents`": 145,
    "tags.`resilience.cause`": 180,
    "metrics.`train/step`": 90,
    "metrics.`train/loss`": 110,
    "metrics.`validation/loss`": 110,
    "tags.`resilience.last_incident`": 600,
}
_TRANSIENT = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
_UNFIT = re.compile(r"[^-.\w ]")  # for the name of a tag
_MOST, _MOST_METRICS = 7_900, 20  # characters of a tag, and how many


def prepare_run_list(client: MlflowClient, experiment_id: str) -> None:
    """Prepare a view of an experiment's runs, unless a person has made another one of it.

    A store that does not know or allow this is left without. A server that cannot be reached raises.
    """
    from mlflow.exceptions import MlflowException

    # Newer pages read a view with a name, older ones the bare state.
    state = {"selectedColumns": [*_COLUMNS], "columnOrder": [*_COLUMNS], "columnWidths": _COLUMNS}
    view = {"name": NAME, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": json.dumps(state)}
    wanted = json.dumps(state | view)
    try:
        there = client.get_experiment(experiment_id).tags.get(_TAG)
        if there is None or (there != wanted and f'"updatedAt": {_MADE_MS}' in there):
            client.set_experiment_tag(experiment_id, _TAG, wanted)
    except MlflowException as error:
        if error.error_code in _TRANSIENT:
            raise


def show_models(client: MlflowClient, experiment_id: str, run_id: str, story: Story) -> None:
    """Show the last good and the best checkpoint as MLflow's logged models of the run, one of each.

    Nothing is uploaded: a checkpoint stays on the disk of the run, and its model has the step and the path.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    there: dict[str, list[LoggedModel]] = {}
    for one in client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'"):
        there.setdefault(one.name, []).append(one)
    outputs = client.get_run(run_id).outputs
    linked = {one.model_id for one in outputs.model_outputs} if outputs else set()
    for name, checkpoint in ((LAST_GOOD, story.last_good), (BEST, story.best)):
        found = sorted(there.get(name, []), key=lambda one: (one.creation_timestamp, one.model_id))
        for one in found[1:]:  # MLflow's answer was lost, and it was created again
            client.delete_logged_model(one.model_id)
        first = found[0] if found else None
        tags = _tags(checkpoint)
        if first is None and checkpoint is not None:
            first = client.create_logged_model(experiment_id, name, run_id, tags, model_type="checkpoint")
        if first is None:
            continue
        if tags.items() - first.tags.items():
            client.set_logged_model_tags(first.model_id, tags)
        if first.status != LoggedModelStatus.READY:
            client.finalize_logged_model(first.model_id, LoggedModelStatus.READY)
        if first.model_id not in linked:
            client.log_outputs(run_id, [LoggedModelOutput(first.model_id, step=0)])


def _tags(checkpoint: Checkpoint | None) -> dict[str, str]:
    if checkpoint is None:
        gone = "It is not there any more, or not to be trusted."
        return {"resilience.state": "gone", "mlflow.note.content": gone}
    metrics = {f"eval.{_UNFIT.sub('_', name)[:100]}": f"{value:.6g}" for name, value in checkpoint.metrics.items()}
    numbers = "".join(f", {text(name, 40)} {value:.4g}" for name, value in list(checkpoint.metrics.items())[:5])
    return {
        "resilience.step": str(checkpoint.step),
        "resilience.path": str(checkpoint.path)[:_MOST],
        "resilience.state": checkpoint.kind,
        # A model's page shows nothing else of its tags.
        "mlflow.note.content": f"Step {checkpoint.step:,}{numbers}, in {code(str(checkpoint.path), 1_000)}",
        **dict(list(metrics.items())[:_MOST_METRICS]),
    }
