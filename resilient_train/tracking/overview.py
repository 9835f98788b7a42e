"""All incidents of a run in one picture: when, of what cause, what became of them, what each cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from resilient_train.tracking.review import by_cause, verdict
from resilient_train.tracking.sheet import (
    BAD,
    FOOT,
    GONE,
    GOOD,
    INK,
    MIDDLE,
    PAPER,
    Words,
    explain,
    finished,
    furnish,
    name_ticks,
    new_sheet,
)
from resilient_train.tracking.story import Story
from resilient_train.types import Incident, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from PIL.Image import Image

_NUMBER: dict[str, Any] = {"ha": "center", "fontsize": 9.5, "color": INK}
# mark, colour and filling of an incident
_LOOKS = {
    Outcome.RECOVERED: ("o", GOOD, GOOD),
    Outcome.RECURRED: ("o", GONE, GONE),
    Outcome.UNRECOVERED: ("X", BAD, BAD),
    Outcome.GAVE_UP: ("X", BAD, BAD),
    None: ("o", BAD, PAPER),
}
_NAMES = {
    Outcome.RECOVERED: "recovered",
    Outcome.RECURRED: "came back",
    Outcome.UNRECOVERED: "unrecovered",
    Outcome.GAVE_UP: "gave up",
    None: "open",
}
_STRIP, _LANE, _BELOW = 5.2, 0.34, 0.62  # inches: how wide a strip is, how high a lane, and what stands below
_DIGIT = 0.025  # of the width, that a digit of a number takes, and the space to another number


def overview(story: Story) -> Image:
    """Draw the incidents of a run over its ticks: a lane for each cause, below it the steps that each has cost."""
    incidents = story.incidents
    words, sentences = verdict(story)
    hint = "the slider goes from incident to incident" if incidents else ""
    figure, height = new_sheet(
        Words(f"{story.directory.name}: {words.lower()}", 2, is_title=True), Words(sentences, 3), Words(hint, ink=GONE)
    )
    above = figure.add_axes((0.16, MIDDLE, 0.8, height - 0.03 - MIDDLE))
    below = figure.add_axes((0.16, FOOT, 0.8, MIDDLE - FOOT - 0.035), sharex=above)
    _lanes(above, incidents, _end(story))
    furnish(below, "steps lost")
    below.vlines(
        [one.anomaly.tick for one in incidents], 0, [one.steps_lost for one in incidents], colors=INK, linewidth=1.6
    )
    below.set_ylim(bottom=0)
    above.tick_params(labelbottom=False)
    name_ticks(below)
    explain(figure, _marks(incidents))
    return finished(figure)


def strip(story: Story) -> Image:
    """Draw the lanes alone, as low as they are: the words stand beside it."""
    height = _BELOW + _LANE * (len(by_cause(story.incidents)) + 0.5)
    figure, _ = new_sheet(inches=(_STRIP, height))
    axes = figure.add_axes((0.23, _BELOW / height, 0.74, 1 - (_BELOW + 0.15) / height))
    _lanes(axes, story.incidents, _end(story))
    name_ticks(axes)
    explain(figure, _marks(story.incidents))
    return finished(figure)


def _end(story: Story) -> float:
    """How far the axis of ticks goes."""
    return max([story.tick, *(one.anomaly.tick for one in story.incidents), 1]) * 1.02


def _lanes(axes: Axes, incidents: Sequence[Incident], end: float) -> None:
    furnish(axes, "")
    axes.set_xlim(0, end)
    causes = by_cause(incidents)
    axes.set_yticks(range(len(causes)), [f"{cause}, {len(some):,}" for cause, some in causes.items()])
    axes.set_ylim(len(causes) - 0.4, -0.6)  # the most frequent on top
    for lane, some in enumerate(causes.values()):
        for outcome, (mark, edge, fill) in _LOOKS.items():
            ticks = [one.anomaly.tick for one in some if one.outcome is outcome]
            axes.plot(ticks, [lane] * len(ticks), mark, color=edge, markerfacecolor=fill, markersize=9, zorder=3)
        last = -end
        for one in some:
            if (tick := one.anomaly.tick) - last > _DIGIT * (1 + len(str(one.id))) * end:
                axes.annotate(f"{one.id}", (tick, lane), (0, 9), textcoords="offset points", **_NUMBER)
                last = tick


def _marks(incidents: Sequence[Incident]) -> list[Line2D]:
    """One mark for each outcome that there is."""
    from matplotlib.lines import Line2D

    there = {one.outcome for one in incidents}
    return [
        Line2D([], [], linestyle="none", marker=mark, color=edge, markerfacecolor=fill, markersize=8, label=_NAMES[one])
        for one, (mark, edge, fill) in _LOOKS.items()
        if one in there
    ]
