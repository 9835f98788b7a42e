"""The incidents of a run for the terminal and the report file, and its description in MLflow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from resilient_train.record.run_history import Chapter
from resilient_train.secrets import masked
from resilient_train.sentences import NOTE, OUTCOMES, ROW
from resilient_train.tracking.story import Story, by_cause, left, next_start, review, shortened, things_to_do, verdict
from resilient_train.types import Outcome, fact
from resilient_train.wording import about, blamed, fill, lines_of, printable, say

_DOTS = "..."
_MARKS = {one: f"\\{one}" for one in "*_[]~"} | {one: f"&#{ord(one)};" for one in "&<>|\\@$¨"} | {"`": ""}
_GAP = "&ensp; | "

REPORT = "report.txt"  # its name among the artifacts
LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_TO_DO, _LONGEST_TO_DO = 3, 300  # things, and characters of each
_MOST_LEFT, _MOST_INCIDENTS, _MOST_ROWS = 260, 200, 80  # characters of a line; incidents in the report, in a note

PageUrl = Callable[[int], str]  # the page of an incident, by its number


def block(chapter: Chapter) -> list[str]:
    """Describe an incident in lines: as it was printed when it was met, with its times; the last one is its outcome."""
    return lines_of(chapter.incident, "block", opened=chapter.opened_ms, **_meanwhile(chapter))


def _meanwhile(chapter: Chapter) -> dict[str, Any]:
    """What is said of remedies that are not applied yet."""
    is_open = chapter.treated_ms is None and chapter.incident.outcome is None
    return {"remedies": fact("being_handled")} if is_open else {}


def report(story: Story) -> str:
    """Return the full report: the review of the run, and its newest incidents as the terminal shows them."""
    lines = [str(story.directory), "", *review(story, str)]
    newest = story.chapters[-_MOST_INCIDENTS:]
    if older := len(story.chapters) - len(newest):
        lines += ["", say(fact("older", count=older))]
    for chapter in newest:
        lines += ["", *block(chapter)]
    return "\n".join(printable(masked(line)) for line in lines) + "\n"


def note(story: Story, trace_url: PageUrl, strip_url: str = "") -> str:
    """Return the description in MLflow, with as many of the newest incidents as fit below its limit."""
    words, sentences = verdict(story)
    things = [text(one, _LONGEST_TO_DO) for one in shortened(things_to_do(story), _MOST_TO_DO, "and_more")]
    rows = [f"| {_GAP.join(_row(chapter, trace_url))} |" for chapter in story.chapters[:-_MOST_ROWS:-1]]
    values = {
        "headline": text(words, 300),
        "things": things,
        "calm": story.chapters and not things,
        "details": text(sentences, 900),
        "strip": strip_url if story.chapters else "",
        "titles": _GAP.join(ROW) if story.chapters else "",
        "rule": "|---" * len(ROW),
        "left": "".join(say(fact("left", label=label, what=text(one, _MOST_LEFT))) for label, one in left(story, str)),
        "next": text(say(next_start(story)), _MOST_LEFT),
        "report": REPORT,
    }
    while True:
        older = len(story.chapters) - len(rows)
        if len(whole := fill(NOTE, values | {"rows": "\n".join(rows), "older": older})) <= LIMIT:
            return whole
        rows.pop()


def _row(chapter: Chapter, trace_url: PageUrl) -> list[str]:
    """Return one incident as cells of no more than 200 characters, without their addresses."""
    incident, culprit = chapter.incident, chapter.incident.diagnosis.culprit
    short = {"file": "/".join(culprit.file.split("/")[-2:]), "module": "", "phase": ""} if culprit else {}
    values = about(incident) | {"opened": chapter.opened_ms, "where": blamed(incident.diagnosis, **short)}
    values |= _meanwhile(chapter)
    cells = {title: text(fill(template, values), 200) for title, template in ROW.items()}
    if chapter.closed_ms is not None:
        cells["#"] = f"[{cells['#']}]({trace_url(incident.id)})"
    if incident.outcome is not Outcome.RECOVERED:
        cells["outcome"] = f"**{cells['outcome']}**"
    return [*cells.values()]


def text(raw: str, most: int) -> str:
    """Show words as they are, in at most `most` characters of markdown. Never at the start of a line."""
    marks = [_MARKS.get(one, one) for one in printable(" ".join(raw.split()))]
    ends = list(accumulate(map(len, marks)))
    if ends and ends[-1] > most:
        marks = [*marks[: sum(end <= most - len(_DOTS) for end in ends)], _DOTS]
    return "".join(marks)


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
    for outcome, (mark, edge, inside) in _LOOKS.items():
        points = [
            (one.anomaly.tick, lane)
            for lane, some in enumerate(causes.values())
            for one in some
            if one.outcome is outcome
        ]
        if points:
            ticks, lanes = zip(*points, strict=True)
            axes.plot(ticks, lanes, mark, color=edge, mfc=inside, markersize=9, label=OUTCOMES[outcome])
    figure.legend(ncols=_LEGEND_COLUMNS, loc="outside lower left", frameon=False, fontsize=9)
    figure.set_figheight(height + _LEGEND_ROW * ((len(axes.lines) - 1) // _LEGEND_COLUMNS))
    return figure
