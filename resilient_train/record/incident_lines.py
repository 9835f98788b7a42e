"""An incident as a line of JSON: how incidents.jsonl and the journal hold it, and how it is read again."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from resilient_train.record.journal import plain
from resilient_train.secrets import masked_tree
from resilient_train.types import TRIAL, Action, Anomaly, Decision, Diagnosis, Incident, Tried
from resilient_train.wording import evidence_of, say

_hints = cache(typing.get_type_hints)
T = TypeVar("T")


def as_line(incident: Incident) -> dict[str, Any]:
    """Return an incident as incidents.jsonl and the journal hold it: first the documented keys, then the others."""
    anomaly, diagnosis, decision = incident.anomaly, incident.diagnosis, incident.decision
    line: dict[str, Any] = {
        "id": incident.id,
        "step": anomaly.step,
        "tick": anomaly.tick,
        "rank": min(anomaly.ranks, default=None),  # null: it began on all of them at once
        "signal": anomaly.signal,
        "cause": diagnosis.cause,
        "culprit": diagnosis.culprit and dataclasses.asdict(diagnosis.culprit),
        "rows": diagnosis.rows,
        "advice": diagnosis.advice,
        "actions": [_line_of_action(action) for action in decision.actions],
        "rewound_to": incident.rewound_to,
        "steps_lost": incident.steps_lost,
        "seconds": incident.seconds,
        "outcome": incident.outcome,
        "evidence": anomaly.evidence,
        "ranks": anomaly.ranks,
        "symptom": diagnosis.symptom and dataclasses.asdict(diagnosis.symptom),
        "since": anomaly.since,
        "landed": anomaly.landed,
        "rung": decision.rung,
        "gave_up": decision.gave_up,
        "drill": incident.drill,
    }
    if incident.is_observed or incident.further:
        line |= {"further": incident.further, "again": incident.again}
    if diagnosis.suspects:
        line["suspects"] = diagnosis.suspects
    if incident.tried:
        line["tried"] = [
            {"do": [*map(_line_of_action, one.actions)], "anomalies": one.anomalies, "loss": one.loss, "won": one.won}
            for one in incident.tried
        ]
    whole: dict[str, Any] = masked_tree(plain(line))
    return whole


def in_words(incident: Incident) -> dict[str, Any]:
    """Return its line with sentences in place of facts, as incidents.jsonl has it."""
    why, line = incident.decision.gave_up, as_line(incident)
    line |= {"advice": say(incident.diagnosis.advice), "evidence": evidence_of(incident.anomaly)}
    whole: dict[str, Any] = masked_tree({**line, "gave_up": say(why) if why is not None else None})
    return whole


def from_line(line: Any) -> Incident:
    """Return the incident of a line. Raises ValueError if it cannot be read; unknown keys are ignored."""
    try:
        return _record(
            Incident,
            line,
            anomaly=_record(Anomaly, line),
            diagnosis=_record(Diagnosis, {**line, "ranks": []}),  # `ranks` are those of the anomaly
            decision=_record(Decision, line),
            tried=tuple(map(_arm, line.get("tried", []))),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"an incident cannot be read: {error}") from None


def _line_of_action(action: Action) -> dict[str, Any]:
    line = {"remedy": action.remedy, **action.settings}
    return line | {"of": [list(map(_line_of_action, arm)) for arm in line["of"]]} if "of" in line else line


def _record(kind: type[T], line: Mapping[str, Any], **parts: Any) -> T:
    """Build a record from `parts` and, by the types of its other fields, from a line."""
    hints = _hints(kind)  # type: ignore[arg-type]
    names = [one.name for one in dataclasses.fields(kind) if one.name not in parts]  # type: ignore[arg-type]
    return kind(**parts, **{name: _value(hints[name], line[name]) for name in names if name in line})


def _value(kind: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _value(inner[0], value)
    if origin is tuple:
        return tuple(_value(inner[0], one) for one in value)
    if kind is Action:
        return _action(value)
    if origin is Mapping and not isinstance(value, dict):
        raise TypeError(f"{value!r} is no fact")
    if dataclasses.is_dataclass(kind):
        return _record(kind, value)  # type: ignore[arg-type]
    is_enum = isinstance(kind, type) and issubclass(kind, StrEnum)
    return kind(value) if is_enum else value


def _arm(line: Mapping[str, Any]) -> Tried:
    loss = line.get("loss")  # text, where it is not finite
    number = loss if type(loss) in (int, float) else math.inf
    return _record(Tried, {**line, "actions": line.get("do")}, loss=number)


def _action(line: Mapping[str, Any]) -> Action:
    settings = {key: value for key, value in line.items() if key != "remedy"}
    if line.get("remedy") == TRIAL:
        settings["of"] = tuple(tuple(map(_action, arm)) for arm in settings["of"])
    return Action(line["remedy"], settings)
