"""The pictures of a run's incidents among its charts in MLflow: each there once, however often it is shown."""

from __future__ import annotations

import io
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilient_train.record.surroundings import Point
from resilient_train.tracking.drawing import drawn
from resilient_train.tracking.overview import overview, strip
from resilient_train.tracking.story import Chapter, Story

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image

KEY = "Incidents/pictures"  # the chart, in a section of its own: by the alphabet, capitals first, the first one

STRIP = "incidents.png"  # the artifact that a note has in it

_FOLDER = "images"  # where MLflow's pages look for them


def draw(chapter: Chapter, points: Sequence[Point]) -> bytes:
    """Draw an incident and what was measured around it, as a PNG."""
    return _png(drawn(chapter, points))


def draw_overview(story: Story) -> bytes:
    """Draw all incidents of a run in one picture, as a PNG."""
    return _png(overview(story))


def draw_strip(story: Story) -> bytes:
    """Draw the same as low as it goes, without words, as a PNG: they stand around it."""
    return _png(strip(story))


def show_picture(client: MlflowClient, run_id: str, chapter: Chapter, points: Sequence[Point]) -> None:
    """Put the picture of an incident among the charts of a run, in the place of an earlier one of it.

    The slider counts incidents: two of them may have the same tick, and of one place it shows one picture.
    """
    _show(client, run_id, drawn(chapter, points), chapter.incident.id, chapter.opened_ms)


def show_overview(client: MlflowClient, run_id: str, story: Story) -> None:
    """Put the picture of all incidents where the slider stands when the page is opened, at 0; of none, nothing.

    And once more, without its words, where the note has it: what a run was given stands above a chart, at any length.
    """
    if story.chapters:
        _show(client, run_id, overview(story), 0, 0)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / STRIP
            file.write_bytes(draw_strip(story))
            client.log_artifact(run_id, str(file))


def strip_url(run_id: str) -> str:
    """Where the strip of a run is for a page of the same server, whatever its address is there."""
    return f"get-artifact?path={STRIP}&run_uuid={run_id}"


def picture_url(experiment_id: str, run_id: str, chapter: Chapter) -> str:
    """The page that shows the picture of an incident, from another page of the same server."""
    name = _name(run_id, chapter.incident.id, chapter.opened_ms)
    # Without the type of workflow the page comes up among the tools for language-model applications.
    return f"#/experiments/{experiment_id}/runs/{run_id}/artifacts/{_FOLDER}/{name}.png?workflowType=machine_learning"


def _name(run_id: str, place: int, time_ms: int) -> str:
    """The name that `log_image` would give, but for what differs there from time to time.

    Its parts are divided by `+`, as MLflow does now and has long understood: the `%` of before is decoded on its way
    through a proxy.
    """
    always_the_same = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {KEY} {place}")
    return f"{KEY.replace('/', '~')}+step+{place}+timestamp+{time_ms}+{always_the_same}"


def _show(client: MlflowClient, run_id: str, picture: Image, place: int, time_ms: int) -> None:
    """Upload a picture as `log_image` would: the charts show the second file, and a click opens the first."""
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_IMAGES

    name = _name(run_id, place, time_ms)
    with tempfile.TemporaryDirectory() as folder:
        whole, shown = Path(folder) / f"{name}.png", Path(folder) / f"{name}+compressed.webp"
        whole.write_bytes(_png(picture))
        picture.convert("RGB").save(shown, "WEBP", quality=80)
        for file in (whole, shown):
            client.log_artifact(run_id, str(file), _FOLDER)
    client.set_tag(run_id, MLFLOW_LOGGED_IMAGES, "True")


def _png(picture: Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()
