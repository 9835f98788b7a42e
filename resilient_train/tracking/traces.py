"""Incidents as traces of the run in MLflow: one for each, sent whole once its outcome is known.

A trace is one span. Its ids follow from the run and the incident, so what is sent twice meets itself. What people add
to a trace (tags, assessments) stays: a trace that is there is never sent again.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from resilient_train.record.incident_lines import in_words
from resilient_train.record.run_history import Chapter
from resilient_train.tracking.connection import cut
from resilient_train.types import Outcome
from resilient_train.wording import describe, printable

if TYPE_CHECKING:
    from mlflow.tracing.client import TracingClient

_TAGS = ("step", "signal", "cause", "drill", "outcome")  # of a trace, to filter a list by
_PREVIEW = 1000  # characters that MLflow's database has room for


def trace_id_of(run_id: str, incident_id: int) -> str:
    return "tr-" + hashlib.sha256(f"resilient_train/{run_id}/{incident_id}".encode()).hexdigest()[:32]


def upload(run_id: str, chapter: Chapter, client: TracingClient, experiment_id: str) -> None:
    """Make sure that MLflow has the trace of an incident whose outcome is known. It raises what goes wrong."""
    from mlflow.entities import Span, TraceInfo, TraceLocation, TraceState

    incident, began = chapter.incident, chapter.opened_ms
    ended = max(began, chapter.treated_ms or chapter.closed_ms or began)
    trace_id, line = trace_id_of(run_id, incident.id), in_words(incident)
    if _is_there(client, trace_id):
        return
    name = f"incident {incident.id}: {incident.anomaly.signal}"
    # What came back later has an incident of its own.
    state = "ERROR" if incident.outcome in (Outcome.UNRECOVERED, Outcome.GAVE_UP) else "OK"
    sign, handled = describe(incident, "sign"), describe(incident, "handled")
    known = {
        **line,
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": "WORKFLOW",
        "mlflow.spanInputs": sign,
        "mlflow.spanOutputs": handled,
    }
    span: dict[str, Any] = {
        "trace_id": b64encode(bytes.fromhex(trace_id[3:])).decode(),
        "span_id": b64encode(hashlib.sha256(f"{trace_id}/root".encode()).digest()[:8]).decode(),
        "parent_span_id": None,
        "name": name,
        "start_time_unix_nano": began * 1_000_000,
        "end_time_unix_nano": ended * 1_000_000,
        "events": [],
        "status": {"code": f"STATUS_CODE_{state}"},
        "attributes": {key: json.dumps(value) for key, value in known.items()},
    }
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=began,
        execution_duration=ended - began,
        state=TraceState(state),
        request_preview=cut(printable(sign), _PREVIEW),  # a database has no room for a zero either
        response_preview=cut(printable(handled), _PREVIEW),
        trace_metadata={"mlflow.sourceRun": run_id, "mlflow.trace_schema.version": "3"},
        tags={
            "mlflow.traceName": name,
            "resilience.incident": str(incident.id),
            **{f"resilience.{key}": str(line[key]) for key in _TAGS if line[key]},
        },
    )
    # The span first: as long as it is alone, it is sent again.
    try:
        client.log_spans(experiment_id, [Span.from_dict(span)])
    except NotImplementedError as error:
        if "could not identify" in str(error):  # no answer, and MLflow would remember that the server has none
            client.store._get_server_version.cache_clear()
            raise ConnectionError("the server does not tell its version") from None
        raise
    client.start_trace(info)


def _is_there(client: TracingClient, trace_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        # A span alone does not belong to the run yet.
        return "mlflow.sourceRun" in client.get_trace_info(trace_id).trace_metadata
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
