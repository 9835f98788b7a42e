"""What all ranks have to have decided alike, as one number that is told with every update. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any
from zlib import crc32

from resilient_train.recover.knobs import KnobValues
from resilient_train.types import Cause, Incident

BITS = 24  # of a number that float32 holds exactly


def of_decisions(incidents: Sequence[Incident], in_force: Mapping[str, Any]) -> int:
    """Digest what changes with an incident only: the decisions so far, and the remedies in force as plain data.

    Incidents of the process alone are left out, such as a full disk: one rank may have met them.
    """
    made = [
        {
            "what": (one.anomaly.signal, one.anomaly.step, one.anomaly.tick, one.anomaly.since),
            "why": (one.diagnosis.cause, one.diagnosis.rows),
            "done": [(action.remedy, sorted(action.settings.items())) for action in one.decision.actions],
            "where": (one.decision.rung, one.rewound_to),
        }
        for one in incidents
        if one.diagnosis.cause is not Cause.PROCESS
    ]
    return crc32(json.dumps([made, in_force], sort_keys=True, default=str).encode())


def of_update(decisions: int, step: int, tick: int, start: int, samples: int, knobs: KnobValues) -> int:
    """Digest what an update is made of: made anew for each, so it is cheap."""
    # Factors in half their length: the last digit may be another on another machine, and makes no difference.
    factors = (knobs.lr, knobs.clip, knobs.eps, knobs.ceiling, knobs.leapt_to, knobs.higher_precision)
    whole = crc32(pack("<5q5f?", decisions, step, tick, start, samples, *factors))
    return (whole ^ (whole >> BITS)) & ((1 << BITS) - 1)
