"""Each incident is one trace in MLflow, whoever uploads it and however often; what people add to it stays."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flaky_mlflow import free_port
from stories import free_text

from resilient_train.durable.run_history import Chapter
from resilient_train.ground.types import Action, Anomaly, Cause, Culprit, Decision, Diagnosis, Incident, Outcome, Signal
from resilient_train.report import uploader as traces
from resilient_train.report.connection import ENVIRONMENT
from resilient_train.report.uploader import trace_id_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Trace

EXPERIMENT = "traces"
AT = 1_760_000_000_000  # ms since 1970
CULPRIT = Culprit("forward", "log", "net.head", "mine.py", 31, ({"name": "x", "min": -float("inf"), "shape": [2, 3]},))
POISON = Incident(
    id=3,
    anomaly=Anomaly(Signal.NONFINITE_LOSS, 1204, 1310, 1203, free_text("loss nan"), landed=False, ranks=(1,)),
    diagnosis=Diagnosis(Cause.DATA, free_text("Take the logarithm of something positive."), CULPRIT, rows=(17, 90_000)),
    decision=Decision((Action("rewind"), Action("lower_lr", {"factor": 0.5, "rewarm": 20})), rung=1),
    rewound_to=1177,
    steps_lost=27,
    seconds=0.5,
)
TREATED = Chapter(POISON, AT + 300, treated_ms=AT + 500)
CLOSED = dataclasses.replace(
    TREATED, incident=dataclasses.replace(POISON, outcome=Outcome.RECOVERED), closed_ms=AT + 9_000
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where traces are uploaded: short waits, no retries."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@dataclasses.dataclass
class Place:
    uri: str
    client: MlflowClient
    experiment_id: str
    run_id: str

    def upload(self, chapter: Chapter) -> str:
        upload_to(self.uri, chapter, self.run_id, self.experiment_id)
        return trace_id_of(self.run_id, chapter.incident.id)

    def found(self, filter_string: str | None = None) -> list[Trace]:
        return list(
            self.client.search_traces(
                locations=[self.experiment_id], run_id=self.run_id, filter_string=filter_string, include_spans=False
            )
        )

    def read(self, number: int = 3) -> Trace:
        trace: Trace = self.client.get_trace(trace_id_of(self.run_id, number))
        return trace


def upload_to(uri: str, chapter: Chapter, run_id: str = "abc", experiment_id: str = "1") -> None:
    from mlflow.tracing.client import TracingClient

    traces.upload_trace(run_id, chapter, TracingClient(uri), experiment_id)


def placed(uri: str) -> Place:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = client.create_experiment(EXPERIMENT, "mlflow-artifacts:/") if known is None else known.experiment_id
    return Place(uri, client, experiment_id, client.create_run(experiment_id).info.run_id)


@pytest.fixture
def place(server: str) -> Place:
    return placed(server)


def test_a_name_follows_from_run_and_incident() -> None:
    """Whoever asks; and it has the form that OpenTelemetry wants."""
    assert trace_id_of("abc", 3) == trace_id_of("abc", 3) == "tr-f2e3a7abc16d0234912676a7b50ff82c"
    assert len({trace_id_of(run, number) for run in ("abc", "abd") for number in range(1, 500)}) == 998


def test_a_trace_tells_the_incident(place: Place) -> None:
    """Its list entry in plain sentences, and the whole incident as a span."""
    place.upload(CLOSED)
    trace = place.read()
    info = trace.info
    assert info.state == "OK"
    assert (info.request_time, info.execution_duration) == (AT + 300, 200)
    assert info.tags["mlflow.traceName"] == "incident 3: nonfinite_loss"
    assert info.trace_metadata["mlflow.sourceRun"] == place.run_id
    assert info.request_preview == (
        "step 1,204: the loss is not finite on rank 1 (nonfinite_loss), refused before it reached the weights; loss nan"
    )
    assert info.response_preview == (
        "cause data (log in net.head, mine.py:31, forward; rows 17 and 90000); rewound to step 1,177 "
        "(verified), learning rate x0.5 with 20 steps of warm-up, in 0.50 s; 27 steps lost; recovered"
    )
    ours = {key: value for key, value in info.tags.items() if key.startswith("resilience.")}
    assert ours == {
        "resilience.incident": "3",
        "resilience.step": "1204",
        "resilience.signal": "nonfinite_loss",
        "resilience.cause": "data",
        "resilience.outcome": "recovered",
    }
    (root,) = trace.data.spans
    assert root.name == "incident 3: nonfinite_loss"
    assert (root.parent_id, root.start_time_ns, root.end_time_ns) == (None, (AT + 300) * 10**6, (AT + 500) * 10**6)
    assert (root.inputs, root.outputs) == (info.request_preview, info.response_preview)
    known = root.attributes
    assert (known["evidence"], known["ranks"], known["rows"]) == ("loss nan", [1], [17, 90_000])
    assert known["culprit"]["op"] == "log"
    assert known["culprit"]["inputs"] == [{"name": "x", "min": "-inf", "shape": [2, 3]}]
    assert known["actions"][1] == {"remedy": "lower_lr", "factor": 0.5, "rewarm": 20}
    assert (known["rung"], known["rewound_to"], known["steps_lost"]) == (1, 1177, 27)


def test_what_was_never_cured_is_an_error(place: Place) -> None:
    """What came back later was retried with success; each is found by its cause and outcome, as the page filters."""
    table = [(4, Outcome.RECURRED, "OK"), (5, Outcome.UNRECOVERED, "ERROR"), (6, Outcome.GAVE_UP, "ERROR")]
    place.upload(CLOSED)
    for number, outcome, state in table:
        one = dataclasses.replace(POISON, id=number, diagnosis=Diagnosis(Cause.EXPLOSION), outcome=outcome)
        chapter = dataclasses.replace(CLOSED, incident=one)
        if outcome is Outcome.GAVE_UP:
            one = dataclasses.replace(one, decision=Decision(gave_up=free_text("no rung left")), rewound_to=None)
            chapter = dataclasses.replace(chapter, incident=one, treated_ms=None)
        place.upload(chapter)
        (trace,) = place.found(f"tags.`resilience.outcome` = '{outcome}'")
        assert trace.info.state == state
        assert trace.info.tags["resilience.incident"] == str(number)
    (trace,) = place.found("tags.`resilience.cause` = 'data' AND tags.`resilience.signal` = 'nonfinite_loss'")
    assert trace.info.tags["resilience.incident"] == "3"


def test_uploaded_again_it_is_one_trace_and_what_people_add_stays(tmp_path: Path, empty_store: Path) -> None:
    """Assessments, tags, and a cause that somebody has put right; straight in a database, without a server."""
    from mlflow.entities import AssessmentSource, Feedback
    from mlflow.tracing.client import TracingClient

    place = placed(f"sqlite:///{shutil.copy(empty_store, tmp_path)}")
    trace_id, client = place.upload(CLOSED), TracingClient(place.uri)
    client.set_trace_tag(trace_id, "seen by", "Ada")
    client.set_trace_tag(trace_id, "resilience.cause", "operation")
    mine = Feedback(name="useful", value=4, source=AssessmentSource("HUMAN", "ada"), rationale="it was the row")
    client.log_assessment(trace_id, mine)
    for _ in range(2):
        place.upload(CLOSED)
        (trace,) = place.found()
        assert trace.info.tags["seen by"] == "Ada"
        assert trace.info.tags["resilience.cause"] == "operation"
        assert trace.info.tags["resilience.outcome"] == "recovered"
        assert [one.name for one in trace.info.assessments] == ["useful"]


def test_a_preview_is_one_printable_line_of_bounded_length(place: Place) -> None:
    """Evidence may hold line breaks, and more than a database has room for."""
    crash = Incident(
        1,
        Anomaly(
            Signal.CRASH, 5, 5, 4, free_text("the previous process died during update 5\nwithout logging" + "x" * 5000)
        ),
        Diagnosis(Cause.PROCESS),
        Decision((Action("go_on"),)),
        outcome=Outcome.RECOVERED,
    )
    place.upload(Chapter(crash, AT, treated_ms=AT + 7, closed_ms=AT + 9))
    trace = place.read(1)
    preview = trace.info.request_preview or ""
    assert preview.startswith("step 5: the process died (crash); the previous process")
    assert len(preview) == 1000, "what a database has room for"


def test_two_uploaders_at_once_leave_one_of_each(place: Place) -> None:
    """Errors are for the uploader, which retries."""
    ready = threading.Barrier(3)

    def upload() -> None:
        ready.wait()
        for _ in range(5):
            with contextlib.suppress(Exception):
                place.upload(CLOSED)
                break

    threads = [threading.Thread(target=upload) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    place.upload(CLOSED)
    assert len(place.found()) == 1
    assert len(place.read().data.spans) == 1


def test_errors_come_out_and_nothing_is_left_running() -> None:
    """A server that is not there is reported at once; no thread, no provider of OpenTelemetry."""
    from opentelemetry import trace

    before, provider = threading.active_count(), trace._TRACER_PROVIDER
    started, port = time.monotonic(), free_port()
    address = f"http://127.0.0.1:{port}"
    with pytest.raises(Exception, match=str(port)):
        upload_to(address, CLOSED)
    assert time.monotonic() - started < 30
    assert threading.active_count() == before
    assert trace._TRACER_PROVIDER is provider


class Older(http.server.BaseHTTPRequestHandler):
    """A server of MLflow 3.3, without a trace."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/version" else 404)
        self.end_headers()
        self.wfile.write(b"3.3.0" if self.path == "/version" else b'{"error_code": "RESOURCE_DOES_NOT_EXIST"}')

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_server_that_takes_no_spans_gets_no_traces() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Older) as older:
        threading.Thread(target=older.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{older.server_port}"
        with pytest.raises(NotImplementedError, match=r"less than 3\.4"):
            upload_to(address, CLOSED)
        older.shutdown()
