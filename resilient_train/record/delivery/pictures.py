"""The pictures of a run's incidents among its charts in MLflow: each there once, however often it is shown."""

from __future__ import annotations

import io
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resilient_train.record.delivery.drawing import drawn
from resilient_train.record.delivery.overview import overview
from resilient_train.record.story import Chapter, Story
from resilient_train.record.surroundings import Point

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image

KEY = "Incidents/pictures"  # the chart, in a section of its own: by the alphabet, capitals first, the first one

_FOLDER = "images"  # where MLflow's pages look for them


def draw(chapter: Chapter, points: Sequence[Point]) -> bytes:
    """Draw an incident and what was measured around it, as a PNG."""
    return _png(drawn(chapter, points))


def draw_overview(story: Story) -> bytes:
    """Draw all incidents of a run in one picture, as a PNG."""
    return _png(overview(story))


def show_picture(client: MlflowClient, run_id: str, chapter: Chapter, points: Sequence[Point]) -> None:
    """Put the picture of an incident among the charts of a run, in the place of an earlier one of it.

    The slider counts incidents: two of them may have the same tick, and of one place it shows one picture.
    """
    _show(client, run_id, drawn(chapter, points), chapter.incident.id, chapter.opened_ms)


def show_overview(client: MlflowClient, run_id: str, story: Story) -> None:
    """Put the picture of all incidents where the slider stands when the page is opened, at 0; of none, nothing."""
    if story.chapters:
        _show(client, run_id, overview(story), 0, 0)


def _show(client: MlflowClient, run_id: str, picture: Image, place: int, time_ms: int) -> None:
    """Upload a picture under the names that `log_image` would give, but for what differs there from time to time.

    The charts show the second file, and a click opens the first. Their parts are divided by `+`, as MLflow does now and
    has long understood: the `%` of before is decoded on its way through a proxy.
    """
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_IMAGES

    always_the_same = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {KEY} {place}")
    name = f"{KEY.replace('/', '~')}+step+{place}+timestamp+{time_ms}+{always_the_same}"
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
