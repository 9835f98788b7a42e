"""An incident as a line of JSON: how incidents.jsonl and the journal hold it, and how it is read again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from resilient_train.record.journal import plain
from resilient_train.secrets import masked_tree
from resilient_train.types import (
    TRIAL,
    Action,
    Anomaly,
    Cause,
    Culprit,
    Decision,
    Diagnosis,
    Incident,
    Outcome,
    Signal,
    Tried,
)


def as_line(incident: Incident) -> dict[str, Any]:
    """Return an incident as incidents.jsonl and the journal hold it: first the documented keys, then the others.

    `rank` is the first of the ranks it began on, and null if it began on all of them at once.
    """
    anomaly, diagnosis, decision = incident.anomaly, incident.diagnosis, incident.decision
    line: dict[str, Any] = {
        "id": incident.id,
        "step": anomaly.step,
        "tick": anomaly.tick,
        "rank": min(anomaly.ranks, default=None),
        "signal": anomaly.signal,
        "cause": diagnosis.cause,
        "culprit": _line_of(diagnosis.culprit),
        "rows": diagnosis.rows,
        "advice": diagnosis.advice,
        "actions": [_line_of_action(action) for action in decision.actions],
        "rewound_to": incident.rewound_to,
        "steps_lost": incident.steps_lost,
        "seconds": incident.seconds,
        "outcome": incident.outcome,
        "evidence": anomaly.evidence,
        "ranks": anomaly.ranks,
        "symptom": _line_of(diagnosis.symptom),
        "since": anomaly.since,
        "landed": anomaly.landed,
        "rung": decision.rung,
        "gave_up": decision.gave_up,
        "drill": incident.drill,
        "trace": incident.trace,
    }
    if incident.is_observed or incident.further:
        line["further"] = incident.further
        line["again"] = [list(one) for one in incident.again]
    if incident.tried:
        line["tried"] = [
            {"do": [*map(_line_of_action, one.actions)], "anomalies": one.anomalies, "loss": one.loss, "won": one.won}
            for one in incident.tried
        ]
    whole: dict[str, Any] = masked_tree(plain(line))
    return whole


def from_line(line: Any) -> Incident:
    """Return the incident of a line; ValueError says which field is not what it should be. Unknown keys are ignored."""
    if not isinstance(line, Mapping):
        raise ValueError(f"an incident cannot be {line!r:.60}")
    step, seconds, outcome = _whole(line, "step"), _take(line, "seconds", int, float), _take(line, "outcome", str, None)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"an incident cannot have seconds={seconds}")
    anomaly = Anomaly(
        signal=Signal(_take(line, "signal", str)),
        step=step,
        tick=_whole(line, "tick"),
        since=_whole(line, "since", max(0, step - 1)),
        evidence=_take(line, "evidence", str, default=""),
        landed=_take(line, "landed", bool, default=True),
        ranks=_wholes(line, "ranks"),
    )
    diagnosis = Diagnosis(
        cause=Cause(_take(line, "cause", str)),
        advice=_take(line, "advice", str),
        culprit=_culprit(_take(line, "culprit", dict, None)),
        rows=_wholes(line, "rows"),
        symptom=_culprit(_take(line, "symptom" if "symptom" in line else "follower", dict, default=None)),
    )
    decision = Decision(
        actions=tuple(_action(one) for one in _dicts(line, "actions")),
        rung=_whole(line, "rung", 0),
        gave_up=_take(line, "gave_up", str, None, default=None),
    )
    return Incident(
        id=_whole(line, "id"),
        anomaly=anomaly,
        diagnosis=diagnosis,
        decision=decision,
        rewound_to=None if line.get("rewound_to") is None else _whole(line, "rewound_to"),
        steps_lost=_whole(line, "steps_lost"),
        seconds=float(seconds),
        outcome=None if outcome is None else Outcome(outcome),
        drill=_take(line, "drill", str, default=""),
        trace=_whole(line, "trace", 0),
        further=_whole(line, "further", 0),
        again=tuple(_pair(one) for one in _take(line, "again", list, default=[])),
        tried=tuple(_arm(one) for one in _dicts(line, "tried")),
    )


def _pair(value: Any) -> tuple[int, int]:
    tick, step = _wholes({"again": value}, "again")
    return tick, step


def _line_of_action(action: Action) -> dict[str, Any]:
    line = {"remedy": action.remedy, **action.settings}
    return line | {"of": [list(map(_line_of_action, arm)) for arm in line["of"]]} if "of" in line else line


def _line_of(culprit: Culprit | None) -> dict[str, Any] | None:
    return None if culprit is None else {name: getattr(culprit, name) for name in Culprit.__slots__}


def _culprit(line: Mapping[str, Any] | None) -> Culprit | None:
    if line is None:
        return None
    words = {name: _take(line, name, str) for name in ("phase", "op", "module", "file")}
    return Culprit(**words, line=_whole(line, "line"), inputs=_dicts(line, "inputs"))


def _action(line: Mapping[str, Any]) -> Action:
    settings = {key: value for key, value in line.items() if key != "remedy"}
    if line.get("remedy") == TRIAL:
        arms = _take(line, "of", list)
        settings["of"] = tuple(tuple(_action(one) for one in _dicts({"of": arm}, "of")) for arm in arms)
    return Action(_take(line, "remedy", str), settings)


def _arm(line: Mapping[str, Any]) -> Tried:
    loss: Any = line.get("loss")  # text, where it is not finite
    return Tried(
        tuple(_action(one) for one in _dicts(line, "do")),
        _whole(line, "anomalies"),
        float(loss) if type(loss) in (int, float) else math.inf,
        _take(line, "won", bool),
    )


_NEEDED = object()


def _take(line: Mapping[str, Any], name: str, *kinds: type | None, default: Any = _NEEDED) -> Any:
    """Return a field whose type is exactly one of `kinds`, where None stands for null: a bool is not an int here."""
    value = line.get(name, default)
    if value is _NEEDED:
        raise ValueError(f"an incident lacks {name}")
    if (None if value is None else type(value)) not in (*kinds, *([None] if default is None else [])):
        raise ValueError(f"an incident cannot have {name}={value!r:.60}")
    return value


def _whole(line: Mapping[str, Any], name: str, default: Any = _NEEDED) -> int:
    value: int = _take(line, name, int, default=default)
    if value < 0:
        raise ValueError(f"an incident cannot have {name}={value}")
    return value


def _wholes(line: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(_whole({name: value}, name) for value in _take(line, name, list, default=[]))


def _dicts(line: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    return tuple(_take({name: value}, name, dict) for value in _take(line, name, list, default=[]))
