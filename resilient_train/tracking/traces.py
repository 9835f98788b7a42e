"""Incidents as traces of the run in MLflow: one for each, sent whole once its outcome is known.

A trace is one span. Its ids follow from the run and the incident, so what is sent twice meets itself. What people add
to a trace (tags, assessments) stays: a trace that is there is never sent again.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from resilient_train.record.incident_lines import in_words
from resilient_train.record.run_history import Chapter
from resilient_train.tracking.connection import cut
from resilient_train.types import Incident, Outcome
from resilient_train.wording import describe, printable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import TraceInfo

_TAGS = ("step", "signal", "cause", "drill", "outcome")  # of a trace, to filter a list by
_PREVIEW = 1000  # characters that MLflow's database has room for
_PAGE = 500  # traces; a server returns no more at once


def trace_id_of(run_id: str, incident_id: int) -> str:
    return "tr-" + hashlib.sha256(f"resilient_train/{run_id}/{incident_id}".encode()).hexdigest()[:32]


class Traces:
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
        # The span first: as long as it is alone, the trace does not belong to the run and is sent again.
        try:
            self._client.log_spans(self._experiment_id, [Span.from_dict(_span(chapter, trace_id))])
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
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        incident, (began, ended) = chapter.incident, _lasted(chapter)
        line = in_words(incident)
        return TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=began,
            execution_duration=ended - began,
            state=TraceState(_state(incident)),
            request_preview=cut(
                printable(describe(incident, "sign")), _PREVIEW
            ),  # a database has no room for a zero either
            response_preview=cut(printable(describe(incident, "handled")), _PREVIEW),
            trace_metadata={"mlflow.sourceRun": self._run_id, "mlflow.trace_schema.version": "3"},
            tags={
                "mlflow.traceName": _name(incident),
                "resilience.incident": str(incident.id),
                **{f"resilience.{name}": str(line[name]) for name in _TAGS if line[name]},
            },
        )


def _span(chapter: Chapter, trace_id: str) -> dict[str, Any]:
    incident, (began, ended) = chapter.incident, _lasted(chapter)
    known = {
        **in_words(incident),
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": "WORKFLOW",
        "mlflow.spanInputs": describe(incident, "sign"),
        "mlflow.spanOutputs": describe(incident, "handled"),
    }
    return {
        "trace_id": b64encode(bytes.fromhex(trace_id.removeprefix("tr-"))).decode(),
        "span_id": b64encode(hashlib.sha256(f"{trace_id}/root".encode()).digest()[:8]).decode(),
        "parent_span_id": None,
        "name": _name(incident),
        "start_time_unix_nano": began * 1_000_000,
        "end_time_unix_nano": ended * 1_000_000,
        "events": [],
        "status": {"code": f"STATUS_CODE_{_state(incident)}", "message": ""},
        "attributes": {key: json.dumps(one) for key, one in known.items()},
        "links": [],
    }


def _state(incident: Incident) -> str:
    # What came back later has an incident of its own.
    return "ERROR" if incident.outcome in (Outcome.UNRECOVERED, Outcome.GAVE_UP) else "OK"


def _name(incident: Incident) -> str:
    return f"incident {incident.id}: {incident.anomaly.signal}"


def _lasted(chapter: Chapter) -> tuple[int, int]:
    """Return when its update was noticed, and when it was treated or closed, in milliseconds since 1970."""
    done = chapter.treated_ms or chapter.closed_ms or chapter.opened_ms
    return chapter.opened_ms, max(chapter.opened_ms, done)
