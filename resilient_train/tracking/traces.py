"""Incidents as traces of the run in MLflow: one for each, sent whole once its outcome is known.

Trace and spans have ids that follow from the run and the incident, so what is sent twice meets itself. What people add
to a trace (tags, assessments) stays: a trace that is there is never sent again.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from resilient_train.record import surroundings
from resilient_train.record.journal import plain
from resilient_train.tracking.connection import cut
from resilient_train.tracking.report import HARMFUL, IncidentView
from resilient_train.tracking.story import Chapter
from resilient_train.types import Incident
from resilient_train.wording import describe_outcome, describe_treatment, first_sign, list_remedies, printable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import TraceInfo

OUTCOME = "outcome"  # the name of the feedback; a tag of the trace is called resilience.outcome

_MOST_ROWS = 100  # that are listed
_PREVIEW = 1000  # characters that MLflow's database has room for
_PAGE = 500  # traces; a server returns no more at once


def trace_id_of(run_id: str, incident_id: int) -> str:
    """Return the id of an incident's trace."""
    return "tr-" + _hex(f"resilient_train/{run_id}/{incident_id}", 32)


class Traces:
    """The traces of one run."""

    def __init__(self, client: MlflowClient, tracking_uri: str, experiment_id: str, run_id: str) -> None:
        from mlflow.tracing.client import TracingClient

        self._search, self._client = client, TracingClient(tracking_uri)
        self._uri, self._experiment_id, self._run_id = tracking_uri, experiment_id, run_id
        self._there: set[str] | None = None  # None: not known, or an answer was lost

    def upload(self, chapter: Chapter) -> None:
        """Make sure that MLflow has the trace of an incident whose outcome is known. It raises what goes wrong."""
        from mlflow.entities import Span

        if self._there is None:
            self._there = set(self._list())
        trace_id = trace_id_of(self._run_id, chapter.incident.id)
        if trace_id in self._there:
            return
        there, self._there = self._there, None  # until the answer
        # Spans first: as long as they are alone, the trace does not belong to the run and is sent again.
        try:
            self._client.log_spans(self._experiment_id, [Span.from_dict(one) for one in _spans(chapter, trace_id)])
        except NotImplementedError as error:
            if "could not identify" in str(error):  # no answer, and MLflow would remember that the server has none
                forget = getattr(getattr(self._client.store, "_get_server_version", None), "cache_clear", None)
                if forget is not None:
                    forget()
                raise ConnectionError(f"{self._uri} does not tell its version") from None
            raise NotImplementedError(f"traces need an MLflow server of 3.4 or newer ({self._uri})") from None
        self._client.start_trace(self._info(chapter, trace_id))
        there.add(trace_id)
        self._there = there

    def _list(self) -> Iterator[str]:
        token = None
        while True:
            page = self._search.search_traces(
                locations=[self._experiment_id],
                run_id=self._run_id,
                max_results=_PAGE,
                page_token=token,
                include_spans=False,
            )
            yield from (one.info.trace_id for one in page)
            if not (token := page.token):
                return

    def _info(self, chapter: Chapter, trace_id: str) -> TraceInfo:
        from mlflow.entities import AssessmentSource, Feedback, TraceInfo, TraceLocation, TraceState

        incident, (began, ended) = chapter.incident, _lasted(chapter)
        view = IncidentView.of(chapter)
        feedback = Feedback(
            name=OUTCOME,
            value=view.outcome,
            rationale=printable(" ".join(describe_outcome(incident).split())),
            source=AssessmentSource("CODE", "resilient_train"),
            trace_id=trace_id,
            create_time_ms=chapter.closed_ms,
        )
        feedback.assessment_id = "a-" + _hex(f"{trace_id}/outcome", 32)
        return TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=began,
            execution_duration=ended - began,
            state=TraceState(_state(incident)),
            request_preview=cut(printable(first_sign(incident)), _PREVIEW),  # a database has no room for a zero either
            response_preview=cut(printable(describe_treatment(incident)), _PREVIEW),
            trace_metadata={"mlflow.sourceRun": self._run_id, "mlflow.trace_schema.version": "3"},
            tags={
                "mlflow.traceName": _name(chapter),
                "resilience.incident": str(incident.id),
                "resilience.step": str(incident.anomaly.step),
                "resilience.signal": str(incident.anomaly.signal),
                "resilience.cause": str(incident.diagnosis.cause),
                **({"resilience.drill": incident.drill} if incident.drill else {}),
                "resilience.outcome": str(incident.outcome),
            },
            assessments=[feedback],
        )


def _spans(chapter: Chapter, trace_id: str) -> Iterator[dict[str, Any]]:
    """Yield the spans in the form that MLflow reads them back in: the incident, then each part of its treatment."""
    incident, facts, seen = chapter.incident, _facts(chapter), Counter[str]()
    root = _id_of(f"{trace_id}/root")
    known: dict[str, Any] = {"outcome": incident.outcome, "cause": incident.diagnosis.cause}
    known |= {"mlflow.spanType": "WORKFLOW", "mlflow.spanInputs": first_sign(incident)}
    known |= {"mlflow.spanOutputs": describe_treatment(incident)}
    whole = _span(trace_id, root, _name(chapter), _lasted(chapter), known)
    yield whole | {"status": {"code": f"STATUS_CODE_{_state(incident)}", "message": ""}}
    for phase in chapter.phases:
        seen[phase.name] += 1
        known = {"mlflow.spanType": "TASK", **facts.get(phase.name, {})}
        known |= {"mlflow.spanOutputs": facts[phase.name]} if facts.get(phase.name) else {}
        number = _id_of(f"{trace_id}/{phase.name} {seen[phase.name]}")
        yield _span(trace_id, number, phase.name, (phase.began_ms, phase.ended_ms), known) | {"parent_span_id": root}


def _span(trace_id: str, number: str, name: str, times_ms: tuple[int, int], known: Mapping[str, Any]) -> dict[str, Any]:
    known = {"mlflow.traceRequestId": trace_id, **known}
    return {
        "trace_id": base64.b64encode(bytes.fromhex(trace_id.removeprefix("tr-"))).decode(),
        "span_id": number,
        "parent_span_id": None,
        "name": name,
        "start_time_unix_nano": times_ms[0] * 1_000_000,
        "end_time_unix_nano": times_ms[1] * 1_000_000,
        "events": [],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {key: json.dumps(plain(one)) for key, one in known.items()},
        "links": [],
    }


def _state(incident: Incident) -> str:
    return "ERROR" if incident.outcome in HARMFUL else "OK"


def _facts(chapter: Chapter) -> dict[str, dict[str, Any]]:
    incident, view = chapter.incident, IncidentView.of(chapter)
    anomaly, diagnosis, decision = incident.anomaly, incident.diagnosis, incident.decision
    actions = list(zip(decision.actions, list_remedies(incident), strict=True))
    facts: dict[str, dict[str, Any]] = {
        surroundings.DETECT: {
            "signal": anomaly.signal,
            "evidence": anomaly.evidence,
            "step": anomaly.step,
            "tick": anomaly.tick,
            "reached the weights": anomaly.landed,
            "trusted until step": anomaly.since,
            "ranks": anomaly.ranks,
        },
        surroundings.DIAGNOSE: {
            "cause": diagnosis.cause,
            "culprit": view.culprit,
            "operands": () if diagnosis.culprit is None else diagnosis.culprit.inputs,
            "broke this time": view.symptom,
            "rows": diagnosis.rows[:_MOST_ROWS],
            "rows in all": len(diagnosis.rows) or None,
            "drill": incident.drill,
            "advice": view.advice,
        },
        surroundings.DECIDE: {
            "gave up": decision.gave_up,
            "actions": [words for _, words in actions],
            "rung": decision.rung,
        },
        surroundings.REWIND: {"from step": anomaly.step, "to step": incident.rewound_to, "lost": incident.steps_lost},
        surroundings.REMEDY: {
            "remedies": [said for one, said in actions if one.remedy != surroundings.REWIND],
            "tried": view.arms,
        },
    }
    return {
        part: {key: value for key, value in known.items() if value not in (None, "", (), [])}
        for part, known in facts.items()
    }


def _name(chapter: Chapter) -> str:
    return f"incident {chapter.incident.id}: {chapter.incident.anomaly.signal}"


def _lasted(chapter: Chapter) -> tuple[int, int]:
    """Return when it began, and when training continued or ended, in milliseconds since 1970."""
    began = min([chapter.opened_ms, *(one.began_ms for one in chapter.phases)])
    done = chapter.opened_ms if chapter.treated_ms is None else chapter.treated_ms
    return began, max([began, done, *(one.ended_ms for one in chapter.phases)])


def _id_of(name: str) -> str:
    return base64.b64encode(hashlib.sha256(name.encode()).digest()[:8]).decode()


def _hex(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
