"""The note on a run's Overview in MLflow, read in a minute, and the full report among its artifacts. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from resilient_train.tracking.markdown import code, image, link, table, text, worded
from resilient_train.tracking.review import active_remedies, by_cause, next_start, verdict
from resilient_train.tracking.story import Chapter, Checkpoint, Story
from resilient_train.types import Action, Culprit, Incident, Outcome
from resilient_train.wording import (
    counted,
    drilled,
    in_seconds,
    noticed,
    reached,
    remedies_of,
    rows_named,
    why_of,
)

REPORT = "report.md"  # its name among the artifacts
LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_ADVICE, _MOST_ROWS = 5, 1_000
_TITLES = ("#", "when", "step", "what", "cause", "cure", "outcome", "cost")

TraceUrl = Callable[[int], str | None]  # where the trace of an incident is, or its picture, by its number


def _nowhere(number: int) -> None:
    """There is no such page."""


def note(story: Story, trace_url: TraceUrl, picture_url: TraceUrl = _nowhere, strip_url: str | None = None) -> str:
    """Return the short report: below MLflow's limit, whatever the run has met.

    `strip_url` is where a picture of all incidents is, and `picture_url` says for each where a page shows its own.
    """
    parts = [_verdict(story, most=900)]
    if story.advice:
        parts.append(_advice(story, most=1_600))
    last = [f"**What is left**\n\n{_left(story, most=1_300)}" if story.chapters else _left(story, most=1_300)]
    if story.chapters and strip_url is not None:
        parts.append(image("The incidents of the run, by cause, over its ticks", strip_url))
    room = LIMIT - sum(len(part) + 2 for part in parts + last)
    if story.chapters:
        parts.append(_newest(story, trace_url, picture_url, room - 2))
    return "\n\n".join(parts + last) + "\n"


def report(story: Story, trace_url: TraceUrl) -> str:
    """Return the whole story, every incident with its evidence."""
    parts = [f"# {text(story.directory.name)}", _verdict(story), f"Run directory: {code(str(story.directory))}"]
    if story.chapters:
        rows = [_row(one, story, trace_url) for one in reversed(story.chapters)]
        parts += ["## What to change", _advice(story)]
        parts += ["## What went wrong, and what was done", table(_titles(story), rows)]
    parts += ["## What is left", _left(story)]
    if story.quarantined:
        parts += ["## Rows that were put away", _quarantined(story.quarantined)]
    parts += [_incident(one, story, trace_url) for one in reversed(story.chapters)]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------ what both have


def _verdict(story: Story, most: int | None = None) -> str:
    words, sentences = verdict(story)
    left = f" {counted(len(story.advice), 'thing')} to change." if story.advice else " Nothing to change."
    return f"**{words}**: {text(sentences, most)}{left if story.chapters else ''}"


def _advice(story: Story, most: int | None = None) -> str:
    """What a person should change, numbered; the note has the first of it."""
    if not story.advice:
        return "Nothing."
    shown = story.advice if most is None or len(story.advice) <= _MOST_ADVICE + 1 else story.advice[:_MOST_ADVICE]
    each = None if most is None else most // max(_MOST_ADVICE, len(shown)) - 60
    lines = [
        f"{number}. {worded(one.text, each)}"
        + (f" ({len(one.incidents):,} incidents)" if len(one.incidents) > 1 else f" (incident {one.incidents[0]:,})")
        for number, one in enumerate(shown, start=1)
    ]
    if more := len(story.advice) - len(shown):
        lines.append(f"{len(lines) + 1}. and {more:,} more, in {code(REPORT)}.")
    return "\n".join(["**What to change**\n"] * (most is not None) + lines)


def _left(story: Story, most: int | None = None) -> str:
    """Where the weights are, what differs from the configuration, and what a new start would do."""
    each = None if most is None else most // 5
    lines = []
    if story.chapters or story.last_good:
        lines.append(f"**Last good checkpoint**: {_checkpoint(story.last_good, each)}")
    if story.newest is not None and not story.newest.is_verified:
        lines.append(f"**Newer, its proof not finished**: {_checkpoint(story.newest, each)}")
    if story.best is not None:
        lines.append(f"**Best evaluation**: {_checkpoint(story.best, each)}")
    if turned := active_remedies(story.remedies):
        lines.append(f"**In force**: {worded('; '.join(turned), each)}")
    lines.append(f"**The same command** {worded(next_start(story), each)}.")
    if most is not None and story.chapters:
        lines.append(
            f"**All of it**: {code(REPORT)} among the artifacts. A number leads to a trace, what happened to a picture."
        )
    if most is not None:
        lines.append("**The Step axis** of charts and pictures is the tick: attempted updates, lost ones included.")
    return "\n".join(f"- {line}" for line in lines)


def _checkpoint(one: Checkpoint | None, most: int | None) -> str:
    if one is None:
        return "none yet"
    metrics = "".join(f", {text(name, 40)} {value:.4g}" for name, value in list(one.metrics.items())[:3])
    room = None if most is None else most - 40 - len(metrics)
    return f"step {one.step:,}{metrics}, {code(str(one.path), room)}"


def _titles(story: Story) -> Sequence[str]:
    zone = _time(story.chapters[-1].opened_ms, "%Z")
    return [f"when ({text(zone, 20)})" if one == "when" and zone else one for one in _TITLES]


def _row(
    chapter: Chapter, story: Story, trace_url: TraceUrl, picture_url: TraceUrl = _nowhere, *, is_short: bool = False
) -> Sequence[str]:
    """One incident as cells; short: in 1,600 characters at most, its addresses included."""
    incident, most = chapter.incident, 200 if is_short else None
    anomaly = incident.anomaly
    what = noticed(anomaly, by_name=False) + (reached(anomaly) if anomaly.landed else ", refused")
    cost = f"{counted(incident.steps_lost, 'step')}, {in_seconds(incident.seconds)}"
    return (
        link(f"{incident.id:,}", trace_url(incident.id)),
        _time(chapter.opened_ms, "%d %b %H:%M"),
        f"{anomaly.step:,}",
        link(what, picture_url(incident.id), most) + text(drilled(incident), 80),
        _cause(incident, most),
        text(_cure(incident), most),
        _outcome(chapter),
        cost,
    )


def _cause(incident: Incident, most: int | None) -> str:
    diagnosis = incident.diagnosis
    blamed = []
    if diagnosis.culprit is not None:
        blamed += [code(diagnosis.culprit.op, 30), _place(diagnosis.culprit, most and most // 2)]
    if diagnosis.rows:
        blamed.append(text(rows_named(diagnosis.rows), 80))
    return str(diagnosis.cause) + (f": {', '.join(blamed)}" if blamed else "")


def _place(culprit: Culprit, most: int | None) -> str:
    """The line of code; the last two names of its file tell enough where there is little room."""
    file = culprit.file if most is None else "/".join(culprit.file.split("/")[-2:])
    return code(f"{file}:{culprit.line}", most)


def _cure(incident: Incident) -> str:
    if incident.decision.gave_up is not None:
        return f"gave up: {why_of(incident)}"
    return remedies_of(incident) or "nothing was done"


def _outcome(chapter: Chapter) -> str:
    match chapter.incident.outcome:
        case None:
            return "**open**" if chapter.treated_ms is not None else "**being treated**"
        case Outcome.UNRECOVERED:
            return "**unrecovered**"
        case Outcome.GAVE_UP:
            return "**gave up**"
    return str(chapter.incident.outcome)


def _time(ms: int, form: str) -> str:
    """A moment on the clock of this machine."""
    try:
        return datetime.fromtimestamp(ms / 1000).astimezone().strftime(form)
    except (OverflowError, ValueError, OSError):  # of a clock that was wrong
        return ""


# ----------------------------------------------------------------------------------------------------------- in a note


def _newest(story: Story, trace_url: TraceUrl, picture_url: TraceUrl, room: int) -> str:
    """The last incidents, as many as there is room for, and what the others were."""
    order = ", the newest first" if len(story.chapters) > 1 else ""
    head = f"**What went wrong, and what was done**{order}\n\n"
    rows: list[Sequence[str]] = []
    for chapter in reversed(story.chapters):
        rows.append(_row(chapter, story, trace_url, picture_url, is_short=True))
        if len(head + table(_titles(story), rows) + _others(story, len(rows))) > room:
            del rows[-1]
            break
    return head + table(_titles(story), rows) + _others(story, len(rows))


def _others(story: Story, shown: int) -> str:
    """What the table has no room for."""
    if not (more := len(story.chapters) - shown):
        return ""
    rows = [
        (
            cause,
            f"{len(some):,}",
            f"{sum(one.outcome is Outcome.RECOVERED for one in some):,}",
            f"{sum(one.steps_lost for one in some):,}",
            f"{some[-1].anomaly.step:,}",
        )
        for cause, some in by_cause(story.incidents).items()
    ]
    titles = ("cause", "incidents", "recovered", "steps lost", "last at step")
    return f"\n\nAnd {more:,} before them, in {code(REPORT)}. All {len(story.chapters):,}:\n\n{table(titles, rows)}"


# --------------------------------------------------------------------------------------------------------- in a report


def _incident(chapter: Chapter, story: Story, trace_url: TraceUrl) -> str:
    incident = chapter.incident
    anomaly = incident.anomaly
    title = f"## {incident.id:,}. Step {anomaly.step:,}: {text(noticed(anomaly, by_name=False) + reached(anomaly))}"
    lines = [f"- **{name}**: {words}" for name, words in _facts(chapter, story, trace_url) if words]
    return "\n".join([title, "", *lines])


def _facts(chapter: Chapter, story: Story, trace_url: TraceUrl) -> Iterator[tuple[str, str]]:
    """All that is known of an incident, by what it is; what is empty is not said."""
    incident = chapter.incident
    anomaly, diagnosis = incident.anomaly, incident.diagnosis
    yield "Outcome", _outcome(chapter)
    yield "When", _times(chapter)
    yield "Signal", f"{code(anomaly.signal)} at tick {anomaly.tick:,}; step {anomaly.since:,} is the last to be trusted"
    yield "Evidence", text(anomaly.evidence)
    if incident.drill:
        yield "On purpose", f"{text(incident.drill)}, by a drill"
    yield "Cause", code(diagnosis.cause)
    yield "Culprit", _culprit(diagnosis.culprit)
    yield "Its inputs", _inputs(diagnosis.culprit)
    yield "What broke of it", _culprit(diagnosis.symptom)
    yield "Rows", text(", ".join(map(str, diagnosis.rows)))
    yield (
        "Cure",
        text(_cure(incident)) + (f" (rung {incident.decision.rung + 1:,})" if incident.decision.actions else ""),
    )
    yield "Actions", ", ".join(code(_action(one)) for one in incident.decision.actions)
    yield "Cost", f"{counted(incident.steps_lost, 'step')}, {in_seconds(incident.seconds)}"
    yield "Advice", worded(diagnosis.advice)
    yield "Trace", link("open", url) if (url := trace_url(incident.id)) else ""


def _times(chapter: Chapter) -> str:
    """When it was, and how long each part of its treatment took."""
    told = f"{_time(chapter.opened_ms, '%a %d %b %Y %H:%M:%S')} {text(_time(chapter.opened_ms, '%Z'))}"
    if chapter.phases:
        parts = [f"{text(one.name)} {max(0, one.ended_ms - one.began_ms) / 1000:.3g} s" for one in chapter.phases]
        told += f" ({', '.join(parts)})"
    if chapter.closed_ms is not None:
        told += f"; its outcome was known at {_time(chapter.closed_ms, '%H:%M:%S')}"
    return told


def _culprit(culprit: Culprit | None) -> str:
    if culprit is None:
        return ""
    module = f" in {code(culprit.module)}" if culprit.module else ""
    return f"{code(culprit.op)}{module}, {_place(culprit, None)}, {text(culprit.phase)}"


def _inputs(culprit: Culprit | None) -> str:
    told = [", ".join(f"{name} {value}" for name, value in one.items()) for one in (culprit.inputs if culprit else ())]
    return "; ".join(code(one) for one in told)


def _action(action: Action) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in action.settings.items() if value is not None)
    return f"{action.remedy}({settings})"


def _quarantined(rows: Mapping[int, str]) -> str:
    shown = sorted(rows.items())[:_MOST_ROWS]
    more = f"\n\nAnd {len(rows) - len(shown):,} more, in quarantine.json." if len(rows) > len(shown) else ""
    return table(("row", "why"), [(str(row), worded(why)) for row, why in shown]) + more
