"""The parts of an incident as spans of a trace: when each was, what it went by, and what it came to. No MLflow here."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from resilient_train.record import surroundings
from resilient_train.record.journal import plain
from resilient_train.tracking.story import Chapter
from resilient_train.types import Culprit, Incident, Outcome
from resilient_train.wording import cured, describe_culprit, first_sign, list_remedies

_MOST_ROWS = 100  # that are listed

Told = tuple[Any, Any, dict[str, Any]]  # inputs, outputs, attributes


def name_of(incident: Incident) -> str:
    """What the trace and its root are called."""
    return f"incident {incident.id}: {incident.anomaly.signal}"


def is_bad(incident: Incident) -> bool:
    """Say whether what was done did not help."""
    return incident.outcome in (Outcome.RECURRED, Outcome.UNRECOVERED, Outcome.GAVE_UP)


def lasted(chapter: Chapter) -> tuple[int, int]:
    """When it began, and when the run went on or ended, in milliseconds since 1970."""
    began = min([chapter.opened_ms, *(one.began_ms for one in chapter.phases)])
    done = chapter.opened_ms if chapter.treated_ms is None else chapter.treated_ms
    return began, max([began, done, *(one.ended_ms for one in chapter.phases)])


def described(chapter: Chapter, trace_id: str) -> list[dict[str, Any]]:
    """Return the spans in the form that MLflow reads them back in, the root first."""
    incident = chapter.incident
    root = _number(trace_id, "root", 8)
    status = "STATUS_CODE_UNSET" if incident.outcome is None else f"STATUS_CODE_{'ERROR' if is_bad(incident) else 'OK'}"
    told = first_sign(incident), cured(incident), {"outcome": incident.outcome or "open", **_of_incident(incident)}
    made = [_span(trace_id, root, None, name_of(incident), "WORKFLOW", lasted(chapter), told, status)]
    seen: Counter[str] = Counter()
    for phase in chapter.phases:
        seen[phase.name] += 1
        number = _number(trace_id, f"{phase.name} {seen[phase.name]}", 8)
        about = _ABOUT.get(phase.name, _nothing)(incident)
        times = phase.began_ms, phase.ended_ms
        made.append(_span(trace_id, number, root, phase.name, "TASK", times, about, "STATUS_CODE_OK"))
    return made


def _span(
    trace_id: str,
    number: bytes,
    parent: bytes | None,
    name: str,
    kind: str,
    times: tuple[int, int],
    told: Told,
    status: str,
) -> dict[str, Any]:
    inputs, outputs, attributes = told
    values = {"mlflow.traceRequestId": trace_id, "mlflow.spanType": kind, **attributes}
    if inputs is not None:
        values["mlflow.spanInputs"] = inputs
    if outputs is not None:
        values["mlflow.spanOutputs"] = outputs
    return {
        "trace_id": _encoded(bytes.fromhex(trace_id.removeprefix("tr-"))),
        "span_id": _encoded(number),
        "parent_span_id": _encoded(parent) if parent else None,
        "name": name,
        "start_time_unix_nano": times[0] * 1_000_000,
        "end_time_unix_nano": times[1] * 1_000_000,
        "events": [],
        "status": {"code": status, "message": ""},
        "attributes": {key: json.dumps(plain(value)) for key, value in values.items()},
        "links": [],
    }


def _number(trace_id: str, name: str, size: int) -> bytes:
    return hashlib.sha256(f"{trace_id}/{name}".encode()).digest()[:size]


def _encoded(number: bytes) -> str:
    return base64.b64encode(number).decode()


# What each part is told by.


def _of_incident(incident: Incident) -> dict[str, Any]:
    anomaly = incident.anomaly
    return {
        "signal": anomaly.signal,
        "cause": incident.diagnosis.cause,
        "step": anomaly.step,
        "tick": anomaly.tick,
        "steps_lost": incident.steps_lost,
    }


def _detect(incident: Incident) -> Told:
    anomaly = incident.anomaly
    about: dict[str, Any] = {
        "signal": anomaly.signal,
        "evidence": anomaly.evidence,
        "landed": anomaly.landed,
        "trusted_until_step": anomaly.since,
    }
    if anomaly.ranks:
        about["ranks"] = anomaly.ranks
    return {"step": anomaly.step, "tick": anomaly.tick}, about, about


def _diagnose(incident: Incident) -> Told:
    diagnosis = incident.diagnosis
    about: dict[str, Any] = {"cause": diagnosis.cause}
    attributes: dict[str, Any] = {"cause": diagnosis.cause}
    if diagnosis.culprit is not None:
        about["culprit"] = describe_culprit(diagnosis.culprit)
        about["operands"] = diagnosis.culprit.inputs
        attributes |= _of_culprit(diagnosis.culprit)
    if diagnosis.symptom is not None:
        about["broke_this_time"] = describe_culprit(diagnosis.symptom)
    if diagnosis.rows:
        about["rows"] = attributes["rows"] = diagnosis.rows[:_MOST_ROWS]
        about["rows_in_all"] = len(diagnosis.rows)
    if incident.drill:
        about["on_purpose"] = attributes["drill"] = incident.drill
    if diagnosis.advice:
        about["advice"] = diagnosis.advice
    return {"signal": incident.anomaly.signal, "evidence": incident.anomaly.evidence}, about, attributes


def _of_culprit(culprit: Culprit) -> dict[str, Any]:
    return {
        "culprit": f"{culprit.file}:{culprit.line}",
        "op": culprit.op,
        "module": culprit.module,
        "pass": culprit.phase,
    }


def _decide(incident: Incident) -> Told:
    decision, cause = incident.decision, incident.diagnosis.cause
    if decision.gave_up is not None:
        return {"cause": cause}, {"gave_up": decision.gave_up}, {"gave_up": decision.gave_up}
    actions = [{"remedy": action.remedy, **action.settings} for action in decision.actions]
    about = {"actions": list_remedies(incident), "rung": decision.rung}
    return {"cause": cause}, about, {"actions": actions, "rung": decision.rung}


def _rewind(incident: Incident) -> Told:
    if incident.rewound_to is None:  # at the end of a run that gave up
        return None, "the newest verified state was put back and left on disk", {}
    about = {"rewound_to": incident.rewound_to, "steps_lost": incident.steps_lost}
    return {"from_step": incident.anomaly.step}, about, about


def _remedy(incident: Incident) -> Told:
    others = [
        (action.remedy, words)
        for action, words in zip(incident.decision.actions, list_remedies(incident), strict=True)
        if action.remedy != surroundings.REWIND
    ]
    return None, [words for _, words in others], {"remedies": [name for name, _ in others]}


def _resume(incident: Incident) -> Told:
    goes_on = incident.anomaly.step - 1 if incident.rewound_to is None else incident.rewound_to
    return {"from_step": goes_on}, "an update was accepted", {}


def _nothing(incident: Incident) -> Told:
    return None, None, {}


_ABOUT: Mapping[str, Callable[[Incident], Told]] = {
    surroundings.DETECT: _detect,
    surroundings.DIAGNOSE: _diagnose,
    surroundings.DECIDE: _decide,
    surroundings.REWIND: _rewind,
    surroundings.REMEDY: _remedy,
    surroundings.RESUME: _resume,
}
