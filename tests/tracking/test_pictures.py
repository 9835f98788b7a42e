"""The picture of a run shows all its incidents, in a small file, and leaves the state of matplotlib alone."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image
from stories import incident, story

from resilient_train.tracking.figure import GOOD, draw_strip
from resilient_train.types import Outcome
from resilient_train.wording import OUTCOMES

MOST_BYTES = 100_000


def colour(name: str) -> tuple[int, int, int]:
    return int(name[1:3], 16), int(name[3:5], 16), int(name[5:], 16)


def pixels(png: bytes) -> Image.Image:
    assert png.startswith(b"\x89PNG")
    assert len(png) < MOST_BYTES
    return Image.open(io.BytesIO(png)).convert("RGB")


def amount(png: bytes, name: str) -> int:
    """How many pixels of a colour there are."""
    picture = pixels(png)
    counted = picture.getcolors(picture.width * picture.height) or []
    return next((count for count, rgb in counted if rgb == colour(name)), 0)


def test_every_outcome_has_words_and_a_mark() -> None:
    """Green only what has recovered."""
    assert OUTCOMES.keys() == {None, *Outcome}
    marks = {one: amount(draw_strip(story(incident(5, one))), GOOD) for one in OUTCOMES}
    assert marks.pop(Outcome.RECOVERED) > 50
    assert set(marks.values()) == {0}


@pytest.mark.parametrize("count", [1, 9, 200])
def test_the_strip_has_all_incidents(count: int) -> None:
    """A lane for each cause, a mark for each outcome; what is wider than a description pushes MLflow's page aside."""
    outcomes = (Outcome.RECOVERED, Outcome.RECURRED, Outcome.GAVE_UP, None)
    strip = draw_strip(story(*[incident(at, outcomes[at % 4]) for at in range(1, count + 1)]))
    assert pixels(strip).width < 600
    assert amount(draw_strip(story(*[incident(at) for at in range(1, count + 1)])), GOOD) > 50


def test_the_legend_of_the_strip_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever outcomes there are: it is broken into rows."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(one: Figure, *where: Any, **how: Any) -> None:
        drawn.append(one)
        save(one, *where, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_strip(story(*[incident(at, one) for at, one in enumerate(OUTCOMES, 1)]))
    (legend,) = drawn[0].legends
    assert {words.get_text() for words in legend.get_texts()} == {*OUTCOMES.values()}
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawn[0].bbox.width
    assert 0 <= box.y0 < box.y1 < drawn[0].axes[0].get_window_extent().y0


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    """No state of pyplot, and no setting: it may draw in the process of a person's own program."""
    program = (
        "import sys, matplotlib\n"
        "from stories import incident, story\n"
        "from resilient_train.tracking.figure import draw_strip\n"
        "before = matplotlib.rcParams.copy()\n"
        "draw_strip(story(incident(3)))\n"
        "print('matplotlib.pyplot' in sys.modules)\n"  # to look at a setting would import it
        "print(dict.__eq__(matplotlib.rcParams, before))"
    )
    tests = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tests)
    assert ran.stdout.split() == ["False", "True"]
