"""Incidents as traces of the run in MLflow: of each there is one, however often and by whomever it is shown.

Trace, spans and verdict have names that follow from the run and the incident, so what is sent again meets itself. What
people add beside that (tags, assessments) is never sent, and so never overwritten; nor are tags of ours that they
changed. Everything raises: who delivers tries again. How long a server is waited for is up to MLflow's environment.

Servers: from 3.14 on nothing is lacking. Older ones keep what the list showed first, as they would refuse or replace
what people have added; spans, outcome and verdict are right there, too. Before 3.4, or without a database, spans
become a file among the artifacts. Before 3.3 the server chooses the names of traces, and none are sent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from resilient_train.tracking import spans
from resilient_train.tracking.store import shown
from resilient_train.tracking.story import Chapter
from resilient_train.wording import cured, describe_outcome, first_sign, printable

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo
    from mlflow.store.tracking.abstract_store import AbstractStore

OUTCOME = "resilience.outcome"  # the one tag that changes
VERDICT = "recovered"  # the name of the feedback
_BY = "resilient_train"

_SOURCE_RUN, _SCHEMA, _TOLD = "mlflow.sourceRun", "mlflow.trace_schema.version", "resilience.told"
_PLACE, _IN_DATABASE, _IN_ARCHIVE, _ARTIFACTS = (
    *("mlflow.trace.spansLocation", "TRACKING_STORE", "ARCHIVE_REPO"),
    "mlflow.artifactLocation",
)
_NAMES_OF_OURS, _TAKES_SPANS, _ADDS = (3, 3), (3, 4), (3, 14)  # since when servers do
_PREVIEW = 1000  # characters that a database has room for

Version = tuple[int, int]


def trace_id_of(run_id: str, incident_id: int) -> str:
    """Return the one name of an incident's trace."""
    return "tr-" + _hex(f"resilient_train/{run_id}/{incident_id}", 32)


class Traces:
    """The traces of one run, in the store at an address."""

    def __init__(self, tracking_uri: str, experiment_id: str, run_id: str) -> None:
        from mlflow.tracing.client import TracingClient

        # The store itself: the client would count its calls for the makers of MLflow, in a thread.
        self._store: AbstractStore = TracingClient(tracking_uri).store
        self._uri, self._experiment_id, self._run_id = tracking_uri, experiment_id, run_id

    def show(self, chapter: Chapter) -> str:
        """Let MLflow hold the trace of an incident as it is now; return its name. One that is not treated can wait."""
        trace_id = trace_id_of(self._run_id, chapter.incident.id)
        if chapter.treated_ms is None and chapter.closed_ms is None:
            return trace_id
        if self._version is not None and self._version < _NAMES_OF_OURS:
            raise NotImplementedError(f"traces need an MLflow server of 3.3 or newer, and {shown(self._uri)} is older")
        known, wanted = self._known(trace_id), self._wanted(chapter, trace_id)
        if known is None or known.trace_metadata.get(_TOLD) != wanted.trace_metadata[_TOLD]:
            known = self._tell(chapter, known, wanted)
        self._judge(chapter, known)
        return trace_id

    @cached_property
    def _version(self) -> Version | None:
        """Of the server, or of MLflow here where there is none between; null where a server does not tell."""
        from mlflow import __version__
        from mlflow.utils.rest_utils import http_request

        creds = getattr(self._store, "get_host_creds", None)
        if creds is None:
            return _version_in(__version__)
        ask: Any = http_request  # it has no types
        answer = ask(creds(), "/version", "GET", max_retries=0, raise_on_status=False)
        if answer.status_code >= 500:
            raise ConnectionError(f"the server answers {answer.status_code}")
        return _version_in(answer.text) if answer.status_code == 200 else None

    def _known(self, trace_id: str) -> TraceInfo | None:
        from mlflow.exceptions import MlflowException

        try:
            return self._store.get_trace_info(trace_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _wanted(self, chapter: Chapter, trace_id: str) -> TraceInfo:
        """The trace as MLflow is to hold it, with a digest of everything that is told by it."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        incident, (began, ended) = chapter.incident, spans.lasted(chapter)
        is_open = incident.outcome is None and (self._version or (0, 0)) >= _TAKES_SPANS
        state = TraceState.IN_PROGRESS if is_open else TraceState.ERROR if spans.is_bad(incident) else TraceState.OK
        request, response = _cut(first_sign(incident)), _cut(cured(incident))
        told = json.dumps([request, response, state.value, spans.described(chapter, trace_id)])
        return TraceInfo(
            trace_id=trace_id,
            trace_location=TraceLocation.from_experiment_id(self._experiment_id),
            request_time=began,
            execution_duration=ended - began,
            state=state,
            request_preview=request,
            response_preview=response,
            trace_metadata={_SOURCE_RUN: self._run_id, _SCHEMA: "3", _TOLD: _hex(told, 16)},
            tags=_tags(chapter),
        )

    def _tell(self, chapter: Chapter, known: TraceInfo | None, wanted: TraceInfo) -> TraceInfo:
        """Send spans first: they make the trace, if it is new, and a state of theirs is corrected by what follows."""
        from mlflow.entities import Span

        is_whole = known is not None and _SOURCE_RUN in known.trace_metadata  # else one died between these steps
        if known is not None and known.tags.get(_PLACE) == _IN_ARCHIVE:  # years later: spans cannot be changed there
            return self._retagged(known, wanted)
        made = [Span.from_dict(one) for one in spans.described(chapter, wanted.trace_id)]
        adds = known is not None and known.tags.get(_PLACE) == _IN_DATABASE and (self._version or (0, 0)) >= _ADDS
        if is_whole and not adds and chapter.incident.outcome is None:
            made = made[1:]  # the root would end the trace, and nothing here could open it again
        has_taken = self._log(made)
        if known is None or not is_whole:
            info = self._store.start_trace(wanted)
        elif adds:
            wanted.tags = _to_set(known, wanted)
            info = self._store.start_trace(wanted)
        else:
            info = self._retagged(known, wanted)
        if info.tags.get(_PLACE) != _IN_DATABASE:
            self._upload(info, made)
        elif not has_taken:
            raise ConnectionError("the server has taken spans of this trace before, and does not now")
        return info

    def _log(self, made: list[Span]) -> bool:
        """Send spans; False where the server has no place for them."""
        from mlflow.exceptions import MlflowException

        try:
            self._store.log_spans(self._experiment_id, made)
        except NotImplementedError:
            if (self._version or (0, 0)) < _TAKES_SPANS:
                return False
            # It has asked for the version once more, got no answer, and would believe for ever that there is none.
            forget = getattr(getattr(self._store, "_get_server_version", None), "cache_clear", lambda: None)
            forget()
            raise ConnectionError("the server does not tell its version any more") from None
        except MlflowException as error:
            if "span logging is not supported" in str(error):
                return False
            raise
        return True

    def _upload(self, info: TraceInfo, made: list[Span]) -> None:
        """Put spans among the artifacts, where servers look that keep them in no database."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        repository = get_artifact_repository(info.tags[_ARTIFACTS], tracking_uri=self._uri)
        repository.upload_trace_data(json.dumps({"spans": [one.to_dict() for one in made]}))

    def _retagged(self, known: TraceInfo, wanted: TraceInfo) -> TraceInfo:
        for key, value in _to_set(known, wanted).items():
            self._store.set_trace_tag(known.trace_id, key, value)
        return known

    def _judge(self, chapter: Chapter, known: TraceInfo) -> None:
        """Add the verdict once it is known. It has a name of its own, so of two that add it at once one is refused."""
        from mlflow.entities import AssessmentSource, Feedback
        from mlflow.exceptions import MlflowException

        incident = chapter.incident
        verdict_id = "a-" + _hex(f"{known.trace_id}/verdict", 32)
        if incident.outcome is None or _is_judged(known.assessments, verdict_id):
            return
        verdict = Feedback(
            name=VERDICT,
            value=not spans.is_bad(incident),
            rationale=printable(" ".join(describe_outcome(incident).split())),
            source=AssessmentSource("CODE", _BY),
            trace_id=known.trace_id,
            create_time_ms=chapter.closed_ms,
        )
        verdict.assessment_id = verdict_id
        try:
            self._store.create_assessment(verdict)
        except MlflowException:
            again = self._known(known.trace_id)
            if again is None or not _is_judged(again.assessments, verdict_id):
                raise


def _tags(chapter: Chapter) -> dict[str, str]:
    incident = chapter.incident
    return {
        "mlflow.traceName": spans.name_of(incident),
        "resilience.incident": str(incident.id),
        "resilience.step": str(incident.anomaly.step),
        "resilience.signal": str(incident.anomaly.signal),
        "resilience.cause": str(incident.diagnosis.cause),
        **({"resilience.drill": incident.drill} if incident.drill else {}),
        OUTCOME: str(incident.outcome or "open"),
    }


def _to_set(known: TraceInfo, wanted: TraceInfo) -> dict[str, str]:
    """The tags that are lacking, and the outcome while it is ours: what a person has changed is theirs."""
    mine = {key: value for key, value in wanted.tags.items() if key not in known.tags}
    return {**mine, OUTCOME: wanted.tags[OUTCOME]} if known.tags.get(OUTCOME, "open") == "open" else mine


def _is_judged(assessments: Iterable[Assessment], verdict_id: str) -> bool:
    """Say whether the verdict is there; a server may have given it a name of its own."""
    return any(
        one.assessment_id == verdict_id or (one.name == VERDICT and one.source.source_id == _BY) for one in assessments
    )


def _cut(text: str) -> str:
    text = printable(text)  # nor has a database room for a byte of zero
    return text if len(text) <= _PREVIEW else text[: _PREVIEW - 3] + "..."


def _version_in(text: str) -> Version | None:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _hex(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
