"""The incidents of a run for the terminal and the report file, and its description in MLflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import accumulate

from resilient_train.record.run_history import Chapter
from resilient_train.secrets import masked
from resilient_train.sentences import OUTCOMES
from resilient_train.tracking.review import left, next_start, review, shortened, things_to_do, verdict
from resilient_train.tracking.story import Story
from resilient_train.types import Outcome
from resilient_train.wording import (
    counted,
    describe,
    describe_cost,
    describe_culprit,
    drill_suffix,
    noticed,
    outcome_of,
    printable,
    reached_suffix,
    remedies_of,
    rows_named,
    why_of,
)

_DOTS = "..."
_MARKS = {one: f"\\{one}" for one in "*_[]~"} | {one: f"&#{ord(one)};" for one in "&<>|\\@$¨"} | {"`": ""}
_GAP = "&ensp; | "
_ABOUT_OLDER = 60  # characters

REPORT = "report.txt"  # its name among the artifacts
LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_TO_DO, _LONGEST_TO_DO = 3, 300  # things, and characters of each
_MOST_LEFT, _MOST_INCIDENTS = 260, 200  # characters of a line, and incidents in the report
_TITLES = ("#", "when", "step", "what", "cause", "remedy", "outcome", "cost")

PageUrl = Callable[[int], str]  # the page of an incident, by its number


# ------------------------------------------------------------------------------------- incidents, for terminal and file


def block(chapter: Chapter) -> list[str]:
    """Describe an incident in lines: as it was printed when it was met, with its times; the last one is its outcome."""
    incident, diagnosis = chapter.incident, chapter.incident.diagnosis
    first, *lines = describe(incident).split("\n")
    at = f"  at {_time(chapter.opened_ms, '%Y-%m-%d %H:%M:%S')}, tick {incident.anomaly.tick:,}"
    if (symptom := diagnosis.symptom) is not None:
        lines.append(f"  what broke of it: {describe_culprit(symptom)}")
    for culprit in filter(None, (diagnosis.culprit, symptom)):
        lines += [f"  {culprit.op} got {', '.join(f'{k} {v}' for k, v in one.items())}" for one in culprit.inputs]
    return [first.removeprefix("! "), at, *lines, f"  outcome: {outcome_of(incident)}"]


def _time(ms: int, form: str) -> str:
    return datetime.fromtimestamp(ms / 1000).strftime(form)


def report(story: Story) -> str:
    """Return the full report: the review of the run, and its newest incidents as the terminal shows them."""
    lines = [str(story.directory), "", *review(story, str)]
    newest = story.chapters[-_MOST_INCIDENTS:]
    if older := len(story.chapters) - len(newest):
        lines += ["", f"{counted(older, 'incident')} before these"]
    for chapter in newest:
        lines += ["", *block(chapter)]
    return "\n".join(printable(masked(line)) for line in lines) + "\n"


# ------------------------------------------------------------------------------------------------------ note, in MLflow


def note(story: Story, trace_url: PageUrl, strip_url: str = "") -> str:
    """Return the description, below MLflow's limit; its first lines are all that the page shows at first."""
    parts, ending = [_verdict(story)], _left(story)
    if story.chapters and strip_url:
        parts.append(f"![The incidents of the run, by cause, over its ticks]({strip_url})")
    if story.chapters:
        room = LIMIT - sum(len(part) + 2 for part in (*parts, ending))
        parts.append(_newest(story, trace_url, room))
    return "\n\n".join([*parts, ending]) + "\n"


def _verdict(story: Story) -> str:
    """Say the verdict, whether there was a drill and what to do in the first two lines, then what explains it."""
    words, sentences = verdict(story)
    things = shortened(things_to_do(story), _MOST_TO_DO, "And {:,} more.")
    things = [text(one, _LONGEST_TO_DO) for one in things]
    do = " Nothing to change." if story.incidents else ""
    if things:
        do = f" **Do:** {' '.join(one if one.endswith(('.', ')')) else f'{one}.' for one in things)}"
    return f"**{text(words, 300)}.**{do} {text(sentences[:1].upper() + sentences[1:], 900)}"


def _left(story: Story) -> str:
    lines = [f"**{label.capitalize()}**: {text(words, _MOST_LEFT)}" for label, words in left(story, str)]
    lines.append(f"**The same command** {text(next_start(story), _MOST_LEFT)}.")
    if story.chapters:
        lines.append(f"**Full report**: `{REPORT}` among the artifacts. Numbers link to traces.")
    lines.append("**The Step axis** of the charts is the tick: attempted updates, lost ones included.")
    return "\n".join(f"- {line}" for line in lines)


def _newest(story: Story, trace_url: PageUrl, room: int) -> str:
    """Put the newest incidents into a table, as many as fit; MLflow shows it without lines and margins."""
    order = ", the newest first" if len(story.chapters) > 1 else ""
    lines = [
        f"**What went wrong, and what was done**{order}",
        "",
        f"| {_GAP.join(_TITLES)} |",
        "|---" * len(_TITLES) + "|",
    ]
    room -= sum(map(len, lines)) + _ABOUT_OLDER
    shown = 0
    for chapter in reversed(story.chapters):
        row = f"| {_GAP.join(_row(chapter, trace_url))} |"
        room -= len(row) + 1
        if room < 0:
            break
        lines.append(row)
        shown += 1
    if older := len(story.chapters) - shown:
        lines += ["", f"And {older:,} before them, in `{REPORT}`."]
    return "\n".join(lines)


def _row(chapter: Chapter, trace_url: PageUrl) -> Sequence[str]:
    """Return one incident as cells of no more than 200 characters, without their addresses."""
    incident, diagnosis = chapter.incident, chapter.incident.diagnosis
    is_let_through = incident.anomaly.landed or incident.is_observed
    seen = noticed(incident.anomaly, by_name=False) + (reached_suffix(incident) if is_let_through else ", refused")
    blamed = [text(rows_named(diagnosis.rows), 80)] if diagnosis.rows else []
    if (culprit := diagnosis.culprit) is not None:
        file = "/".join(culprit.file.split("/")[-2:])
        blamed = [text(culprit.op, 30), text(f"{file}:{culprit.line}", 100), *blamed]
    outcome, has_trace = OUTCOMES[incident.outcome], chapter.closed_ms is not None
    return (
        f"[{incident.id:,}]({trace_url(incident.id)})" if has_trace else f"{incident.id:,}",
        _time(chapter.opened_ms, "%d %b %H:%M"),
        f"{incident.anomaly.step:,}",
        text(seen, 200) + text(drill_suffix(incident), 80),
        str(diagnosis.cause) + (f": {', '.join(blamed)}" if blamed else ""),
        text(_remedy(chapter), 200),
        outcome if incident.outcome is Outcome.RECOVERED else f"**{outcome}**",
        describe_cost(incident),
    )


def _remedy(chapter: Chapter) -> str:
    incident = chapter.incident
    if incident.decision.gave_up is not None:
        return f"gave up: {why_of(incident)}"
    if chapter.treated_ms is None and incident.outcome is None:
        return "being treated"
    return remedies_of(incident) or "nothing was done"


# ------------------------------------------------------------------------------------------------------------ markdown


def text(raw: str, most: int) -> str:
    """Show words as they are, in at most `most` characters of markdown. Never at the start of a line."""
    marks = [_MARKS.get(one, one) for one in printable(" ".join(raw.split()))]
    ends = list(accumulate(map(len, marks)))
    if ends and ends[-1] > most:
        marks = [*marks[: sum(end <= most - len(_DOTS) for end in ends)], _DOTS]
    return "".join(marks)
