"""Applies what was decided about an incident, and says what it cost."""

from __future__ import annotations

import time
from dataclasses import replace

from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.controls import Controls
from resilient_train.record.surroundings import REMEDY, REWIND, Phases
from resilient_train.recover.remedies import is_mild, remedy
from resilient_train.run_parts import RunParts
from resilient_train.types import Incident


def apply(
    incident: Incident,
    suspects: tuple[int, int],
    phases: Phases,
    parts: RunParts,
    controls: Controls,
    keeper: CheckpointKeeper,
    *,
    started: float,
    refused: bool = False,
) -> Incident:
    """Apply the remedies of an incident; return it with what was done. All ranks do this together.

    It may come from the samples at positions [start, stop) of `suspects`, and its treatment `started` before.
    """
    decision, step_before = incident.decision, parts.clock.step
    controls.begin(incident, suspects)
    if not is_mild(decision.actions):
        controls.knobs.trouble()
    for action in decision.actions:
        had_rewound = controls.rewound_to is not None
        remedy(action).apply(controls)
        phases.ended(REMEDY if had_rewound or controls.rewound_to is None else REWIND)
    if controls.rewound_to is not None:
        keeper.rewound(controls.rewound_to)
        parts.checks.rewound(controls.rewound_to, incident.anomaly.since, controls.knobs.lr)
    elif incident.anomaly.reached_weights and not is_mild(decision.actions):
        parts.checks.stayed(parts.clock.step, controls.knobs.lr)
    phases.extend_last()
    return replace(
        incident,
        decision=replace(decision, actions=(*decision.actions, *controls.chosen)),
        rewound_to=controls.rewound_to,
        steps_lost=step_before - parts.clock.step + refused,
        seconds=time.perf_counter() - started,
        trace=controls.trace,
        tried=controls.tried or incident.tried,
    )
