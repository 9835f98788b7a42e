"""The pictures of incidents show all that there is to see, in small files, and leave the state of matplotlib alone."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from stories import ROOT, chapter, incident, story, updates

from resilient_train.record.surroundings import Point
from resilient_train.tracking import figure
from resilient_train.tracking.figure import BAD, CURVE, GOOD, SHADE, UNDONE, draw_incident, draw_strip, undone_ticks
from resilient_train.tracking.story import Chapter
from resilient_train.types import Culprit, Outcome
from resilient_train.wording import OUTCOMES

MOST_BYTES = 100_000
PAPER = "#ffffff"
REFUSED = chapter(incident(1))  # at tick 161
REWOUND = chapter(incident(3))  # at tick 163, from step 153 to 125
NAN, INF = math.nan, math.inf


def colour(name: str) -> tuple[int, int, int]:
    return int(name[1:3], 16), int(name[3:5], 16), int(name[5:], 16)


def picture_of(chapter: Chapter, points: list[Point]) -> bytes:
    return draw_incident(replace(chapter, points=tuple(points)))


def pixels(png: bytes) -> Image.Image:
    assert png.startswith(b"\x89PNG")
    assert len(png) < MOST_BYTES
    return Image.open(io.BytesIO(png)).convert("RGB")


def amount(png: bytes, name: str, *, of_height: tuple[float, float] = (0, 1)) -> int:
    """How many pixels of a colour there are, in a part of the picture."""
    picture = pixels(png)
    top, bottom = (round(part * picture.height) for part in of_height)
    part = picture.crop((0, top, picture.width, bottom))
    counted = part.getcolors(part.width * part.height) or []
    return next((count for count, rgb in counted if rgb == colour(name)), 0)


def test_what_was_refused_is_marked() -> None:
    """A cross where the curve has a gap."""
    accepted, refused = picture_of(REFUSED, updates(161)), picture_of(REFUSED, updates(161, accepted=False))
    assert amount(refused, BAD) > amount(accepted, BAD)


@pytest.mark.parametrize("value", [NAN, INF, 1e38])
def test_what_has_no_place_on_the_axis_is_shown_at_its_edge(value: float) -> None:
    """Instead of vanishing, or of flattening all else; on both curves."""
    healthy, broken = (
        picture_of(REFUSED, updates(161)),
        picture_of(REFUSED, updates(161, loss=value, grad_norm=value)),
    )
    for half in ((0.1, 0.5), (0.5, 0.9)):
        assert amount(broken, BAD, of_height=half) > amount(healthy, BAD, of_height=half) + 20
        assert amount(broken, CURVE, of_height=half) > 0.9 * amount(healthy, CURVE, of_height=half)


def test_what_a_rewind_undid_is_shaded() -> None:
    """From the incident back to the update that the run resumed from."""
    there = picture_of(REWOUND, updates(163))
    without = picture_of(chapter(replace(REWOUND.incident, rewound_to=None)), updates(163))
    for name in (SHADE, UNDONE):
        assert amount(there, name) > 10 * amount(without, name)


def test_every_outcome_has_words_and_a_mark() -> None:
    """Green only what has recovered."""
    assert OUTCOMES.keys() == {None, *Outcome}
    marks = {one: amount(draw_strip(story(incident(5, one))), GOOD) for one in OUTCOMES}
    assert marks.pop(Outcome.RECOVERED) > 50
    assert set(marks.values()) == {0}


STEPS = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 2), (6, 3), (7, 4), (8, 4)]  # ticks and steps; a rewind behind tick 4


@pytest.mark.parametrize(
    ("at", "to", "back"),
    [
        (4, 2, 2),
        (4, 0, 0),  # longer ago than the points reach
        (7, 2, 5),
        (7, 1, 4),  # the rewind before had led there
        (8, 3, 6),
    ],
)
def test_the_way_back_ends_at_the_last_update_that_made_the_step(at: int, to: int, back: int) -> None:
    """A step may have been made more than once: what counts is the way that the run was on."""
    points = [Point(tick, step, 1.0, 1.0, tick != 8) for tick, step in STEPS]
    one = incident(3, rewound_to=to)
    assert undone_ticks(replace(one, anomaly=replace(one.anomaly, tick=at)), points) == (back, at)


@pytest.mark.parametrize(
    "points",
    [
        [],
        updates(163, 1),
        [Point(163, 153, NAN, NAN, False)],
        [Point(tick, 0, 0.0, 0.0, True) for tick in range(5)],
        [Point(tick, tick, -tick, INF, tick % 2 == 0) for tick in range(150, 170)],
        [Point(tick, tick, 10.0 ** (tick - 160), 10.0 ** (3 * tick - 480), True) for tick in range(150, 170)],
        updates(163, 3_000),
    ],
    ids=["none", "two", "only a NaN", "all zero", "negative", "explosion", "many"],
)
def test_any_numbers_make_a_picture(points: list[Point]) -> None:
    """Nothing in them is a reason to have none."""
    assert amount(picture_of(REWOUND, points), PAPER) > 100_000


def test_any_words_make_a_picture() -> None:
    """They are no mathematics, and letters that the font lacks are no reason for a warning."""
    words = "$x^$ \\frac \n \u4e2d\u6587 \U0001f525 " + "w" * 500
    strange = replace(ROOT, culprit=Culprit("forward", words, words, f"/{words}", 3))
    assert amount(picture_of(chapter(incident(1, diagnosis=strange)), updates(161)), CURVE) > 100


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
    png = figure._png

    def keep(one: Figure) -> bytes:
        drawn.append(one)
        return png(one)

    monkeypatch.setattr(figure, "_png", keep)
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
        "from stories import chapter, incident, updates\n"
        "from resilient_train.tracking.figure import draw_incident\n"
        "before = matplotlib.rcParams.copy()\n"
        "draw_incident(chapter(incident(3)))\n"
        "print('matplotlib.pyplot' in sys.modules)\n"  # to look at a setting would import it
        "print(dict.__eq__(matplotlib.rcParams, before))"
    )
    tests = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tests)
    assert ran.stdout.split() == ["False", "True"]
