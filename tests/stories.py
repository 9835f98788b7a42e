"""Stories of runs, made up: incidents of all kinds, in any number, with any words in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forged_checkpoints import manifest

from resilient_train.durable.endings import RunFacts, status_of
from resilient_train.durable.manifest import Entry
from resilient_train.ground.types import (
    Action,
    Anomaly,
    Cause,
    Culprit,
    Decision,
    Diagnosis,
    Facts,
    Incident,
    Outcome,
    Signal,
    fact,
)
from resilient_train.report.story import Story

BEGAN_MS = 1_763_694_845_000
RUN = Path("/data/runs/gpt-python_source-balanced-3fa1")


def free_text(words: str) -> Facts:
    return fact("text", text=words)


ROOT = Diagnosis(
    Cause.OPERATION,
    free_text("`sqrt` at culprits.py:33 has an infinite slope at 0: add an epsilon inside, or mask those elements."),
    Culprit("backward", "sqrt", "model.norm", "/home/u/examples/culprits.py", 33, ({"dtype": "float32", "min": 0.0},)),
)
BAD_ROW = Diagnosis(Cause.DATA, free_text("Row 77: element 0 at [2] is NaN; fix or remove it."), rows=(77,))
CLIMBED = Diagnosis(
    Cause.EXPLOSION, free_text("The loss jumped and stayed there: lower the learning rate, or clip tighter.")
)
FLIPPED = Diagnosis(
    Cause.CORRUPTION, free_text("`w` went from 0.02 to 1e+37 at [7]: if it returns, suspect the hardware.")
)
PASSED = Diagnosis(Cause.TRANSIENT, fact("passed_on_replay"))

_KINDS = (
    (Signal.NONFINITE_GRAD, ROOT, (Action("armor"),), None),
    (Signal.NONFINITE_BATCH, BAD_ROW, (Action("quarantine"),), None),
    (Signal.LOSS_SPIKE, CLIMBED, (Action("rewind"), Action("lower_lr", {"factor": 0.5})), 125),
    (Signal.WEIGHTS_JUMP, FLIPPED, (Action("rewind"),), 125),
    (Signal.NONFINITE_LOSS, PASSED, (Action("repeat"),), None),
)


def incident(number: int, outcome: Outcome | None = Outcome.RECOVERED, **changed: Any) -> Incident:
    signal, diagnosis, actions, back = _KINDS[(number - 1) % len(_KINDS)]
    step = 150 + number
    anomaly = Anomaly(
        signal, step, step + 10, step - 3, free_text("loss 8.12 where 2.9 to 3.4 was usual"), landed=back is not None
    )
    made = Incident(number, anomaly, diagnosis, Decision(actions), back, 38 if back else 1, 0.25, outcome)
    return replace(made, **changed)


def story(*incidents: Incident, **changed: Any) -> Story:
    newest = Entry(RUN / "checkpoints" / "step-00000250", manifest(250, {}, tick=300))
    summary = changed.get("summary", {})
    written = {"exit_code": 0, **summary} if summary else {}
    status = status_of(RunFacts(incidents=incidents, summary=written, process="process 7"))
    made = Story(
        directory=RUN,
        incidents=tuple(replace(one, at=BEGAN_MS + one.id * 600_000) for one in incidents),
        status=status.status,
        state=status.state,
        exit_code=status.exit_code,
        step=260,
        tick=260 + sum(one.steps_lost for one in incidents),
        steps=300,
        newest=newest,
    )
    return replace(made, **changed)
