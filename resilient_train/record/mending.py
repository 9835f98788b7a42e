"""What a person should change: the advice of a run's incidents that is still open."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from resilient_train.types import Cause, Incident, Outcome

_RECURS_BY_ITSELF = (Cause.EXPLOSION, Cause.RATE, Cause.OVERFLOW)  # the next run of this configuration meets it, too
_MOST_ROWS = 8  # that are named

_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z`])")
_NUMBERS = re.compile(r"(?P<name>`[^`]*`)|\[[\d, ]+\]|\b(?:nan|inf)\b|(?<![\w.])[+-]?\d[\d.,]*(?:e[+-]?\d+)?\b")


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change, and the numbers of the incidents that it is of."""

    text: str
    incidents: tuple[int, ...]


def still_open(incidents: Sequence[Incident]) -> tuple[Advice, ...]:
    """Return what is left to a person, the most important first: each line, all rows, and what is asked for but once.

    First what the run could not cure, then what it has not cured yet, then what it only goes around: lines in armor,
    rows that are put away, settings that were turned. What passed and did not return needs nobody.
    """
    gave_up = [one for one in incidents if one.outcome is Outcome.GAVE_UP]
    is_open = [one for one in incidents if one.outcome is None]
    with_rows = [one for one in incidents if one.diagnosis.rows and one.diagnosis.culprit is None]
    kinds = Counter(map(_kind, incidents))
    each = partial(_each, abouts=_abouts(incidents))
    found = [
        *each(reversed(gave_up)),
        *each(reversed(is_open)),
        *each((one for one in incidents if one.diagnosis.culprit is not None), by_count=True),
        *(_of_rows(with_rows) if len(with_rows) > 1 else each(with_rows)),
        *each(reversed([one for one in incidents if one.diagnosis.cause in _RECURS_BY_ITSELF]), by_count=True),
        *each(reversed([one for one in incidents if kinds[_kind(one)] > 1]), by_count=True),
    ]
    left: dict[object, Advice] = {}
    told: set[int] = set()
    for about, advice in found:
        if about in left:
            of = {*left[about].incidents, *advice.incidents}
            left[about] = replace(left[about], incidents=tuple(sorted(of)))
        elif not told.issuperset(advice.incidents):
            left[about] = advice
        told.update(advice.incidents)
    return tuple(left.values())


def _kind(incident: Incident) -> object:
    """What makes an incident the return of another one: the line, the rows, or the way it was noticed."""
    diagnosis = incident.diagnosis
    if (culprit := diagnosis.culprit) is not None:
        return culprit.file, culprit.line, culprit.op
    return diagnosis.rows or (diagnosis.cause, incident.anomaly.signal)


def _each(
    incidents: Iterable[Incident], abouts: Mapping[int, object], *, by_count: bool = False
) -> list[tuple[object, Advice]]:
    """One advice for all incidents that ask for the same, in the words of the newest of them."""
    groups: dict[object, list[Incident]] = {}
    for one in incidents:
        if one.diagnosis.advice.strip():
            groups.setdefault(abouts[one.id], []).append(one)
    if by_count:
        groups = dict(sorted(groups.items(), key=lambda item: -len(item[1])))
    return [(about, Advice(_words(group), tuple(sorted(one.id for one in group)))) for about, group in groups.items()]


def _abouts(incidents: Sequence[Incident]) -> dict[int, object]:
    """What the advice of each incident is about: what is wrong with a line, some rows, or, of others, what it asks for.

    What broke only because of a line asks for no more than what is said of that line.
    """
    found: dict[int, object] = {}
    lines: dict[object, object] = {}
    for one in sorted(incidents, key=lambda one: one.diagnosis.follower is not None):
        diagnosis = one.diagnosis
        if diagnosis.culprit is None:
            found[one.id] = diagnosis.rows or _asked(diagnosis.advice)
        else:
            about = _kind(one), diagnosis.cause
            first = lines.setdefault(_kind(one), about)
            found[one.id] = about if diagnosis.follower is None else first
    return found


def _asked(advice: str) -> str:
    """The sentence that asks for something, without its numbers: they differ from incident to incident.

    What it names does count: another tensor is another place to look at. A sentence behind it is only a hint.
    """
    words = " ".join(advice.split())
    asks = next((one for one in _SENTENCES.split(words) if ": " in one), words)
    return _NUMBERS.sub(lambda found: found["name"] or "#", asks)


def _words(group: Sequence[Incident]) -> str:
    """The newest; but what broke only because of something else says so, and better is what is said of that itself."""
    newest = max(group, key=lambda one: (one.diagnosis.follower is None, one.id))
    return " ".join(newest.diagnosis.advice.split())


def _of_rows(incidents: Sequence[Incident]) -> list[tuple[object, Advice]]:
    """One advice for all the rows of several incidents."""
    rows = sorted({row for one in incidents for row in one.diagnosis.rows})
    shown = ", ".join(map(str, rows[:_MOST_ROWS])) + (
        f" and {len(rows) - _MOST_ROWS:,} more" if rows[_MOST_ROWS:] else ""
    )
    text = f"Mend or remove rows {shown} of the data: quarantine.json says of each why."
    return [(tuple(rows), Advice(text if len(rows) > 1 else _words(incidents), tuple(one.id for one in incidents)))]
