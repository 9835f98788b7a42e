"""The description of a run in MLflow, whose first lines say what to do, and the full report among its artifacts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from resilient_train.tracking.review import active_remedies, next_start, samples_skipped, to_do, verdict
from resilient_train.tracking.story import Chapter, Checkpoint, Story, request_of
from resilient_train.types import OUTSIDE, Culprit
from resilient_train.wording import (
    OUTCOMES,
    counted,
    describe_arms,
    describe_cost,
    describe_culprit,
    drill_suffix,
    noticed,
    printable,
    reached_suffix,
    remedies_of,
    rows_named,
    why_of,
)

_DOTS = "..."
_MARKS = {one: f"\\{one}" for one in "*_[]~"}
_MARKS |= {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {one: f"&#{ord(one)};" for one in "|`\\@$¨"}
_SYNTAX = re.compile(r":(?!\d\d:\d\d\b)(?=//|[^\s:]*:)|(?<=\bwww)\.|^[#+=-]|^\d(?=\d*[.)])", re.IGNORECASE)
_PLAIN_CODE = re.compile(r"[^`|\\¨]+")
_HARMLESS_URL = re.compile(r"[\w#?&=%./:;,+~-]+")
_LONGEST_URL = 400
_GAP = "&ensp; | "


def text(raw: str, most: int | None = None) -> str:
    """Show words as they are, in at most `most` characters of markdown."""
    return _within(_marked(_line(raw)), most)


def code(raw: str, most: int | None = None) -> str:
    """Show a name or a path as code; of one that is too long the end, which names the file."""
    raw = _line(raw).strip()
    if not _PLAIN_CODE.fullmatch(raw):
        return _within(_marked(raw), most, keep_end=True)
    room = len(raw) if most is None else max(most - 2, 0)
    return f"`{raw if len(raw) <= room else _DOTS + raw[len(raw) - room + len(_DOTS) :].lstrip()}`"


def worded(raw: str, most: int | None = None) -> str:
    """Show a sentence in which names stand between backticks."""
    parts = _line(raw).split("`")
    if len(parts) % 2:
        shown = "".join(code(one) if at % 2 else "".join(_marked(one)) for at, one in enumerate(parts))
        if most is None or len(shown) <= most:
            return shown
    return _within(_marked("".join(parts)), most)


def link(label: str, url: str | None, most: int | None = None) -> str:
    """Show words as a link, or as text where the address holds anything but the characters of one."""
    if url is None or len(url) > _LONGEST_URL or not _HARMLESS_URL.fullmatch(url):
        return text(label, most)
    return f"[{text(label, most)}]({url})"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Put cells, which are markdown already, into a table; MLflow shows it without lines and margins."""
    lines = [_GAP.join(titles), "|".join(["---"] * len(titles)), *map(_GAP.join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def rows_that_fit(titles: Sequence[str], rows: Iterable[Sequence[str]], room: int) -> list[Sequence[str]]:
    """Return the first rows, as many as a table of so many characters holds."""
    fitting: list[Sequence[str]] = []
    for row in rows:
        if len(table(titles, [*fitting, row])) > room:
            break
        fitting.append(row)
    return fitting


def _line(raw: str) -> str:
    return printable(" ".join(raw.split()))


def _marked(line: str) -> list[str]:
    syntax = {found.start() for found in _SYNTAX.finditer(line)}
    return [f"&#{ord(one)};" if at in syntax else _MARKS.get(one, one) for at, one in enumerate(line)]


def _within(marks: list[str], most: int | None, *, keep_end: bool = False) -> str:
    if most is None or sum(map(len, marks)) <= most:
        return "".join(marks)
    kept: list[str] = []
    room = most - len(_DOTS)
    for mark in reversed(marks) if keep_end else marks:
        room -= len(mark)
        if room < 0:
            break
        kept.append(mark)
    return _DOTS + "".join(reversed(kept)).lstrip() if keep_end else "".join(kept).rstrip() + _DOTS


@dataclass(frozen=True, slots=True)
class IncidentView:
    """What there is to say about an incident, each in one phrase; empty where there is nothing to say."""

    noticed: str
    drill: str  # to append to what was noticed
    cause: str
    rows: str
    culprit: str
    symptom: str
    remedy: str
    arms: tuple[str, ...]  # the lines of a table: how the arms of a trial went
    cost: str
    outcome: str
    advice: str

    @classmethod
    def of(cls, chapter: Chapter) -> IncidentView:
        """Put an incident into words."""
        incident, anomaly, diagnosis = chapter.incident, chapter.incident.anomaly, chapter.incident.diagnosis
        remedy = remedies_of(incident) or "nothing was done"
        is_treated = chapter.treated_ms is not None or incident.outcome is not None
        if incident.decision.gave_up is not None:
            remedy = f"gave up: {why_of(incident)}"
        elif not is_treated:
            remedy = "being treated"
        is_let_through = anomaly.landed or incident.is_observed
        return cls(
            noticed=noticed(anomaly, by_name=False) + (reached_suffix(incident) if is_let_through else ", refused"),
            drill=drill_suffix(incident),
            cause=str(diagnosis.cause),
            rows=rows_named(diagnosis.rows) if diagnosis.rows else "",
            culprit="" if diagnosis.culprit is None else describe_culprit(diagnosis.culprit),
            symptom="" if diagnosis.symptom is None else describe_culprit(diagnosis.symptom),
            remedy=remedy,
            arms=tuple(describe_arms(incident)),
            cost=describe_cost(incident),
            outcome=OUTCOMES[incident.outcome] if is_treated else "being treated",
            advice="" if incident.drill else diagnosis.advice,
        )


REPORT = "report.md"  # its name among the artifacts
LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_ADVICE, _MOST_TO_DO, _MOST_ROWS, _MOST_INCIDENTS = 5, 3, 1_000, 200
_LONGEST_REQUEST = 160  # characters
_TITLES = ("#", "when", "step", "what", "cause", "remedy", "outcome", "cost")

PageUrl = Callable[[int], str | None]  # the page of an incident, by its number


def _nowhere(number: int) -> None:
    """There is no such page."""


def note(story: Story, trace_url: PageUrl, strip_url: str | None = None) -> str:
    """Return the description, below MLflow's limit; its first lines are all that the page shows at first."""
    parts = [_verdict(story, most=900)]
    if story.advice:
        parts.append(f"**What to change**\n\n{_advice(story, most=1_600)}")
    if story.chapters and strip_url is not None:
        parts.append(f"!{link('The incidents of the run, by cause, over its ticks', strip_url)}")
    last = ["**What is left**", _left(story, most=1_300)] if story.chapters else [_left(story, most=1_300)]
    room = LIMIT - sum(len(part) + 2 for part in parts + last)
    if story.chapters:
        parts.append(_newest(story, trace_url, room - 2))
    return "\n\n".join(parts + last) + "\n"


def report(story: Story) -> str:
    """Return the full report: the newest incidents with their evidence."""
    parts = [f"# {text(story.directory.name)}", _verdict(story)]
    parts.append(f"Run directory: {code(str(story.directory))}")
    newest = story.chapters[: -_MOST_INCIDENTS - 1 : -1]
    if story.chapters:
        rows = [_row(one, _nowhere, None) for one in newest]
        parts += ["## What to change", _advice(story, None) if story.advice else "No incident asks for a change."]
        parts += ["## What went wrong, and what was done", table(_TITLES, rows)]
    if older := len(story.chapters) - len(newest):
        parts.append(f"And {older:,} before them: `resilient-train incidents` prints them.")
    parts += ["## What is left", _left(story, None)]
    parts += [_incident(one) for one in newest]
    return "\n\n".join(parts) + "\n"


def _verdict(story: Story, most: int | None = None) -> str:
    """Say the verdict, whether there was a drill and what to do in the first two lines, then what explains it."""
    incidents = story.incidents
    words, sentences = verdict(story)
    if story.status == "recovered":
        words = words.replace("Recovered", f"Recovered from {counted(len(incidents), 'incident')}")
    elif incidents:
        words += f" ({counted(len(incidents), 'incident')})"
    if drilled := sum(bool(one.drill) for one in incidents):
        share = "all" if drilled == len(incidents) else f"{drilled:,} of them"
        words += f", {share} on purpose (drill)"
    asked = asked_of(story)
    more = f"; and {len(asked) - _MOST_TO_DO:,} more" if len(asked) > _MOST_TO_DO else ""
    if things := [*filter(None, [to_do(story)]), *asked[:_MOST_TO_DO]]:
        do = f" **Do:** {'. '.join(things)}{more}."
    else:
        do = " Nothing to change." if incidents else ""
    return f"**{words}.**{do} {text(sentences[:1].upper() + sentences[1:], most)}"


def asked_of(story: Story) -> list[str]:
    """Say what the incidents ask for, as the terminal does, each in one sentence; the most important first."""
    return [worded(request_of(one.text).rstrip("."), _LONGEST_REQUEST) for one in story.advice]


def _advice(story: Story, most: int | None) -> str:
    """List what to change; the note has the first of it."""
    shown = story.advice if most is None or len(story.advice) <= _MOST_ADVICE + 1 else story.advice[:_MOST_ADVICE]
    each = None if most is None else most // max(_MOST_ADVICE, len(shown)) - 60
    lines = [
        f"{number}. {worded(one.text, each)}"
        + (f" ({len(one.incidents):,} incidents)" if len(one.incidents) > 1 else f" (incident {one.incidents[0]:,})")
        for number, one in enumerate(shown, start=1)
    ]
    if more := len(story.advice) - len(shown):
        lines.append(f"{len(lines) + 1}. and {more:,} more, in {code(REPORT)}.")
    return "\n".join(lines)


def _left(story: Story, most: int | None) -> str:
    """Say where the weights are, what differs from the configuration, and what a new start would do."""
    each = None if most is None else most // 5
    lines = []
    if story.chapters or story.last_good:
        lines.append(f"**Last good checkpoint**: {_checkpoint(story.last_good, each)}")
    if story.newest is not None and not story.newest.is_verified:
        lines.append(f"**Newer, not yet verified**: {_checkpoint(story.newest, each)}")
    if story.best is not None:
        lines.append(f"**Best evaluation**: {_checkpoint(story.best, each)}")
    if active := active_remedies(story.remedies):
        lines.append(f"**Still active**: {worded('; '.join(active), each)}")
    if skipped := samples_skipped(story.remedies):
        lines.append(f"**Skipped**: {counted(skipped, 'sample')}")
    lines.append(f"**The same command** {worded(next_start(story), each)}.")
    if most is not None and story.chapters:
        lines.append(f"**Full report**: {code(REPORT)} among the artifacts. Numbers link to traces.")
    if most is not None:
        lines.append("**The Step axis** of the charts is the tick: attempted updates, lost ones included.")
    return "\n".join(f"- {line}" for line in lines)


def _checkpoint(one: Checkpoint | None, most: int | None) -> str:
    if one is None:
        return "none yet"
    metrics = "".join(f", {text(name, 40)} {value:.4g}" for name, value in list(one.metrics.items())[:3])
    room = None if most is None else most - 40 - len(metrics)
    return f"step {one.step:,}{metrics}, {code(str(one.path), room)}"


# ----------------------------------------------------------------------------------------------------------- incidents


def _row(chapter: Chapter, trace_url: PageUrl, most: int | None) -> Sequence[str]:
    """Return one incident as cells, each of no more than `most` characters without its address."""
    incident, view = chapter.incident, IncidentView.of(chapter)
    diagnosis = incident.diagnosis
    blamed = [text(view.rows, 80)] if view.rows else []
    if diagnosis.culprit is not None:
        blamed = [code(diagnosis.culprit.op, 30), _place(diagnosis.culprit, most and most // 2), *blamed]
    return (
        link(f"{incident.id:,}", trace_url(incident.id)),
        _time(chapter.opened_ms, "%d %b %H:%M"),
        f"{incident.anomaly.step:,}",
        text(view.noticed, most) + text(view.drill, 80),
        view.cause + (f": {', '.join(blamed)}" if blamed else ""),
        text(view.remedy, most),
        view.outcome if view.outcome == "recovered" else f"**{view.outcome}**",
        view.cost,
    )


def _place(culprit: Culprit, most: int | None) -> str:
    """Name the line of code; where there is little room, with the last two names of its file."""
    file = culprit.file if most is None else "/".join(culprit.file.split("/")[-2:])
    return code(f"{file}:{culprit.line}", most)


def _time(ms: int, form: str) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000).astimezone().strftime(form)
    except (OverflowError, ValueError, OSError):  # of a clock that was wrong
        return ""


def _newest(story: Story, trace_url: PageUrl, room: int) -> str:
    order = ", the newest first" if len(story.chapters) > 1 else ""
    head = f"**What went wrong, and what was done**{order}\n\n"
    cells = (_row(one, trace_url, 200) for one in reversed(story.chapters))
    rows = rows_that_fit(_TITLES, cells, room - len(head) - 60)
    older = len(story.chapters) - len(rows)
    return head + table(_TITLES, rows) + (f"\n\nAnd {older:,} before them, in {code(REPORT)}." if older else "")


def _incident(chapter: Chapter) -> str:
    incident, view = chapter.incident, IncidentView.of(chapter)
    anomaly, diagnosis, actions = incident.anomaly, incident.diagnosis, incident.decision.actions
    inputs = diagnosis.culprit.inputs if diagnosis.culprit is not None else ()
    rung = f" (rung {incident.decision.rung + 1:,})" if actions and incident.decision.rung < OUTSIDE else ""
    facts = {
        "Outcome": view.outcome,
        "When": _times(chapter),
        "Signal": f"{anomaly.signal} at tick {anomaly.tick:,}; step {anomaly.since:,} is the last to be trusted",
        "Evidence": anomaly.evidence,
        "Cause": view.cause,
        "Culprit": view.culprit,
        "Its inputs": "; ".join(", ".join(f"{key} {value}" for key, value in one.items()) for one in inputs),
        "What broke because of it": view.symptom,
        "Rows": ", ".join(map(str, diagnosis.rows[:_MOST_ROWS])),
        "Remedy": view.remedy + rung,
        "Tried": "; ".join(" ".join(line.split()) for line in view.arms),
        "Cost": view.cost,
    }
    title = f"## {incident.id:,}. Step {anomaly.step:,}: {text(view.noticed + view.drill)}"
    lines = [f"- **{name}**: {text(words)}" for name, words in facts.items() if words]
    return "\n".join([title, "", *lines, *([f"- **Advice**: {worded(view.advice)}"] if view.advice else [])])


def _times(chapter: Chapter) -> str:
    """Say when it was, and how long each part of its treatment took."""
    said = _time(chapter.opened_ms, "%a %d %b %Y %H:%M:%S %Z")
    if chapter.phases:
        parts = [f"{one.name} {max(0, one.ended_ms - one.began_ms) / 1000:.3g} s" for one in chapter.phases]
        said += f" ({', '.join(parts)})"
    if chapter.closed_ms is not None:
        said += f"; its outcome was known at {_time(chapter.closed_ms, '%H:%M:%S')}"
    return said
