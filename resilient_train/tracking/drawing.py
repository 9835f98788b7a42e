"""An incident drawn: loss and gradient norm around it, what was refused, the way back, the cure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from resilient_train.record.surroundings import Point
from resilient_train.tracking.sheet import (
    BAD,
    CURVE,
    FAINT,
    FOOT,
    GONE,
    GOOD,
    INK,
    MIDDLE,
    TINT,
    Words,
    explain,
    finished,
    furnish,
    name_ticks,
    new_sheet,
)
from resilient_train.tracking.story import Chapter
from resilient_train.types import Incident, Outcome
from resilient_train.wording import noticed, reached, remedies_of, rows_named, why_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from PIL.Image import Image

OUTCOMES = {
    None: "still open",
    Outcome.RECOVERED: "recovered",
    Outcome.RECURRED: "it came back later",
    Outcome.UNRECOVERED: "the loss did not come back",
    Outcome.GAVE_UP: "the run gave up",
}
_LOG_ABOVE = 30.0  # times the smallest value: then the axis is logarithmic
_AT_EITHER_SIDE = 0.16  # of the width, for words in the middle
_TIMES, _SPANS = 1e3, 12.0  # of the usual: what lies beyond is marked at the edge, or all else is one flat line


@dataclass(frozen=True, slots=True)
class _Way:
    """A rewind on the axis of ticks."""

    at: int  # the tick of the incident
    back: int  # of the update that the run went back to; where that is too long ago, before the first there is


def drawn(chapter: Chapter, points: Sequence[Point]) -> Image:
    """Draw an incident and what was measured around it."""
    incident, points = chapter.incident, sorted(points, key=lambda one: one.tick)
    way = _way_back(incident, points)
    figure, height = new_sheet(*_words(incident))
    top = height - (0.055 if way is not None else 0.02)
    above = figure.add_axes((0.1, MIDDLE, 0.86, top - MIDDLE))
    below = figure.add_axes((0.1, FOOT, 0.86, MIDDLE - FOOT - 0.035), sharex=above)
    _plot(above, "loss", points, [one.loss for one in points], incident, way)
    _plot(below, "gradient norm", points, [one.grad_norm for one in points], incident, way)
    above.tick_params(labelbottom=False)
    name_ticks(below)
    if way is not None:
        _arrow(above, incident, way)
    if not points:
        above.text(0.5, 0.5, "nothing was measured around it", transform=above.transAxes, ha="center", color=FAINT)
    explain(figure, _marks(way))
    return finished(figure)


def _words(incident: Incident) -> Sequence[Words]:
    """What the picture shows as a sentence; below it cause, cure and outcome."""
    anomaly, diagnosis = incident.anomaly, incident.diagnosis
    how = reached(anomaly) if anomaly.landed else ", refused"
    title = f"Incident {incident.id:,}, step {anomaly.step:,}: {noticed(anomaly, by_name=False)}{how}"
    cause = f"cause: {diagnosis.cause}"
    if (culprit := diagnosis.culprit) is not None:
        cause += f", {culprit.op} at {culprit.file.rsplit('/', 1)[-1]}:{culprit.line}"
    if diagnosis.rows:
        cause += f", {rows_named(diagnosis.rows)}"
    gave_up = incident.decision.gave_up is not None
    cure = f"gave up: {why_of(incident)}" if gave_up else f"cure: {remedies_of(incident) or 'nothing was done'}"
    ink = (
        {Outcome.RECOVERED: GOOD, Outcome.UNRECOVERED: BAD, Outcome.GAVE_UP: BAD}.get(incident.outcome, INK)
        if incident.outcome
        else INK
    )
    outcome = Words(f"outcome: {OUTCOMES[incident.outcome]}", is_bold=True, ink=ink)
    return Words(title, 2, is_title=True), Words(cause), Words(cure, 2), outcome


def _way_back(incident: Incident, points: Sequence[Point]) -> _Way | None:
    """Find the update that a rewind went back to: the last that made this step, or the rewind that led there before."""
    before = [one for one in points if one.tick <= incident.anomaly.tick]
    if incident.rewound_to is None or not before:
        return None
    later = before[-1]
    for one in reversed(before):
        if one.step <= incident.rewound_to or one.step > later.step:
            return _Way(incident.anomaly.tick, one.tick)
        later = one
    return _Way(incident.anomaly.tick, before[0].tick - 1)


def _plot(
    axes: Axes, name: str, points: Sequence[Point], values: Sequence[float], incident: Incident, way: _Way | None
) -> None:
    """Draw one curve: what was accepted as a line, what was refused as crosses, what has no place at the upper edge."""
    furnish(axes, name)
    axes.yaxis.set_label_coords(-0.075, 0.5)
    tick, top = incident.anomaly.tick, _scale(axes, values)
    if way is not None:
        axes.axvspan(way.back, way.at, color=TINT, linewidth=0, zorder=0.5)
    axes.axvline(tick, color=BAD, linewidth=1, linestyle=(0, (2, 2)), zorder=2)
    if incident.decision.actions:
        axes.axvline(tick + 0.5, color=GOOD, linewidth=1.8, zorder=2)
    ticks = [one.tick for one in points]
    is_in = [math.isfinite(value) and value <= top for value in values]
    undone = [way is not None and way.back < one.tick <= way.at for one in points]
    for colour, is_of in ((GONE, undone), (CURVE, [not one for one in undone])):
        line = [
            value if here and fits and one.accepted else math.nan
            for one, value, here, fits in zip(points, values, is_of, is_in, strict=True)
        ]
        axes.plot(ticks, line, "-", color=colour, linewidth=1.6, marker=".", markersize=4, zorder=3)
    crosses = [
        value if fits and not one.accepted else math.nan for one, value, fits in zip(points, values, is_in, strict=True)
    ]
    axes.plot(ticks, crosses, "x", color=BAD, markersize=7, markeredgewidth=2, zorder=4)
    _at_the_edge(
        axes, [(one.tick, value) for one, value, fits in zip(points, values, is_in, strict=True) if not fits], tick
    )


def _scale(axes: Axes, values: Sequence[float]) -> float:
    """Choose the axis for what fits on one, and return the largest of it."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 2:
        return math.inf
    low = finite[0]
    usual = quantiles(finite, n=20)[-1] if len(finite) > 20 else finite[len(finite) // 2]  # few: it may be all trouble
    far = usual * _TIMES if low > 0 else usual + _SPANS * (usual - low) if usual > low else math.inf
    top = max(value for value in finite if value <= far)
    if low > 0 and top / low > _LOG_ABOVE:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, top * (top / low) ** 0.15)
    else:
        height = top - low or abs(top) or 1.0
        axes.set_ylim(low - 0.08 * height, top + 0.18 * height)
    return top


def _at_the_edge(axes: Axes, beyond: Sequence[tuple[int, float]], at: int) -> None:
    """Mark what is not finite, or beyond all others, where it left the axis; what is nearest `at`, with its value."""
    if not beyond:
        return
    edge = axes.get_xaxis_transform()
    axes.plot(
        [tick for tick, _ in beyond], [0.96] * len(beyond), "^", color=BAD, markersize=8, transform=edge, zorder=5
    )
    tick, value = min(beyond, key=lambda one: abs(one[0] - at))
    first, last = axes.get_xlim()
    is_right = tick > last - 0.15 * (last - first)
    axes.annotate(
        f"{value:.3g}",
        (tick, 0.96),
        (-8 if is_right else 8, 0),
        xycoords=edge,
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        fontsize=9.5,
        color=BAD,
    )


def _arrow(axes: Axes, incident: Incident, way: _Way) -> None:
    """The way back above the curves, from the step that the run was at to the step that it went on from."""
    edge, height = axes.get_xaxis_transform(), 1.04
    style = {"arrowstyle": "-|>", "color": GOOD, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 15}
    axes.annotate("", (way.back, height), (way.at, height), xycoords=edge, textcoords=edge, arrowprops=style)
    first, last = axes.get_xlim()
    middle = ((way.back + way.at) / 2 - first) / (last - first)
    words = f"back from step {incident.anomaly.step:,} to {incident.rewound_to:,}"
    at = min(max(middle, _AT_EITHER_SIDE), 1 - _AT_EITHER_SIDE)
    axes.text(at, height + 0.02, words, transform=axes.transAxes, ha="center", va="bottom", fontsize=9.5, color=GOOD)


def _marks(way: _Way | None) -> list[Line2D]:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=CURVE, marker=".", label="accepted"),
        Line2D([], [], color=BAD, marker="x", label="refused", linestyle="none", markeredgewidth=2),
        Line2D([], [], color=BAD, marker="^", label="not finite, or far beyond", linestyle="none"),
        Line2D([], [], color=GOOD, label="cure"),
    ]
    if way is not None:
        marks.insert(1, Line2D([], [], color=GONE, marker=".", label="undone"))
    return marks
