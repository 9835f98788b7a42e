"""A picture of each incident: loss and gradient norm around it, what was refused, the way back, the cure."""

from __future__ import annotations

import io
import math
import tempfile
import textwrap
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Protocol

from resilient_train.events import Incident, Outcome
from resilient_train.record.story import Chapter
from resilient_train.record.telling import noticed, reached, remedies_of, rows_named, why_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from PIL.Image import Image

KEY = "incidents"  # the chart among MLflow's, with a slider over the ticks of the incidents

_WIDTH, _HEIGHT, _DPI = 7.6, 6.0, 115  # inches: MLflow shows it in a square, rather small until it is clicked
# A sheet of its own, with an edge: MLflow's pages are white or nearly black, and the picture is on either.
_SHEET, _EDGE, _INK, _FAINT, _LINE = "#fcfbf7", "#b9b5aa", "#2b2a27", "#77726a", "#dedad0"
_ACCEPTED, _REFUSED, _CURE, _UNDONE = "#1f5fa8", "#c22f1d", "#2c7a4b", "#a39d90"
_OUTCOMES = {
    None: "still open",
    Outcome.RECOVERED: "recovered",
    Outcome.RECURRED: "it came back later",
    Outcome.GAVE_UP: "the run gave up",
}
_FOOT = 0.145  # of the height
_LOG_ABOVE = 30.0  # times the smallest value: then the axis is logarithmic
_DECADES, _SPANS = 3.0, 12.0  # above the usual: what lies beyond is marked at the edge, or all else is one flat line
_COLOURS = 96  # of the file: flat colours and thin lines need no more


class Point(Protocol):
    """An update as it was measured."""

    @property
    def tick(self) -> int:
        """Attempted updates: this never goes back."""

    @property
    def step(self) -> int:
        """Accepted updates, this one included if it was."""

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def accepted(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Way:
    """A rewind on the axis of ticks."""

    at: int  # the tick of the incident
    back: int  # of the update that the run went back to; the first there is, where that is too long ago


def draw(chapter: Chapter, points: Sequence[Point]) -> bytes:
    """Draw an incident and what was measured around it, as a PNG."""
    file = io.BytesIO()
    _drawn(chapter, points).save(file, "PNG", optimize=True)
    return file.getvalue()


def show_picture(client: MlflowClient, run_id: str, chapter: Chapter, points: Sequence[Point]) -> None:
    """Put the picture of an incident among the charts of a run, in the place of an earlier one.

    The names are those that `log_image` gives, but for what would differ from time to time: the same incident has the
    same names for ever. What the charts show is the second file; the first is what a click opens.
    """
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_IMAGES

    picture, name = _drawn(chapter, points), _file_name(run_id, chapter)
    with tempfile.TemporaryDirectory() as folder:
        large, shown = Path(folder) / f"{name}.png", Path(folder) / f"{name}+compressed.webp"
        picture.save(large, "PNG", optimize=True)
        picture.convert("RGB").save(shown, "WEBP", quality=75)
        for file in (large, shown):
            client.log_artifact(run_id, str(file), "images")
    client.set_tag(run_id, MLFLOW_LOGGED_IMAGES, "True")


def _file_name(run_id: str, chapter: Chapter) -> str:
    """What the charts read from it: key, step and time; behind a proxy `%` in the place of `+` would be decoded."""
    number = chapter.incident.id
    fixed = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} incident {number}")
    # Two incidents at one tick would hide each other: of a step the charts show the file that they read last.
    return f"{KEY}+step+{chapter.incident.anomaly.tick}+timestamp+{chapter.opened_ms}+{fixed}"


# -------------------------------------------------------------------------------------------------------- the drawing


def _drawn(chapter: Chapter, points: Sequence[Point]) -> Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    incident, points = chapter.incident, sorted(points, key=lambda one: one.tick)
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, facecolor=_SHEET, edgecolor=_EDGE, linewidth=3)
    canvas = FigureCanvasAgg(figure)
    way = _way_back(incident, points)
    room = _write(figure, incident) - _FOOT - (0.065 if way is not None else 0.02)
    above = figure.add_axes((0.1, _FOOT + 0.37 * room, 0.86, 0.63 * room))
    below = figure.add_axes((0.1, _FOOT, 0.86, 0.32 * room), sharex=above)
    _plot(above, "loss", points, [one.loss for one in points], incident, way)
    _plot(below, "gradient norm", points, [one.grad_norm for one in points], incident, way)
    above.tick_params(labelbottom=False)
    below.set_xlabel("tick: attempted updates", color=_FAINT, fontsize=9.5, loc="right", labelpad=1)
    if way is not None:
        _arrow(above, incident, way)
    _explain(figure, points, way)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = bytes(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    whole = Image.frombytes("RGBA", canvas.get_width_height(), pixels)
    return whole.convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def _way_back(incident: Incident, points: Sequence[Point]) -> _Way | None:
    """Where the update lies that a rewind went back to: the last that was accepted as that step before the incident."""
    if incident.rewound_to is None or not points:
        return None
    tick = incident.anomaly.tick
    back = [one.tick for one in points if one.accepted and one.step <= incident.rewound_to and one.tick <= tick]
    return _Way(tick, max(back, default=points[0].tick))


def _write(figure: Figure, incident: Incident) -> float:
    """Say in a sentence what the picture shows, below it cause, cure and outcome; return the height where that ends."""
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
    colour = _CURE if incident.outcome is Outcome.RECOVERED else _REFUSED if gave_up else _INK
    lines = [(one, 12.5, "bold", _INK) for one in _wrapped(title, 73, 2)]
    lines += [(one, 10.5, "normal", _INK) for one in _wrapped(cause, 98, 1)]
    lines += [(one, 10.5, "normal", _INK) for one in _wrapped(cure, 98, 2)]
    lines.append((f"outcome: {_OUTCOMES[incident.outcome]}", 10.5, "bold", colour))
    height = 0.965
    for words, size, weight, ink in lines:
        figure.text(
            0.03, height, words, fontsize=size, fontweight=weight, color=ink, va="top", parse_math=False, usetex=False
        )
        height -= size / 72 / _HEIGHT * 1.3
    return height


def _wrapped(words: str, width: int, lines: int) -> list[str]:
    """Break a sentence into lines; letters that the font has not become question marks."""
    known = "".join(one if one.isprintable() and ord(one) < 0x250 else "?" for one in words)
    return textwrap.wrap(known, width, max_lines=lines, placeholder=" ...")


def _plot(
    axes: Axes, name: str, points: Sequence[Point], values: Sequence[float], incident: Incident, way: _Way | None
) -> None:
    """Draw one curve: what was accepted as a line, what was refused as crosses, what has no place at the upper edge."""
    _furnish(axes, name)
    tick, top = incident.anomaly.tick, _scale(axes, values)
    if way is not None:
        axes.axvspan(way.back, way.at, color=_REFUSED, alpha=0.07, linewidth=0, zorder=1)
    axes.axvline(tick, color=_REFUSED, linewidth=1, linestyle=(0, (2, 2)), zorder=2)
    if incident.decision.actions:
        axes.axvline(tick + 0.5, color=_CURE, linewidth=1.8, zorder=2)
    ticks = [one.tick for one in points]
    is_in = [math.isfinite(value) and value <= top for value in values]
    undone = [way is not None and way.back < one.tick <= way.at for one in points]
    for colour, is_of in ((_UNDONE, undone), (_ACCEPTED, [not one for one in undone])):
        line = [
            value if here and fits and one.accepted else math.nan
            for one, value, here, fits in zip(points, values, is_of, is_in, strict=True)
        ]
        axes.plot(ticks, line, "-", color=colour, linewidth=1.6, marker=".", markersize=4, zorder=3)
    crosses = [
        value if fits and not one.accepted else math.nan for one, value, fits in zip(points, values, is_in, strict=True)
    ]
    axes.plot(ticks, crosses, "x", color=_REFUSED, markersize=7, markeredgewidth=2, zorder=4)
    _at_the_edge(axes, [(one.tick, value) for one, value, fits in zip(points, values, is_in, strict=True) if not fits])


def _furnish(axes: Axes, name: str) -> None:
    axes.set_facecolor(_SHEET)
    axes.grid(True, color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_FAINT, labelsize=9.5, length=3)
    axes.set_ylabel(name, fontsize=10, color=_FAINT)
    axes.yaxis.set_label_coords(-0.075, 0.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_EDGE)
    axes.locator_params(axis="x", integer=True)


def _scale(axes: Axes, values: Sequence[float]) -> float:
    """Choose the axis, and return the largest value that has a place on it."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 2:
        return math.inf
    low, high = finite[0], finite[-1]
    usual = quantiles(finite, n=20)[-1] if len(finite) > 20 else finite[len(finite) // 2]  # at the end nothing is usual
    if low > 0 and high / low > _LOG_ABOVE:
        top = min(high, usual * 10**_DECADES)
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, top * (top / low) ** 0.15)
        return top
    top = min(high, usual + _SPANS * (usual - low)) if usual > low else high
    axes.set_ylim(low - 0.08 * (top - low or 1), top + 0.18 * (top - low or 1))
    return top


def _at_the_edge(axes: Axes, beyond: Sequence[tuple[int, float]]) -> None:
    """Mark what is not finite, or beyond all others, where it left the axis; the first of it with its value."""
    if not beyond:
        return
    edge = axes.get_xaxis_transform()
    ticks = [tick for tick, _ in beyond]
    axes.plot(ticks, [0.96] * len(ticks), "^", color=_REFUSED, markersize=8, transform=edge, zorder=5)
    tick, value = beyond[0]
    axes.annotate(
        f"{value:.3g}" + (f", and {len(beyond) - 1:,} more" if len(beyond) > 1 else ""),
        (tick, 0.96),
        (-7, 0),
        xycoords=edge,
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9.5,
        color=_REFUSED,
    )


def _arrow(axes: Axes, incident: Incident, way: _Way) -> None:
    """The way back above the curves, from the step that the run was at to the step that it went on from."""
    edge, height = axes.get_xaxis_transform(), 1.07
    style = {"arrowstyle": "-|>", "color": _CURE, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 15}
    axes.annotate("", (way.back, height), (way.at, height), xycoords=edge, textcoords=edge, arrowprops=style)
    is_right = way.at > sum(axes.get_xlim()) / 2  # of the middle
    axes.annotate(
        f"back from step {incident.anomaly.step:,} to {incident.rewound_to:,}",
        (way.back if is_right else way.at, height),
        (-7 if is_right else 7, 0),
        xycoords=edge,
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        fontsize=9.5,
        color=_CURE,
    )


def _explain(figure: Figure, points: Sequence[Point], way: _Way | None) -> None:
    """Name the marks, below all of it."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=_ACCEPTED, marker=".", label="accepted"),
        Line2D([], [], color=_REFUSED, marker="x", label="refused", linestyle="none", markeredgewidth=2),
        Line2D([], [], color=_REFUSED, marker="^", label="not finite, or far beyond", linestyle="none"),
        Line2D([], [], color=_CURE, label="cure"),
    ]
    if way is not None:
        lines.insert(1, Line2D([], [], color=_UNDONE, marker=".", label="undone"))
    legend = figure.legend(
        handles=lines,
        loc="lower left",
        bbox_to_anchor=(0.02, 0.008),
        ncols=len(lines),
        frameon=False,
        fontsize=9.5,
        columnspacing=1.4,
        handlelength=1.4,
    )
    for words in legend.get_texts():
        words.set_color(_FAINT)
    if not points:
        figure.text(0.5, 0.45, "nothing was measured around it", ha="center", fontsize=11, color=_FAINT)
