"""What a person reads of a run, in whole: in the log, on the terminal, in MLflow."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
from forged_checkpoints import manifest
from stories import BAD_ROW, BEGAN_MS, CLIMBED, PASSED, ROOT, free_text, incident

from resilient_train.command import incidents, status
from resilient_train.core.knobs import Knobs
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.lock import LOCK, DirectoryLock
from resilient_train.durable.manifest import sealed
from resilient_train.ground.types import (
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
from resilient_train.ground.wording import describe, tags
from resilient_train.report.story import read_story
from resilient_train.report.uploader import note

HALF = Action("lower_lr", {"factor": 0.5, "rewarm": 20})
LOG = Culprit("forward", "log", "", "/home/u/loss.py", 7, ({"dtype": "float32", "shape": [8], "min": -0.5},))
REMEDIES = (
    *(Action("rewind"), Action("skip"), Action("skip", {"updates": 4}), Action("quarantine"), Action("repeat")),
    *(Action("report"), Action("reset_moments"), HALF, Action("lower_lr", {"factor": 0.1}), Action("lower_lr")),
    *(Action("lower_lr", {"factor": 1, "rewarm": 50}), Action("limit_lr", {"to": 0.25}), Action("limit_lr", {"to": 1})),
    *(Action("limit_lr", {"to": 0.5, "leapt_to": 12.0}), Action("tighten_clip", {"factor": 0.5})),
    *(Action("limit_update", {"share": 0.01}), Action("limit_update", {"share": 0.5}), Action("mend_eps")),
    *(
        Action("armor"),
        Action("limit_update", {"share": 0.25}),
        Action("mine.Remedy", {"of_mine": 3, "exact": True}),
    ),
)
ARMS = (Tried(1.0, None, 1, 9.0), Tried(0.5, 1250, 3, 2.25, won=True), Tried(1.0, 1250, 0, 2.5))
PROCESS = {
    Signal.CRASH: ("go_on", 100),
    Signal.HANG: ("end", None),
    Signal.OUT_OF_MEMORY: ("smaller_batch", None),
    Signal.DISK_FULL: ("try_again", None),
    Signal.CHECKPOINT_FAILED: ("try_again", None),
    Signal.CHECKPOINT_DAMAGED: ("fall_back", None),
    Signal.EXCEPTION: ("skip", None),
}
KNOBS = Knobs(lr=0.5, clip=0.25, ceiling=0.5)
EFFECTS = {
    "knobs": KNOBS.state_dict(),
    "lasting": {"share": 0.01, "mends_eps": True},
    "quarantined": [[7, "bad", 9, 1], [3, "bad", 9, 1]],
    "micro_batch": 8,
    "skipped": [[0, 8]],
    "armor": [{"op": "log", "file": LOG.file, "line": LOG.line}],
}
NO_PROGRESS = {"first_loss": 2.5, "final_loss": 2.4, "verdict": "no_progress"}
LEVEL = {"best_level": {"from": 100, "to": 140, "loss": 1.25}, "final_loss": 2.0, "verdict": "above_best"}


def of(signal: Signal, cause: Cause, *actions: Action, landed: bool = True, **changed: Any) -> Incident:
    anomaly = Anomaly(signal, 160, 170, 156, free_text("said of it"), landed, changed.pop("ranks", ()))
    decision = Decision(actions, changed.pop("rung", 0), changed.pop("gave_up", None))
    diagnosis = Diagnosis(cause, free_text(f"Advice for {cause}."), **changed.pop("known", {}))
    return Incident(1, anomaly, diagnosis, decision, **{"outcome": Outcome.RECOVERED, **changed})


def remedies() -> Iterator[Incident]:
    """Every remedy, cause and outcome."""
    for action in REMEDIES:
        yield of(Signal.LOSS_SPIKE, Cause.EXPLOSION, action, rewound_to=125 if action.remedy == "rewind" else None)
    yield of(Signal.DIVERGENCE, Cause.RATE, Action("rewind"), HALF, rewound_to=1250, steps_lost=1, tried=ARMS)
    followed = {"culprit": ROOT.culprit, "symptom": LOG}
    yield of(Signal.NONFINITE_LOSS, Cause.OVERFLOW, Action("armor"), landed=False, known=followed, steps_lost=1)
    yield of(Signal.NONFINITE_LOSS, Cause.OPERATION, Action("armor"), landed=False, known={"culprit": LOG})
    for at, cause in enumerate(Cause):
        more = {"ranks": (1, 0, 3), "seconds": 1.5} if at % 2 else {"steps_lost": 1234}
        yield of(Signal.WEIGHTS_JUMP, cause, Action("skip"), known={"rows": (*range(at),)}, **more)
    for signal in Signal:
        yield of(signal, Cause.UNKNOWN, Action("report"), landed=signal is Signal.NO_PROGRESS)
    for outcome in (Outcome.RECURRED, Outcome.RECOVERED):
        yield of(Signal.NONFINITE_LOSS, Cause.UNKNOWN, Action("skip"), landed=False, outcome=outcome, further=2)


STORIES: dict[str, tuple[Sequence[Incident], dict[str, Any] | None]] = {
    "clean": ((), {"eval": {"loss": 2.375, "rmse": 0.5}, "final_loss": 2.5}),
    "remedies": ((*remedies(),), {"final_loss": 2.5}),
    "gave_up": (
        (
            incident(3),
            replace(incident(2, Outcome.UNRECOVERED), rewound_to=100),
            incident(4, Outcome.GAVE_UP, decision=Decision((), 1, free_text("no rung is left"))),
        ),
        {"status": "gave_up", "exit_code": 3, "why": "no rung is left"},
    ),
    "observed": (
        [
            replace(one, anomaly=replace(one.anomaly, landed=True), decision=Decision((Action("observe"),)))
            for one in (incident(at, Outcome.OBSERVED, further=at - 1, rewound_to=None) for at in (1, 2, 3))
        ],
        {},
    ),
    "process": (
        [
            of(signal, Cause.PROCESS, Action(remedy), rewound_to=to, outcome=outcome)
            for outcome in (Outcome.RECOVERED, Outcome.UNRECOVERED)
            for signal, (remedy, to) in PROCESS.items()
        ],
        {"status": "failed", "exit_code": 1, "why": "OSError: no space is left on the device"},
    ),
    "accepted": ([of(Signal.LOSS_SPIKE, Cause.EXPLOSION, Action("accepted"), rewound_to=120)], {"final_loss": 2.5}),
    "killed": ((incident(1), incident(3, None), incident(5, None, decision=Decision())), None),
    "stopped": ((incident(1), incident(3, None)), {"status": "preempted", "exit_code": 75}),
    "left": ((incident(1, Outcome.RECURRED),), {"status": "ended", "exit_code": 1}),
    "closed": ((incident(1),), {"status": "closed"}),
    "no_progress": ([of(Signal.NO_PROGRESS, Cause.RATE, Action("report"))], NO_PROGRESS),
    "above_best": ([incident(3, diagnosis=CLIMBED)], LEVEL),
    "unrecovered": ([incident(2, Outcome.UNRECOVERED, diagnosis=BAD_ROW), incident(5, diagnosis=PASSED)], {}),
    "recovering": ([incident(2, Outcome.RECURRED, diagnosis=BAD_ROW), incident(5, None, diagnosis=PASSED)], None),
    "refused": ((), {"status": "closed"}),
    "not_finite": ((), {"eval": {"loss": "nan"}}),
}


@pytest.fixture
def in_2025(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that stands, in UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        patch.setattr(time, "time_ns", lambda: BEGAN_MS * 1_000_000)
        time.tzset()
        yield
    time.tzset()


def write(run_dir: Path, met: Sequence[Incident], summary: dict[str, Any] | None) -> None:
    """Leave what a run of 300 steps with these incidents leaves."""
    place = run_dir / "checkpoints" / "step-00000250"
    place.mkdir(parents=True)
    effects = EFFECTS if len(met) > 5 else {"knobs": Knobs().state_dict()}
    (place / "manifest.json").write_bytes(sealed(replace(manifest(250, {}, tick=300), effects=effects)))
    (run_dir / "loop.json").write_text(json.dumps({"steps": 300}))
    book = IncidentLog(run_dir)
    for number, one in enumerate(met, start=1):
        opened = replace(one, id=number, outcome=None)
        book.add(opened)
        book.record_treatment(opened)
        if one.outcome is not None:
            book.close(opened, one.outcome)
    book.close_files()
    if run_dir.name == "refused":
        (run_dir / "refused.json").write_text(json.dumps({"exit_code": 2, "why": "model: no such option"}))
    if summary is not None:
        ended = {"status": "completed", "exit_code": 0, "steps": 300, "ticks": 320, **summary}
        (run_dir / "summary.json").write_text(json.dumps(ended))


@pytest.mark.usefixtures("careless", "in_2025", "here")
@pytest.mark.parametrize("name", STORIES)
def test_what_is_read_of_a_run(name: str, request: Any, caplog: Any, capsys: Any) -> None:
    """Each sentence is as it was."""
    with caplog.at_level(logging.INFO, "resilient_train"):
        write(Path(name), *STORIES[name])
    if name == "recovering":
        request.addfinalizer(DirectoryLock(Path(name)).release)
        (Path(name) / LOCK).write_text("process 7 on node1")
    said = {"logged": "\n".join(caplog.messages)}
    for verb in (status, incidents):
        code = verb.main([name])
        said[f"{verb.__name__}, exit code {code}"] = capsys.readouterr().out
    story = read_story(Path(name))
    said["note"] = note(story)
    said["tags"] = "\n".join(f"{key}: {text}" for key, text in tags(story.incidents, story.status).items())
    if story.status == "gave_up":
        said["last words"] = describe(story.incidents[-1], "final", last_good=Path("checkpoints/step-00000250"))
    whole = "\n".join(f"----- {part}\n\n{text.rstrip()}\n" for part, text in said.items())
    here = str(Path.cwd())
    golden.check(f"{name}.txt", whole.replace(here.replace("_", r"\_"), "/runs").replace(here, "/runs"))
