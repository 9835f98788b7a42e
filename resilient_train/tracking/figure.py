"""The pictures: an incident with the loss and the gradient norm around it, and all incidents of a run in one strip."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from resilient_train.record.surroundings import Point
from resilient_train.tracking.report import IncidentView
from resilient_train.tracking.review import by_cause
from resilient_train.tracking.story import Chapter, Story
from resilient_train.types import Incident, Outcome
from resilient_train.wording import OUTCOMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD, BAD, CURVE, UNDONE, SHADE = "#2c7a4b", "#c22f1d", "#1f5fa8", "#a39d90", "#f6e5df"
_LOOKS = {  # mark, colour and filling of an incident in the strip
    Outcome.RECOVERED: ("o", GOOD, GOOD),
    Outcome.RECURRED: ("o", UNDONE, UNDONE),
    Outcome.UNRECOVERED: ("X", BAD, BAD),
    Outcome.GAVE_UP: ("X", BAD, BAD),
    Outcome.OBSERVED: ("o", CURVE, CURVE),
    None: ("o", BAD, "white"),
}
_TICKS = "tick: attempted updates"
_LOG_ABOVE = 30.0  # times the smallest value: then the axis is logarithmic
_TIMES, _SPANS = 1e3, 12.0  # of the usual: larger values are marked at the edge, or all else is one flat line
_STRIP_WIDTH, _LANE, _BELOW = 5.2, 0.34, 0.62  # inches; a wider strip would push MLflow's page aside
_LEGEND_ROW = 0.2  # inches


def draw_incident(chapter: Chapter) -> bytes:
    """Draw what was measured around an incident, as a PNG: accepted, refused, undone, and where the remedy acted."""
    incident, points = chapter.incident, sorted(chapter.points, key=lambda one: one.tick)
    undone = undone_ticks(incident, points)
    figure = _new_figure(7.6, 7.4)
    above, below = figure.subplots(2, sharex=True)
    _plot(above, "loss", points, [one.loss for one in points], incident, undone)
    _plot(below, "gradient norm", points, [one.grad_norm for one in points], incident, undone)
    if not points:
        above.text(0.5, 0.5, "nothing was measured around it", transform=above.transAxes, ha="center")
    below.set_xlabel(_TICKS)
    view = IncidentView.of(chapter)
    cause = ", ".join(filter(None, (f"cause: {view.cause}", view.culprit, view.rows)))
    title = f"Incident {incident.id:,}, step {incident.anomaly.step:,}: {view.noticed}{view.drill}"
    lines = [*_wrapped(title), *_wrapped(cause), *_wrapped(f"remedy: {view.remedy}"), f"outcome: {view.outcome}"]
    # File names come from anywhere: a dollar in one is no mathematics.
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=9, parse_math=False)
    _add_legend(figure, above, 5)
    return _png(figure)


def draw_strip(story: Story) -> bytes:
    """Draw the incidents of a run over its ticks, a lane for each cause, as a PNG."""
    causes = by_cause(story.incidents)
    height = _BELOW + _LANE * (len(causes) + 0.5)
    end = 1.02 * max([story.tick, *(one.anomaly.tick for one in story.incidents), 1])
    figure = _new_figure(_STRIP_WIDTH, max(height, 1.2))
    axes = figure.subplots()
    _furnish(axes)
    axes.set_xlim(0, end)
    axes.set_xlabel(_TICKS, fontsize=9)
    axes.set_yticks(range(len(causes)), [f"{cause}, {len(some):,}" for cause, some in causes.items()])
    axes.set_ylim(len(causes) - 0.4, -0.6)  # the most frequent on top
    for lane, some in enumerate(causes.values()):
        for outcome, (mark, edge, fill) in _LOOKS.items():
            if ticks := [one.anomaly.tick for one in some if one.outcome is outcome]:
                name = OUTCOMES[outcome]
                axes.plot(ticks, [lane] * len(ticks), mark, color=edge, markerfacecolor=fill, markersize=9, label=name)
    _add_legend(figure, axes, 3)
    return _png(figure)


def undone_ticks(incident: Incident, points: Sequence[Point]) -> tuple[int, int] | None:
    """Return the ticks (first, last] that a rewind undid; None without a rewind.

    A step may have been made more than once. What counts is the last update that made the step, or the rewind that led
    there before; all points, if that is longer ago than they reach.
    """
    before = [one for one in points if one.tick <= incident.anomaly.tick]
    if incident.rewound_to is None or not before:
        return None
    later = before[-1]
    for one in reversed(before):
        if one.step <= incident.rewound_to or one.step > later.step:
            return one.tick, incident.anomaly.tick
        later = one
    return before[0].tick - 1, incident.anomaly.tick


def _plot(
    axes: Axes,
    name: str,
    points: Sequence[Point],
    values: Sequence[float],
    incident: Incident,
    undone: tuple[int, int] | None,
) -> None:
    """Draw one curve: accepted values as a line, refused ones as crosses, what does not fit at the upper edge."""
    _furnish(axes)
    axes.set_ylabel(name)
    tick, top = incident.anomaly.tick, _scale(axes, values)
    first, last = undone or (tick, tick)
    if undone is not None:
        axes.axvspan(first, last, color=SHADE, linewidth=0, zorder=0.5)
        words = f" back to step {incident.rewound_to:,}"
        axes.text(first, 0.02, words, transform=axes.get_xaxis_transform(), fontsize=9)
    axes.axvline(tick, color=BAD, linewidth=1, linestyle="--")
    if incident.decision.actions:
        axes.axvline(tick + 0.5, color=GOOD, linewidth=1.8, label="remedy")
    ticks = [one.tick for one in points]
    fits = [math.isfinite(value) and value <= top for value in values]
    is_undone = [first < one.tick <= last for one in points]
    curves = (
        (".-", CURVE, "accepted", [one.accepted and not gone for one, gone in zip(points, is_undone, strict=True)]),
        (".-", UNDONE, "undone", [one.accepted and gone for one, gone in zip(points, is_undone, strict=True)]),
        ("x", BAD, "refused", [not one.accepted for one in points]),
    )
    for style, colour, label, chosen in curves:
        shown = [value if fit and one else math.nan for value, fit, one in zip(values, fits, chosen, strict=True)]
        if any(chosen):
            axes.plot(ticks, shown, style, color=colour, label=label, markersize=4)
    beyond = [(at, value) for at, value, fit in zip(ticks, values, fits, strict=True) if not fit]
    if beyond:
        edge = axes.get_xaxis_transform()
        marks: dict[str, Any] = {"color": BAD, "markersize": 9, "label": "not finite, or far beyond"}
        axes.plot([at for at, _ in beyond], [0.96] * len(beyond), "^", transform=edge, **marks)
        at, value = min(beyond, key=lambda one: abs(one[0] - tick))
        axes.annotate(f"{value:.3g}", (at, 0.96), (6, -10), xycoords=edge, textcoords="offset points", color=BAD)


def _scale(axes: Axes, values: Sequence[float]) -> float:
    """Choose the axis for what fits on one, and return the largest of it."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 2:
        return math.inf
    low = finite[0]
    usual = quantiles(finite, n=20)[-1] if len(finite) > 20 else finite[len(finite) // 2]  # few may all be anomalies
    far = usual * _TIMES if low > 0 else usual + _SPANS * (usual - low) if usual > low else math.inf
    top = max(value for value in finite if value <= far)
    if low > 0 and top / low > _LOG_ABOVE:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, top * (top / low) ** 0.15)
    else:
        height = top - low or abs(top) or 1.0
        axes.set_ylim(low - 0.08 * height, top + 0.18 * height)
    return top


def _new_figure(width: float, height: float) -> Figure:
    """Begin a figure without pyplot, whose state may be that of the process."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=85, layout="constrained", facecolor="white")


def _furnish(axes: Axes) -> None:
    axes.grid(alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)


def _add_legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, ncols=columns, loc="outside lower left", frameon=False, fontsize=9)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * ((len(unique) - 1) // columns))


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # the same bytes for the same incident
    return file.getvalue()


def _wrapped(words: str) -> list[str]:
    """Break a sentence into lines; letters that the font lacks become question marks."""
    known = "".join(one if one.isprintable() and ord(one) < 0x250 else "?" for one in " ".join(words.split()))
    return textwrap.wrap(known, 92, max_lines=3, placeholder=" ...")
