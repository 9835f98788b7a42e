"""What is said of a run: the report as a file, incidents for it and the terminal, the description in MLflow.

The first lines of the description say what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from resilient_train.files import read_plain
from resilient_train.secrets import masked
from resilient_train.tracking.review import left, next_start, shortened, summed_up, to_do, told_once, verdict
from resilient_train.tracking.story import LARGEST_SOURCE, Chapter, Story
from resilient_train.types import Culprit, Outcome
from resilient_train.wording import (
    OUTCOMES,
    counted,
    describe_arms,
    describe_cost,
    describe_culprit,
    drill_suffix,
    duration,
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

REPORT = "report.txt"  # its name among the artifacts
LIMIT = 7_950  # characters of a note: MLflow cuts a tag at 8,000

_MOST_TO_DO, _LONGEST_TO_DO = 3, 300  # things, and characters of each
_MOST_LEFT, _MOST_INCIDENTS = 260, 200  # characters of a line, and incidents in the report
_TITLES = ("#", "when", "step", "what", "cause", "remedy", "outcome", "cost")
LABELS = 9  # columns

PageUrl = Callable[[int], str | None]  # the page of an incident, by its number

_EXPLAINED = {
    Outcome.RECURRED: ": what was done was not enough",
    Outcome.UNRECOVERED: ": it was not over at the end of the run",
    None: ": it counts as recovered once the run has stayed healthy",
}


# ------------------------------------------------------------------------------------- incidents, for terminal and file


def facts(chapter: Chapter, story: Story, *, reads_source: bool = False) -> list[tuple[str, str]]:
    """Tell an incident in lines, each with a label: what, why, where, what was done, the cost, the outcome, what to do.

    A line without a label adds to the one above. `reads_source` shows lines of code from their files; not in what is
    uploaded, as a run directory of somebody else may name any file.
    """
    incident, diagnosis = chapter.incident, chapter.incident.diagnosis
    lines = [
        ("noticed", noticed(incident.anomaly) + reached_suffix(incident)),
        ("", incident.anomaly.evidence),
        ("drill", f"{incident.drill}, on purpose" if incident.drill else ""),
        ("cause", str(diagnosis.cause) + (f": {rows_named(diagnosis.rows)}" if diagnosis.rows else "")),
    ]
    for label, culprit in (("culprit", diagnosis.culprit), ("then", diagnosis.symptom)):
        if culprit is not None:
            source = source_line(culprit, chapter, story) if reads_source else ""
            lines += [(label, describe_culprit(culprit)), ("", source)]
            lines += [("", ", ".join(f"{key} {value}" for key, value in one.items())) for one in culprit.inputs]
    lines.append(("remedy", _remedy(chapter)))
    after = [
        ("cost", describe_cost(incident)),
        ("outcome", _outcome_when(chapter)),
        ("advice", "" if incident.drill else diagnosis.advice),
    ]
    arms = [("" if place else "tried", line) for place, line in enumerate(describe_arms(incident))]
    return [*_in_one_line(lines), *arms, *_in_one_line(after)]


def _in_one_line(lines: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Remove line breaks, and lines that say nothing."""
    return [(label, " ".join(words.split())) for label, words in lines if words.strip()]


def heading(chapter: Chapter, story: Story) -> tuple[str, str]:
    """Name an incident and say when it was: in time, and in steps and ticks."""
    anomaly = chapter.incident.anomaly
    since = (chapter.opened_ms - story.began_ms) / 1000 if story.began_ms is not None else -1.0
    after = f" ({duration(since)} after the start)" if 0 <= since < 1e9 else ""
    when = f"incident {chapter.incident.id:,}  {_time(chapter.opened_ms, '%Y-%m-%d %H:%M:%S')}{after}"
    return when, f"  step {anomaly.step:,}, tick {anomaly.tick:,}"


def _remedy(chapter: Chapter) -> str:
    incident = chapter.incident
    if incident.decision.gave_up is not None:
        return f"gave up: {why_of(incident)}"
    if chapter.treated_ms is None and incident.outcome is None:
        return "being treated"
    return remedies_of(incident) or "nothing was done"


def _outcome_when(chapter: Chapter) -> str:
    outcome = chapter.incident.outcome
    words = OUTCOMES[outcome] + _EXPLAINED.get(outcome, "")
    if chapter.closed_ms is None:
        return words
    seconds = (chapter.closed_ms - chapter.opened_ms) / 1000
    later = f", {duration(seconds)} later" if 0.5 <= seconds < 1e9 else ""
    return f"{words} ({_time(chapter.closed_ms, '%Y-%m-%d %H:%M:%S')}{later})"


def _time(ms: int, form: str) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000).strftime(form)
    except (OverflowError, ValueError, OSError):  # a damaged journal may have any number
        return "at an unknown time"


def source_line(culprit: Culprit, chapter: Chapter, story: Story) -> str:
    """Return the text of a line, from its active patch, or from its file if that is older than the incident."""
    patches = (story.remedies or {}).get("armor")
    for patch in patches if isinstance(patches, list) else []:
        place = culprit.file, culprit.line, culprit.op
        if isinstance(patch, Mapping) and (patch.get("file"), patch.get("line"), patch.get("op")) == place:
            return str(patch.get("text"))
    path = Path(culprit.file)
    try:
        known = path.stat()
        is_unchanged = known.st_mtime * 1000 < chapter.opened_ms and known.st_size < LARGEST_SOURCE
        if path.suffix != ".py" or not is_unchanged:
            return ""
        return read_plain(path).decode("utf-8", "replace").splitlines()[culprit.line - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def report(story: Story) -> str:
    """Return the full report: the review of the run, and its newest incidents as the terminal shows them."""
    words, sentences = verdict(story)
    lines = [str(story.directory), "", f"{words}: {sentences}", *summed_up(story, str)]
    newest = story.chapters[-_MOST_INCIDENTS:]
    if older := len(story.chapters) - len(newest):
        lines += ["", f"{counted(older, 'incident')} before these"]
    for chapter in newest:
        lines += ["", "".join(heading(chapter, story))]
        lines += [f"  {label:{LABELS}}{said}" for label, said in facts(chapter, story)]
    return "\n".join(printable(masked(line)) for line in lines) + "\n"


# ------------------------------------------------------------------------------------------------------ note, in MLflow


def note(story: Story, trace_url: PageUrl, strip_url: str | None = None) -> str:
    """Return the description, below MLflow's limit; its first lines are all that the page shows at first."""
    parts = [_verdict(story)]
    if story.chapters and strip_url is not None:
        parts.append(f"!{link('The incidents of the run, by cause, over its ticks', strip_url)}")
    left = _left(story)
    if story.chapters:
        room = LIMIT - sum(len(part) + 2 for part in (*parts, left))
        parts.append(_newest(story, trace_url, room))
    return "\n\n".join([*parts, left]) + "\n"


def _verdict(story: Story) -> str:
    """Say the verdict, whether there was a drill and what to do in the first two lines, then what explains it."""
    incidents = story.incidents
    words, sentences = verdict(story)
    if drilled := sum(bool(one.drill) for one in incidents):
        words += f", {drilled:,} of {counted(len(incidents), 'incident')} on purpose (drill)"
    asked = [to_do(story), *told_once(story)]
    things = [worded(one, _LONGEST_TO_DO) for one in shortened([*filter(None, asked)], _MOST_TO_DO, "And {:,} more.")]
    do = " Nothing to change." if incidents else ""
    if things:
        do = f" **Do:** {' '.join(one if one.endswith(('.', ')')) else f'{one}.' for one in things)}"
    return f"**{words}.**{do} {text(sentences[:1].upper() + sentences[1:], 900)}"


def _left(story: Story) -> str:
    """Say where the weights are, what differs from the configuration, and what a new start would do."""
    lines = [f"**{label.capitalize()}**: {worded(words, _MOST_LEFT)}" for label, words in left(story, str)]
    lines.append(f"**The same command** {worded(next_start(story), _MOST_LEFT)}.")
    if story.chapters:
        lines.append(f"**Full report**: {code(REPORT)} among the artifacts. Numbers link to traces.")
    lines.append("**The Step axis** of the charts is the tick: attempted updates, lost ones included.")
    return "\n".join(f"- {line}" for line in lines)


def _newest(story: Story, trace_url: PageUrl, room: int) -> str:
    order = ", the newest first" if len(story.chapters) > 1 else ""
    head = f"**What went wrong, and what was done**{order}\n\n"
    cells = (_row(one, trace_url) for one in reversed(story.chapters))
    rows = rows_that_fit(_TITLES, cells, room - len(head) - 60)
    older = len(story.chapters) - len(rows)
    return head + table(_TITLES, rows) + (f"\n\nAnd {older:,} before them, in {code(REPORT)}." if older else "")


def _row(chapter: Chapter, trace_url: PageUrl) -> Sequence[str]:
    """Return one incident as cells of no more than 200 characters, without their addresses."""
    incident, diagnosis = chapter.incident, chapter.incident.diagnosis
    is_let_through = incident.anomaly.landed or incident.is_observed
    seen = noticed(incident.anomaly, by_name=False) + (reached_suffix(incident) if is_let_through else ", refused")
    blamed = [text(rows_named(diagnosis.rows), 80)] if diagnosis.rows else []
    if (culprit := diagnosis.culprit) is not None:
        file = "/".join(culprit.file.split("/")[-2:])
        blamed = [code(culprit.op, 30), code(f"{file}:{culprit.line}", 100), *blamed]
    outcome = OUTCOMES[incident.outcome]
    return (
        link(f"{incident.id:,}", trace_url(incident.id)),
        _time(chapter.opened_ms, "%d %b %H:%M"),
        f"{incident.anomaly.step:,}",
        text(seen, 200) + text(drill_suffix(incident), 80),
        str(diagnosis.cause) + (f": {', '.join(blamed)}" if blamed else ""),
        text(_remedy(chapter), 200),
        outcome if incident.outcome is Outcome.RECOVERED else f"**{outcome}**",
        describe_cost(incident),
    )


# ------------------------------------------------------------------------------------------------------------ markdown


def text(raw: str, most: int | None = None) -> str:
    """Show words as they are, in at most `most` characters of markdown."""
    return _within(_marked(_line(raw)), most)


def code(raw: str, most: int | None = None) -> str:
    """Show a name or a path as code; of one that is too long the end, which names the file."""
    raw = _line(raw).strip()
    if not _PLAIN_CODE.fullmatch(raw):
        return text(raw, most)
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


def _within(marks: list[str], most: int | None) -> str:
    if most is None or sum(map(len, marks)) <= most:
        return "".join(marks)
    kept: list[str] = []
    room = most - len(_DOTS)
    for mark in marks:
        room -= len(mark)
        if room < 0:
            break
        kept.append(mark)
    return "".join(kept).rstrip() + _DOTS
