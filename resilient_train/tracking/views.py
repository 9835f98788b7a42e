"""A view of the run list with the columns that matter here, kept in the experiment where MLflow's pages look for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "resilience"  # of the view, in its link
NAME = "How the runs fare"

_TAG = f"mlflow.sharedViewState.{KEY}"
_MADE_MS = 1_735_689_600_000  # the same for ever, so that all who prepare it prepare the same
_COLUMNS = {  # and their widths
    "tags.`resilience.status`": 130,
    "tags.`resilience.incidents`": 145,
    "tags.`resilience.cause`": 180,
    "metrics.`step`": 90,
    "metrics.`loss`": 110,
    "metrics.`eval/loss`": 110,
    "tags.`resilience.last_incident`": 600,
}
_PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # answers that may be others later


def prepare_run_list(client: MlflowClient, experiment_id: str) -> str | None:
    """Prepare a view of an experiment's runs; return the path of its link, behind the address of the server.

    Null where the store does not know of such a thing or does not allow it: it is a comfort, and no run should suffer
    for it. What somebody has made of the view stays. A server that cannot be reached raises, as everywhere.
    """
    from mlflow.exceptions import MlflowException

    try:
        there = client.get_experiment(experiment_id).tags.get(_TAG)
        if there != _view() and _is_ours(there):
            client.set_experiment_tag(experiment_id, _TAG, _view())
    except MlflowException as error:
        if error.error_code in _PASSING:
            raise
        return None
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"/#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={KEY}"


def _is_ours(view: str | None) -> bool:
    """Say whether a view is as it was prepared, by this version or another: who saves it anew gives it the time."""
    try:
        said = json.loads(view) if view is not None else {"updatedAt": _MADE_MS}
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("updatedAt") == _MADE_MS


def _view() -> str:
    """What the page reads from the tag: a view with a name; before those were invented, the bare state."""
    state = {"selectedColumns": [*_COLUMNS], "columnOrder": [*_COLUMNS], "columnWidths": _COLUMNS}
    view = {"name": NAME, "createdAt": _MADE_MS, "updatedAt": _MADE_MS, "state": json.dumps(state)}
    return json.dumps(state | view)
