"""The picture of a run shows all its incidents, in a small file."""

from __future__ import annotations

import io
import sys
from typing import Any

from PIL import Image
from stories import incident, story

from resilient_train.sentences import OUTCOMES
from resilient_train.tracking.uploader import GOOD, draw_strip
from resilient_train.types import Outcome

MOST_BYTES = 100_000


def colour(name: str) -> tuple[int, int, int]:
    return int(name[1:3], 16), int(name[3:5], 16), int(name[5:], 16)


def pixels(figure: Any) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    png = file.getvalue()
    assert len(png) < MOST_BYTES
    return Image.open(io.BytesIO(png)).convert("RGB")


def amount(figure: Any, name: str) -> int:
    picture = pixels(figure)
    counted = picture.getcolors(picture.width * picture.height) or []
    return next((count for count, rgb in counted if rgb == colour(name)), 0)


def test_every_outcome_has_words_and_a_mark() -> None:
    """Green only what has recovered."""
    assert OUTCOMES.keys() == {None, *Outcome}
    marks = {one: amount(draw_strip(story(incident(5, one))), GOOD) for one in OUTCOMES}
    assert marks.pop(Outcome.RECOVERED) > 50
    assert set(marks.values()) == {0}


def test_the_strip_has_all_incidents() -> None:
    """What is wider than a description pushes MLflow's page aside. It may draw in the process of a person's program."""
    before = set(sys.modules)
    strip = draw_strip(story(*[incident(at) for at in range(1, 201)]))
    assert pixels(strip).width < 600
    assert amount(strip, GOOD) > 50
    assert "matplotlib.pyplot" not in set(sys.modules) - before
