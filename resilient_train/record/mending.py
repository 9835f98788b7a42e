"""What a person should change: the advice of a run's incidents that is still open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resilient_train.events import Cause, Incident, Outcome

_RECURS_BY_ITSELF = (Cause.EXPLOSION, Cause.OVERFLOW)  # the next run of this configuration meets it, too
_MOST_ROWS = 8  # that are named


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change, and the numbers of the incidents that it is of."""

    text: str
    incidents: tuple[int, ...]


def still_open(incidents: Sequence[Incident]) -> tuple[Advice, ...]:
    """Return what is left to a person, the most important first: each line, each cause and all rows but once.

    First what the run could not cure, then what it has not cured yet, then what it only goes around: lines in armor,
    rows that are put away, settings that were turned. What passed and did not return needs nobody.
    """
    gave_up = [one for one in incidents if one.outcome is Outcome.GAVE_UP]
    is_open = [one for one in incidents if one.outcome is None]
    with_rows = [one for one in incidents if one.diagnosis.rows and one.diagnosis.culprit is None]
    found = [
        *_each(reversed(gave_up)),
        *_each(reversed(is_open)),
        *_each((one for one in incidents if one.diagnosis.culprit is not None), by_count=True),
        *_rows(with_rows),
        *_each(reversed([one for one in incidents if one.diagnosis.cause in _RECURS_BY_ITSELF]), by_count=True),
        *(advice for advice in _each(reversed(incidents), by_count=True) if len(advice.incidents) > 1),
    ]
    left: list[Advice] = []
    told: set[int] = set()
    for advice in found:
        if not told.issuperset(advice.incidents) and advice.text not in {one.text for one in left}:
            left.append(advice)
        told.update(advice.incidents)
    return tuple(left)


def _each(incidents: Iterable[Incident], *, by_count: bool = False) -> list[Advice]:
    """One advice for all incidents of a line or, where none is known, of a cause: in the words of the first of them."""
    groups: dict[object, list[Incident]] = {}
    for one in incidents:
        if one.diagnosis.advice.strip():
            groups.setdefault(_about(one), []).append(one)
    if by_count:
        groups = dict(sorted(groups.items(), key=lambda item: -len(item[1])))
    return [Advice(_words(group), tuple(sorted(one.id for one in group))) for group in groups.values()]


def _about(incident: Incident) -> object:
    """What an advice is about; rows are told together elsewhere."""
    diagnosis = incident.diagnosis
    if (culprit := diagnosis.culprit) is not None:
        return culprit.file, culprit.line, culprit.op
    if diagnosis.rows:
        return diagnosis.rows
    return diagnosis.cause, incident.anomaly.signal


def _words(group: Sequence[Incident]) -> str:
    """What broke only because of something else says so; better is what is said of that itself."""
    first = next((one for one in group if one.diagnosis.follower is None), group[0])
    return " ".join(first.diagnosis.advice.split())


def _rows(incidents: Sequence[Incident]) -> list[Advice]:
    """One advice for all the rows; a single incident has words of its own."""
    rows = sorted({row for one in incidents for row in one.diagnosis.rows})
    if len(incidents) < 2:
        return _each(incidents)
    shown = ", ".join(map(str, rows[:_MOST_ROWS])) + (
        f" and {len(rows) - _MOST_ROWS:,} more" if rows[_MOST_ROWS:] else ""
    )
    text = f"Mend or remove rows {shown} of the data: quarantine.json says of each why."
    return [Advice(text if len(rows) > 1 else _words(incidents), tuple(one.id for one in incidents))]
