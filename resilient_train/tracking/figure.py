"""The picture of a run: its incidents over its ticks."""

from __future__ import annotations

from typing import Any

from resilient_train.sentences import OUTCOMES
from resilient_train.tracking.review import by_cause
from resilient_train.tracking.story import Story
from resilient_train.types import Outcome

GOOD, BAD, SEEN, PASSED = "#2c7a4b", "#c22f1d", "#1f5fa8", "#a39d90"
_LOOKS = {  # mark, colour and filling of an incident
    Outcome.RECOVERED: ("o", GOOD, GOOD),
    Outcome.RECURRED: ("o", PASSED, PASSED),
    Outcome.UNRECOVERED: ("X", BAD, BAD),
    Outcome.GAVE_UP: ("X", BAD, BAD),
    Outcome.OBSERVED: ("o", SEEN, SEEN),
    None: ("o", BAD, "white"),
}
_WIDTH, _LANE, _BELOW = 5.2, 0.34, 0.62  # inches; a wider picture would push MLflow's page aside
_LEGEND_ROW, _LEGEND_COLUMNS = 0.2, 3  # inches


def draw_strip(story: Story) -> Any:
    """Draw the incidents of a run over its ticks, a lane for each cause, as a figure of matplotlib."""
    from matplotlib.figure import Figure  # without pyplot, whose state may be that of the process

    causes = by_cause(story.incidents)
    height = max(_BELOW + _LANE * (len(causes) + 0.5), 1.2)
    figure = Figure(figsize=(_WIDTH, height), dpi=85, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.grid(alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlim(0, 1.02 * max([story.tick, *(one.anomaly.tick for one in story.incidents), 1]))
    axes.set_xlabel("tick: attempted updates", fontsize=9)
    axes.set_yticks(range(len(causes)), [f"{cause}, {len(some):,}" for cause, some in causes.items()])
    axes.set_ylim(len(causes) - 0.4, -0.6)  # the most frequent on top
    for outcome, (mark, edge, fill) in _LOOKS.items():
        points = [
            (one.anomaly.tick, lane)
            for lane, some in enumerate(causes.values())
            for one in some
            if one.outcome is outcome
        ]
        if points:
            ticks, lanes = zip(*points, strict=True)
            axes.plot(ticks, lanes, mark, color=edge, mfc=fill, markersize=9, label=OUTCOMES[outcome])
    figure.legend(ncols=_LEGEND_COLUMNS, loc="outside lower left", frameon=False, fontsize=9)
    figure.set_figheight(height + _LEGEND_ROW * ((len(axes.lines) - 1) // _LEGEND_COLUMNS))
    return figure
