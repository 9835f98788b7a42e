"""The checkpoints that a person may want, as MLflow's logged models of the run: the last good one, and the best."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from resilient_train.tracking.markdown import code, text
from resilient_train.tracking.story import Checkpoint, Story

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

LAST_GOOD, BEST = "last-good", "best"

_STEP, _PATH, _STATE = "resilience.step", "resilience.path", "resilience.state"
_UNFIT = re.compile(r"[^-.\w ]")  # for the name of a tag
_MOST, _MOST_METRICS = 7_900, 20  # characters of a tag, and how many
_NOTE = "mlflow.note.content"  # all that a model's page shows of its tags
_GONE = "gone"  # what it was of is not there any more, or not to be trusted


def show_models(client: MlflowClient, experiment_id: str, run_id: str, story: Story) -> None:
    """Let the run's models say where its checkpoints lie: each of them is there once, and tells of the newest.

    Nothing is uploaded: a checkpoint stays on the disk of the run, and its model has the step and the path.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    there = _models(client, experiment_id, run_id)
    outputs = client.get_run(run_id).outputs
    linked = {one.model_id for one in outputs.model_outputs} if outputs else set()
    for name, checkpoint in ((LAST_GOOD, story.last_good), (BEST, story.best)):
        known = next(iter(there.get(name, [])), None)
        for one in there.get(name, [])[1:]:  # two processes that did not know of each other have begun it
            client.delete_logged_model(one.model_id)
        tags = _tags(checkpoint)
        if known is None and checkpoint is not None:
            known = client.create_logged_model(experiment_id, name, run_id, tags, model_type="checkpoint")
        if known is None:
            continue
        if tags.items() - known.tags.items():
            client.set_logged_model_tags(known.model_id, tags)
        if known.status != LoggedModelStatus.READY:
            client.finalize_logged_model(known.model_id, LoggedModelStatus.READY)
        if known.model_id not in linked:
            client.log_outputs(run_id, [LoggedModelOutput(known.model_id, step=0)])


def _models(client: MlflowClient, experiment_id: str, run_id: str) -> dict[str, list[LoggedModel]]:
    """The models of a run by their names, the oldest first."""
    found: dict[str, list[LoggedModel]] = {}
    for one in _pages(client, experiment_id, run_id):
        found.setdefault(one.name, []).append(one)
    return {name: sorted(some, key=lambda one: (one.creation_timestamp, one.model_id)) for name, some in found.items()}


def _pages(client: MlflowClient, experiment_id: str, run_id: str) -> Iterator[LoggedModel]:
    token = None
    while True:
        page = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", page_token=token)
        yield from page
        if not (token := page.token):
            return


def _tags(checkpoint: Checkpoint | None) -> dict[str, str]:
    """What a model says; of numbers that an evaluation had, each under a name of its own."""
    if checkpoint is None:
        return {_STATE: _GONE, _NOTE: "It is not there any more, or not to be trusted."}
    metrics = {f"eval.{_UNFIT.sub('_', name)[:100]}": f"{value:.6g}" for name, value in checkpoint.metrics.items()}
    numbers = "".join(f", {text(name, 40)} {value:.4g}" for name, value in list(checkpoint.metrics.items())[:5])
    note = f"Step {checkpoint.step:,}{numbers}, on the disk of the run: {code(str(checkpoint.path), 1_000)}"
    place = {_STEP: str(checkpoint.step), _PATH: str(checkpoint.path)[:_MOST], _STATE: checkpoint.kind, _NOTE: note}
    return place | dict(list(metrics.items())[:_MOST_METRICS])
